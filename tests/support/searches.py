"""Placements by one rule and drawn noise, for tests of searches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._classes import pure_labels
from qdqspec.search._noise import BlockNoise, SharedNoise
from qdqspec.search.crossings import FP
from qdqspec.types import Placement


def pure_placements(space: SchemeSpace) -> list[Placement]:
    """The reference, then those of `pure_labels`."""
    return [space.resolve({}), *map(space.resolve, pure_labels(space))]


def drawn_noise(offered: Sequence[tuple[int, ...]], seed: int) -> BlockNoise:
    """Noise of blocks that offer these codes, and of tensors that two or three of them quantize under some codes."""
    random, count = np.random.default_rng(seed), len(offered)
    powers = 10.0 ** random.uniform(-5, -1, (count, 1 + max(map(max, offered))))
    powers[:, FP] = 0
    able = [block for block, codes in enumerate(offered) if set(codes) != {FP}]
    shared = []
    for _ in range(random.integers(0, 2 * count) if len(able) > 1 else 0):
        ends = random.choice(able, size=min(len(able), int(random.integers(2, 4))), replace=False)
        codes = {int(end): _some(offered[end], random) for end in ends}
        shared.append(SharedNoise(float(10 ** random.uniform(-5, -1)), codes))
    return BlockNoise(powers, shared)


def _some(codes: Sequence[int], random: np.random.Generator) -> frozenset[int]:
    """One or more of the codes that quantize."""
    able = [code for code in codes if code != FP]
    return frozenset(random.choice(able, size=int(random.integers(1, len(able) + 1)), replace=False).tolist())
