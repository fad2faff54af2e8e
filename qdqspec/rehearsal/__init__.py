"""Rehearsal: the accuracy of any placement of a model, computed with one graph that has a switch for every pair."""

from __future__ import annotations

from qdqspec.rehearsal.guiding import guiding_outputs, trailing_operators
from qdqspec.rehearsal.rehearsal import (
    KnownOutputs,
    Rehearsal,
    RehearsalRefusedError,
    RehearsedEngine,
    Runtime,
    Subject,
)
from qdqspec.rehearsal.sensitivity import Sensitivities, find_sensitivities, quick_runs
from qdqspec.rehearsal.switches import Switches, is_foreign, sites_by_label, sites_of

__all__ = [
    "KnownOutputs",
    "Rehearsal",
    "RehearsalRefusedError",
    "RehearsedEngine",
    "Runtime",
    "Sensitivities",
    "Subject",
    "Switches",
    "find_sensitivities",
    "guiding_outputs",
    "is_foreign",
    "quick_runs",
    "sites_by_label",
    "sites_of",
    "trailing_operators",
]
