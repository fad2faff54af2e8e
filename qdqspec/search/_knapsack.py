"""Lagrangian relaxation of a knapsack problem: the labelling of least predicted time under a noise limit.

Everett, "Generalized Lagrange multiplier method", Operations Research 11, 1963: noise gets a price, the cost model's
descent finds the labelling of least time plus price, and the price is bisected. That gives the convex part of the
front; the rest of the allowed noise is spent greedily. Time includes the costs of conversions between blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import FP, Codes

BISECTIONS = 9
DECADES = 6  # of the price, in either direction from the ratio of whole time to whole noise
PASSES = 3  # over all blocks, to spend the remaining noise
LEAST_RISE = 1e-9  # smallest cost in milliseconds of a label with less noise, so that ratios are finite


def least_time(costs: CostModel, powers: Floats, most: float, share: float = 1.0) -> Codes:
    """The labelling of least predicted time found among those whose noise is at most ``most``.

    ``powers`` is the noise of each block under each code, which is additive. ``share`` scales the cost of crossings.
    The predicted time is never longer than that of `with_less_noise` from the fastest labelling.
    """
    quickest = costs.compose(share)
    if noise_of(powers, quickest) <= most:
        return quickest
    feasible, infeasible = np.full(len(costs.blocks), FP, dtype=np.int8), quickest
    low, high = -float(DECADES), float(DECADES)
    rate = float(costs.times[:, FP].sum()) / max(most, float(powers.max(initial=0.0)) * 1e-12)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        codes = costs.compose(share, rate * 10**middle * powers, (feasible, infeasible))
        if noise_of(powers, codes) <= most:
            high, feasible = middle, codes
        else:
            low, infeasible = middle, codes
    thorough = costs.compose(share, rate * 10**high * powers)  # from more starts than those of the bisection
    if noise_of(powers, thorough) <= most:
        feasible = min(feasible, thorough, key=lambda codes: costs.predict(codes, share))
    starts = [
        feasible,
        with_less_noise(costs, powers, infeasible, most),
        with_less_noise(costs, powers, quickest, most),
    ]
    options = [*starts, *(_filled(costs, powers, codes, most, share) for codes in starts)]
    return min(options, key=lambda codes: costs.predict(codes, share))


def noise_of(powers: Floats, codes: Codes) -> float:
    """The noise of a labelling: the sum over blocks."""
    return float(powers[np.arange(len(codes)), codes].sum())


def with_less_noise(costs: CostModel, powers: Floats, start: Codes, most: float) -> Codes:
    """Greedily change blocks to labels with less noise, best ratio of noise to time first, until ``most`` holds."""
    codes, rows = start.copy(), np.arange(len(start))
    offered = _offered(costs)
    while noise_of(powers, codes) > most:
        drop = powers[rows, codes][:, None] - powers
        rise = costs.times - costs.times[rows, codes][:, None]
        worth = np.where(offered & (drop > 0), drop / np.maximum(rise, LEAST_RISE), -math.inf)
        block, code = np.unravel_index(int(np.argmax(worth)), worth.shape)
        if worth[block, code] == -math.inf:
            return np.full(len(codes), FP, dtype=np.int8)  # the rest has noise under every label
        codes[block] = code
    return codes


def _filled(costs: CostModel, powers: Floats, start: Codes, most: float, share: float) -> Codes:
    """Change single blocks to faster labels while the allowed noise lasts."""
    codes = start.copy()
    left = most - noise_of(powers, codes)
    for _ in range(PASSES):
        gains = sorted(_gains(costs, codes, share))
        changed = False
        for _, index, code in gains:
            block, current = costs.blocks[index], int(codes[index])
            added = float(powers[index, code] - powers[index, current])
            own = costs.local_ms(block, current, codes, share)
            if added <= left and costs.local_ms(block, code, codes, share) < own:
                codes[index] = code
                left -= added
                changed = True
        if not changed:
            break
    return codes if noise_of(powers, codes) <= most else start


def _gains(costs: CostModel, codes: Codes, share: float) -> Sequence[tuple[float, int, int]]:
    """Changes of single blocks that reduce the predicted time: milliseconds, block, code."""
    found = []
    for block in costs.blocks:
        own = costs.local_ms(block, int(codes[block.index]), codes, share)
        for code in block.codes:
            change = costs.local_ms(block, code, codes, share) - own
            if change < 0:
                found.append((change, block.index, code))
    return found


def _offered(costs: CostModel) -> np.ndarray:
    """The codes each block may take, float included, as a mask."""
    offered = np.zeros(costs.times.shape, dtype=bool)
    offered[:, FP] = True
    for block in costs.blocks:
        offered[block.index, list(block.codes)] = True
    return offered
