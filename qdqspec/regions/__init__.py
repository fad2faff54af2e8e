"""Units of placement: regions of a model and the patterns they share."""

from __future__ import annotations

from qdqspec.regions.bodies import Body, find_bodies
from qdqspec.regions.expressions import (
    BUILT_INS,
    Expression,
    allowed_nodes,
    matched_nodes,
    matches,
    parse,
    require_matches,
    unmatched,
)
from qdqspec.regions.forecast import Forecast, forecast_tuning
from qdqspec.regions.inspect import Inspection, Judged, inspect_model, render_text, to_json
from qdqspec.regions.pattern import Pattern, canonical
from qdqspec.regions.search import find_regions

__all__ = [
    "BUILT_INS",
    "Body",
    "Expression",
    "Forecast",
    "Inspection",
    "Judged",
    "Pattern",
    "allowed_nodes",
    "canonical",
    "find_bodies",
    "find_regions",
    "forecast_tuning",
    "inspect_model",
    "matched_nodes",
    "matches",
    "parse",
    "render_text",
    "require_matches",
    "to_json",
    "unmatched",
]
