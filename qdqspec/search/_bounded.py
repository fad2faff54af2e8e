"""Labellings that trade latency for accuracy: composed with additive noise, corrected by the predictions of an oracle.

Noise power at the output is additive over blocks above about 20 dB in total (HAWQ-V3, Yao et al. 2021, uses the same
additivity); below that the sum overestimates, which is conservative. Each block is measured alone once; the measurement
of the whole calibrates the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Self

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.parity.compare import power_of
from qdqspec.search._guide import Guide
from qdqspec.search._noise import BlockNoise, FairShares
from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import FP, Codes, all_float
from qdqspec.types import Label, format_of

PRICES = 12  # prices of noise, from free to prohibitive
TARGETS_DB = (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0)  # SQNR targets at which a front is sampled
CORRECTIONS = 6  # corrections of the allowed noise by the prediction for a composition
MOST_CORRECTED_DB = 10.0  # for a single correction
SLACK = 1.25  # factor by which a labelling may exceed the allowed noise and still be rehearsed
NEAR_SLACK = 4.0  # the same in a local search, also for the noise of the labelling it begins at
DOUBT_DB = 1.0  # how far below the limit the additive prediction may be for a build without an oracle
BISECTIONS = 9
DECADES = 6  # of the price, in either direction from the ratio of whole time to whole noise
PASSES = 3  # over all blocks, to spend the remaining noise
LEAST_RISE = 1e-9  # smallest cost in milliseconds of a label with less noise, so that ratios are finite


def measured_noise(
    labels: Sequence[Label],
    alone_db: Sequence[Mapping[str, float]],
    together_db: Mapping[str, float],
) -> BlockNoise:
    """The noise of each block alone under each code, from builds of single blocks.

    ``alone_db`` is, for each block, the SQNR with only that block quantized, by name of the format in ``labels``.
    ``together_db`` is the SQNR with all blocks quantized; it calibrates the sum. A label that was not measured gets the
    largest noise of the block's labels.
    """
    alone = [{name: power_of(value) for name, value in found.items()} for found in alone_db]
    for name, value in together_db.items():
        total = sum(block.get(name, 0.0) for block in alone)
        for block in alone if total else ():
            block |= {name: block[name] * power_of(value) / total} if name in block else {}
    powers: Floats = np.zeros((len(alone), len(labels)))
    for row, block in zip(powers, alone, strict=True):
        largest = max(block.values(), default=0.0)
        row[FP + 1 :] = [block.get(format_of(label), largest) for label in labels[FP + 1 :]]
    return BlockNoise(powers)


class Bounded:
    """Labellings of least predicted time for an SQNR, by the noise of blocks and the predictions of a guide."""

    def __init__(self, costs: CostModel, noise: BlockNoise, guide: Guide, *, rough: bool = False) -> None:
        """``rough``: the noise is that of neighbours measured together."""
        self.noise = noise
        self._costs = costs
        self._guide = guide
        self._rough = rough

    @classmethod
    def of(cls, costs: CostModel, guide: Guide, *, rough: bool = False) -> Self | None:
        """By the noise of single labels that the guide knows, or with ``rough`` of neighbours; ``None`` if unknown."""
        noise = guide.block_noise(costs.blocks, rough=rough)
        return None if noise is None else cls(costs, noise, guide, rough=rough)

    def compose(self, least_db: float, share: float = 1.0) -> Codes:
        """The labelling of least predicted time whose predicted SQNR is ``least_db`` plus the guide's margin.

        The allowed noise is corrected by the predictions for compositions, since noise is not exactly additive. Without
        predictions the sum decides.
        """
        aim = least_db + self._guide.margin_db
        most, free = self._allowed(aim), self.noise.of(self._costs.compose(share))
        best = all_float(len(self._costs.blocks))
        tried, is_met, close_db = set[bytes](), False, self._guide.close_db(rough=self._rough)
        for _ in range(CORRECTIONS):
            codes = self._costs.as_placed(least_time(self._costs, self.noise, most, share))
            if codes.tobytes() in tried:
                if not is_met or most >= free:
                    break
                most *= 10 ** (MOST_CORRECTED_DB / 10)  # the next block has much more noise
                continue
            tried.add(codes.tobytes())
            predicted = self._guide.predicted_db(self._costs.placed(codes))
            if predicted is None:
                return codes
            is_met = predicted >= aim
            if is_met and self._costs.predict(codes, share) <= self._costs.predict(best, share):
                best, self._guide.allowed[self._rough] = codes, (aim, most)
            is_free = is_met and most >= free  # the limit does not constrain it
            if is_free or aim <= predicted <= aim + close_db or not (is_met or codes.any()):
                break
            beyond = np.clip(predicted - aim - close_db / 2, -MOST_CORRECTED_DB, MOST_CORRECTED_DB)
            made = self.noise.of(codes)
            most = (max(made, most) if is_met else made) * 10 ** (float(beyond) / 10)
        return best

    def within(self, most: float) -> Codes | None:
        """A labelling with little noise that takes at most ``most`` milliseconds; ``None`` if there is none."""
        found = self._costs.compose(1.0)
        if self._costs.predict(found) > most:
            return None
        low, high = -float(DECADES), 0.0  # logarithm of the noise relative to that of the fastest
        whole = self.noise.of(found)
        for _ in range(BISECTIONS):
            codes = least_time(self._costs, self.noise, whole * 10 ** ((low + high) / 2))
            if self._costs.predict(codes) <= most:
                high, found = (low + high) / 2, codes
            else:
                low = (low + high) / 2
        return found

    def reduced(self, codes: Codes, least_db: float) -> Codes:
        """The labelling without the blocks with the most noise for their time, as many as the limit requires."""
        return with_less_noise(self._costs, self.noise, codes, self._allowed(least_db))

    def quieter(self, codes: Codes, least_db: float, most: int) -> Codes | None:
        """The fastest labelling with less noise in one block that is predicted to meet a limit and the guide's margin.

        ``most`` are predicted, the fastest first; ``None`` if none of them meets it.
        """
        own, aim = self.noise.of(codes), least_db + self._guide.margin_db
        changed = (with_change(codes, index, code) for _, index, code in self._costs.single_changes(codes))
        for found in islice((each for each in changed if self.noise.of(each) < own), most):
            predicted = self._guide.predicted_db(self._costs.placed(found))
            if predicted is None:
                return None
            if predicted >= aim:
                return found
        return None

    def admits(self, codes: Codes, least_db: float, near: Codes | None = None) -> bool:
        """Whether a labelling is worth a build: by the noise of blocks first, then by the guide.

        One ``near`` a labelling that meets the limit may have more noise of blocks, if the guide predicts it.
        """
        if not self._guide.has_oracle:
            return self.noise.of(codes) <= power_of(least_db - DOUBT_DB)
        placement = self._costs.placed(codes)
        if not self.is_within(codes, least_db):
            is_predicted = (
                near is not None
                and self.is_within(codes, least_db, near)
                and self._guide.predicted_db(placement) is not None
            )
            return is_predicted and self._guide.admits(placement, least_db)
        return self._guide.admits(placement, least_db)

    def is_within(self, codes: Codes, least_db: float, near: Codes | None = None) -> bool:
        """Whether the noise of blocks does not exclude a labelling, or one ``near`` another that meets the limit."""
        allowed = self._allowed(least_db)
        most = SLACK * allowed if near is None else NEAR_SLACK * max(allowed, self.noise.of(near))
        return self.noise.of(codes) <= most

    def changes(self, codes: Codes, most: float) -> list[Codes]:
        """Labellings that differ in one block and take at most ``most`` milliseconds, least noise of blocks first."""
        own, changes = self._costs.predict(codes), self._costs.single_changes(codes)
        found = (with_change(codes, index, code) for added, index, code in changes if own + added <= most)
        return sorted(found, key=self.noise.of)

    def _allowed(self, next_db: float) -> float:
        """The noise of blocks allowed for an SQNR, by the guide's last composition that met a target."""
        if self._rough not in self._guide.allowed:
            return power_of(next_db)
        known_db, most = self._guide.allowed[self._rough]
        return most * power_of(next_db - known_db)


def with_change(codes: Codes, index: int, code: int) -> Codes:
    """A labelling with another code of one block."""
    changed = codes.copy()
    changed[index] = code
    return changed


def least_time(costs: CostModel, noise: BlockNoise, most: float, share: float = 1.0) -> Codes:
    """The labelling of least predicted time found among those whose noise is at most ``most``.

    A knapsack problem, by Lagrangian relaxation (Everett, "Generalized Lagrange multiplier method", Operations Research
    11, 1963): noise gets a price, the descent of the cost model finds the labelling of least time plus price, and the
    price is bisected. That gives the convex part of the front; the rest of the allowed noise is spent greedily. Time
    includes the costs of conversions between blocks, weighted by ``share``. The predicted time is never longer than
    that of `with_less_noise` from the fastest labelling.
    """
    quickest = costs.compose(share)
    if noise.of(quickest) <= most:
        return quickest
    feasible, infeasible = all_float(len(costs.blocks)), quickest
    low, high = -float(DECADES), float(DECADES)
    rate = float(costs.times[:, FP].sum()) / max(most, noise.largest_part * 1e-12)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        codes = costs.compose(share, noise, rate * 10**middle, (feasible, infeasible))
        if noise.of(codes) <= most:
            high, feasible = middle, codes
        else:
            low, infeasible = middle, codes
    thorough = costs.compose(share, noise, rate * 10**high)  # from more starts than those of the bisection
    if noise.of(thorough) <= most:
        feasible = min(feasible, thorough, key=lambda codes: costs.predict(codes, share))
    starts = [feasible, *(with_less_noise(costs, noise, codes, most) for codes in (infeasible, quickest))]
    options = [*starts, *(_filled(costs, noise, codes, most, share) for codes in starts)]
    return min(options, key=lambda codes: costs.predict(codes, share))


def with_less_noise(costs: CostModel, noise: BlockNoise, start: Codes, most: float) -> Codes:
    """Greedily change blocks to labels with less noise, best ratio of noise to time first, until ``most`` holds."""
    shares, rows = FairShares(noise, start), np.arange(len(start))
    offered = np.zeros(costs.times.shape, dtype=bool)  # the codes that each block may take, float included
    offered[:, FP] = True
    for each in costs.blocks:
        offered[each.index, list(each.codes)] = True
    while True:
        if shares.total <= most and noise.of(shares.codes) <= most:  # a sum over changes has rounding errors
            return shares.codes
        rise = costs.times - costs.times[rows, shares.codes][:, None]
        worth = np.where(offered & (shares.saved > 0), shares.saved / np.maximum(rise, LEAST_RISE), -math.inf)
        block, code = map(int, np.unravel_index(int(np.argmax(worth)), worth.shape))
        if worth[block, code] == -math.inf:
            return all_float(len(start))  # the rest has noise under every label
        offered[block, shares.codes[block]] = False  # never again: parts are shared with other blocks by then
        shares.change(block, code)


def _filled(costs: CostModel, noise: BlockNoise, start: Codes, most: float, share: float) -> Codes:
    """Change single blocks to faster labels while the allowed noise lasts."""
    codes = start.copy()
    left = most - noise.of(codes)
    for _ in range(PASSES):
        gains = [change for change in costs.single_changes(codes, share) if change[0] < 0]
        changed = False
        for _, index, code in gains:
            block, current = costs.blocks[index], int(codes[index])
            added = noise.added(codes, index, code)
            own = costs.local_ms(block, current, codes, share)
            if added <= left and costs.local_ms(block, code, codes, share) < own:
                codes[index] = code
                left -= added
                changed = True
        if not changed:
            break
    return codes if noise.of(codes) <= most else start


def priced(costs: CostModel, noise: BlockNoise) -> Iterator[Codes]:
    """The fastest labellings at rising prices of noise: the convex part of the model's Pareto front."""
    largest = noise.largest
    if not largest:
        return
    rate = float(costs.times[:, FP].sum()) / largest
    for exponent in np.linspace(-2, 4, PRICES):
        yield costs.compose(1.0, noise, rate * 10**exponent)
