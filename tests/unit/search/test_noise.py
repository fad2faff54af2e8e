"""Noise of blocks that share tensors, and the equal shares of blocks in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import drawn_noise

from qdqspec.search._noise import BlockNoise, FairShares, SharedNoise
from qdqspec.search.crossings import FP


@given(count=st.integers(1, 8), seed=st.integers(0, 10_000), steps=st.integers(1, 8))
def test_noise_and_shares_are_updated_as_if_computed_anew(count: int, seed: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    offered = [tuple(range(int(random.integers(1, 4)))) for _ in range(count)]
    noise = drawn_noise(offered, seed)
    shares = FairShares(noise, np.array([random.choice(codes) for codes in offered], np.int8))
    for _ in range(steps):
        block = int(random.integers(count))
        code = int(random.choice(offered[block]))
        before, added = noise.of(shares.codes), noise.added(shares.codes, block, code)
        shares.change(block, code)
        assert noise.of(shares.codes) - before == pytest.approx(added, abs=1e-12)
        assert shares.total == pytest.approx(noise.of(shares.codes), abs=1e-12)
        assert np.allclose(shares.saved, FairShares(noise, shares.codes).saved)
        assert noise.of(shares.codes) <= noise.largest * (1 + 1e-12)


def test_a_tensor_is_quantized_once_for_all_its_blocks() -> None:
    """Three neighbours with one tensor between each two: together less noise than the sum of each alone."""
    between = [SharedNoise(1.0, {block: frozenset({1}), block + 1: frozenset({1})}) for block in range(2)]
    noise = BlockNoise(np.array([[0.0, 0.1]] * 3), between)
    alone = [noise.of(np.eye(3, dtype=np.int8)[block]) for block in range(3)]
    assert alone == pytest.approx([1.1, 2.1, 1.1])
    assert noise.of(np.ones(3, np.int8)) == pytest.approx(2.3)
    shares = FairShares(noise, np.ones(3, np.int8))
    assert shares.saved[:, FP] == pytest.approx([0.6, 1.1, 0.6])
    assert noise.added(shares.codes, 1, FP) == pytest.approx(-0.1)
