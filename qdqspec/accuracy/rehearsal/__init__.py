"""Rehearsal: the accuracy of any placement of a model, computed with one graph that has a switch for every pair."""

from __future__ import annotations

from qdqspec.accuracy.rehearsal.graph import sites_of
from qdqspec.accuracy.rehearsal.rehearsal import (
    Rehearsal,
    RehearsalRefusedError,
    RehearsedEngine,
    Runtime,
    Subject,
    guiding_outputs,
)
from qdqspec.accuracy.rehearsal.sensitivity import Sensitivities, find_sensitivities

__all__ = [
    "Rehearsal",
    "RehearsalRefusedError",
    "RehearsedEngine",
    "Runtime",
    "Sensitivities",
    "Subject",
    "find_sensitivities",
    "guiding_outputs",
    "sites_of",
]
