"""Units of placement: regions of a model and the patterns they share. May import floors 0 and 1."""

from __future__ import annotations

from qdqspec.regions.expressions import BUILT_INS, Expression, allowed_nodes, matches, parse, unmatched
from qdqspec.regions.inspect import Inspection, inspect_model, render_text, to_json
from qdqspec.regions.pattern import Pattern, canonical
from qdqspec.regions.search import find_regions

__all__ = [
    "BUILT_INS",
    "Expression",
    "Inspection",
    "Pattern",
    "allowed_nodes",
    "canonical",
    "find_regions",
    "inspect_model",
    "matches",
    "parse",
    "render_text",
    "to_json",
    "unmatched",
]
