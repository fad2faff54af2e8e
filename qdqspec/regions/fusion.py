"""Groups of nodes that a runtime runs as one kernel, for ``regions: {by: fusion}``."""

from __future__ import annotations

from collections.abc import Iterable

from qdqspec.types import LayerTime


def groups_of(layers: Iterable[LayerTime]) -> tuple[tuple[str, ...], ...]:
    """The nodes of each kernel that computes, in order of execution; a node belongs to its first kernel.

    Used as ``find_regions(model, rules, groups=groups_of(engine.layers()))``. Several kernels may share a
    node: a Softmax that a compiler splits in two is in the first one's group only.
    """
    taken: set[str] = set()
    groups: list[tuple[str, ...]] = []
    for layer in layers:
        own = tuple(node for node in layer.nodes if node not in taken) if not layer.boundary else ()
        taken.update(own)
        if own:
            groups.append(own)
    return tuple(groups)
