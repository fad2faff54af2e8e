"""Odd models: small ones, each with something that tools for ordinary models stumble over.

`ODD_MODELS` is a table for those who test what reads, changes or runs models: a backend, a transform, a verb. Every
entry says what is odd in it and what is to be expected of tuning it.
"""

from qdqspec.testing.odd.bodies import BODIES
from qdqspec.testing.odd.graphs import GRAPHS
from qdqspec.testing.odd.names import NAMES
from qdqspec.testing.odd.tensors import TENSORS
from qdqspec.testing.odd.written import OddModel

ODD_MODELS: tuple[OddModel, ...] = (*NAMES, *BODIES, *TENSORS, *GRAPHS)

__all__ = ["ODD_MODELS", "OddModel"]
