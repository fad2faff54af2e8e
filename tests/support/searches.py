"""Placements by one rule, for tests of searches."""

from __future__ import annotations

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._classes import pure_labels
from qdqspec.types import Placement


def pure_placements(space: SchemeSpace) -> list[Placement]:
    """The reference, then those of `pure_labels`."""
    return [space.resolve({}), *map(space.resolve, pure_labels(space))]
