"""Odd models: small models with unusual properties that tools often do not handle.

`ODD_MODELS` is a table for tests of code that reads, changes or runs models: a backend, a transform, a
command. Each entry states its unusual property and the expected result of tuning it.
"""

from qdqspec.testing.odd.bodies import BODIES
from qdqspec.testing.odd.graphs import GRAPHS
from qdqspec.testing.odd.names import NAMES
from qdqspec.testing.odd.tensors import TENSORS
from qdqspec.testing.odd.written import OddModel

ODD_MODELS: tuple[OddModel, ...] = (*NAMES, *BODIES, *TENSORS, *GRAPHS)

__all__ = ["ODD_MODELS", "OddModel"]
