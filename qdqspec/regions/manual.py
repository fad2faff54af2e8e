"""Regions given from outside: globs of a spec, or groups of nodes fused by a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from qdqspec.errors import SpecError
from qdqspec.regions.blocks import Block, Leaf
from qdqspec.regions.flow import Flow
from qdqspec.registry import did_you_mean


def groups_of_globs(flow: Flow, globs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The node names that each tuple of globs matches; a node belongs to the first tuple that matches.

    Raises `SpecError` for a tuple that matches no node.
    """
    names = [flow.model.nodes[index].name for index in flow.order]
    chosen = []
    for patterns in globs:
        matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not matched:
            near = did_you_mean(patterns[0], names) if patterns else ""
            raise SpecError(
                f"the manual region {list(patterns)} matches no node{near}",
                where=flow.model.where,
                cure="`qdqspec inspect --verbose` lists the node names",
            )
        chosen.append(matched)
    return chosen


def blocks_of_groups(flow: Flow, groups: Iterable[Sequence[str]], rest: Iterable[Leaf]) -> list[Block]:
    """One leaf for each group of node names; other nodes stay in their leaf of ``rest``.

    Names that the model does not have are skipped: a backend may name nodes that it created.
    """
    place = {index: i for i, index in enumerate(flow.order)}
    by_name = flow.model.by_name
    taken: set[int] = set()
    found: list[Block] = []
    for group in groups:
        indices = {by_name[name].index for name in group if name in by_name} & place.keys()
        fresh = sorted(indices - taken, key=place.__getitem__)
        taken.update(fresh)
        if fresh:
            found.append(Leaf(fresh))
    for leaf in rest:
        left = [index for index in leaf.nodes if index not in taken]
        if left:
            found.append(Leaf(left))
    return found
