"""Groups of nodes that a runtime runs as one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from qdqspec.types import LayerTime

K = TypeVar("K", bound=Hashable)


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


def joined(keys: Iterable[K], groups: Iterable[Iterable[K]]) -> tuple[tuple[K, ...], ...]:
    """The classes of keys that are in one group, directly or through other groups; both in the order of the keys."""
    parent = {key: key for key in keys}

    def root(key: K) -> K:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for group in groups:
        roots = [root(key) for key in group]
        parent.update((other, roots[0]) for other in roots)
    found: dict[K, list[K]] = {}
    for key in parent:
        found.setdefault(root(key), []).append(key)
    return tuple(map(tuple, found.values()))
