"""Odd models: small models with unusual properties that tools often do not handle.

`ODD_MODELS` is a table for tests of code that reads, changes or runs models: a backend, a transform, a
command. Each entry states its unusual property and the expected result of tuning it.
"""

from odd.bodies import BODIES
from odd.graphs import GRAPHS
from odd.names import NAMES
from odd.tensors import TENSORS
from odd.written import OddModel

ODD_MODELS: tuple[OddModel, ...] = (*NAMES, *BODIES, *TENSORS, *GRAPHS)

__all__ = ["ODD_MODELS", "OddModel"]
