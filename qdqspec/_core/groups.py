"""Groups of keys, such as the tensors that have one type, joined where they share a key: disjoint sets."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


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
