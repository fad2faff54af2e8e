"""Rehearsal: the accuracy of any placement of a model, computed with one graph that has a switch for every pair."""

from __future__ import annotations

from qdqspec.rehearsal.engines import MOST
from qdqspec.rehearsal.guiding import guiding_outputs
from qdqspec.rehearsal.rehearsal import (
    KnownOutputs,
    Rehearsal,
    RehearsalRefusedError,
    RehearsedEngine,
    Runtime,
    Subject,
)
from qdqspec.rehearsal.sensitivity import Sensitivities, find_sensitivities, quick_runs
from qdqspec.rehearsal.switches import Switches, sites_of

__all__ = [
    "MOST",
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
    "quick_runs",
    "sites_of",
]
