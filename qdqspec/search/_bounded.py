"""Labellings under an accuracy limit: composed with additive noise, and corrected by the predictions of an oracle."""

from __future__ import annotations

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._accuracy import NoiseModel, power
from qdqspec.search._guide import CLOSE_DB, Guide
from qdqspec.search._knapsack import least_time, noise_of, with_less_noise
from qdqspec.search.blocks import CostModel, unit_labels
from qdqspec.search.crossings import FP, Codes
from qdqspec.types import Placement

CORRECTIONS = 6  # corrections of the allowed noise by the prediction for a composition
MOST_CORRECTED_DB = 10.0  # for a single correction
SLACK = 1.25  # factor by which a labelling may exceed the allowed noise and still be rehearsed
DOUBT_DB = 1.0  # how far below the limit the additive prediction may be for a build without an oracle


class Bounded:
    """Labellings of least predicted time for an SQNR, by the noise of blocks and the predictions of a guide."""

    def __init__(self, space: SchemeSpace, costs: CostModel, noise: NoiseModel, guide: Guide) -> None:
        self.noise = noise
        self._space = space
        self._costs = costs
        self._guide = guide
        self._found: tuple[float, float] | None = None  # an SQNR, and the noise of blocks that just meets it

    def compose(self, least_db: float, share: float = 1.0) -> Codes:
        """The labelling of least predicted time whose predicted SQNR is ``least_db`` plus the guide's uncertainty.

        The allowed noise is corrected by the predictions for compositions, since noise is not exactly additive. Without
        predictions the sum decides.
        """
        aim = least_db + self._guide.doubt_db
        most = self._allowed(aim)
        best = np.full(len(self._costs.blocks), FP, dtype=np.int8)
        for _ in range(CORRECTIONS):
            codes = least_time(self._costs, self.noise.powers, most, share)
            predicted = self._guide.predicted_db(self._placed(codes))
            if predicted is None:
                return codes
            if predicted >= aim and self._costs.predict(codes, share) <= self._costs.predict(best, share):
                best, self._found = codes, (aim, most)
            made = noise_of(self.noise.powers, codes)
            is_free = predicted >= aim and made < most / SLACK  # the limit does not constrain it
            if is_free or aim <= predicted <= aim + CLOSE_DB or not codes.any():
                break
            beyond = np.clip(predicted - aim - CLOSE_DB / 2, -MOST_CORRECTED_DB, MOST_CORRECTED_DB)
            most = made * 10 ** (float(beyond) / 10)
        return best

    def reduced(self, codes: Codes, least_db: float) -> Codes:
        """The labelling without the blocks with the most noise for their time, as many as the limit requires."""
        return with_less_noise(self._costs, self.noise.powers, codes, self._allowed(least_db))

    def admits(self, codes: Codes, least_db: float) -> bool:
        """Whether a labelling is worth a build: by the noise of blocks first, then by the guide."""
        if not self._guide.is_open:
            return self.noise.sqnr_db(codes) >= least_db - DOUBT_DB
        may_be = noise_of(self.noise.powers, codes) <= SLACK * self._allowed(least_db)
        return may_be and self._guide.admits(self._placed(codes), least_db)

    def _allowed(self, aim_db: float) -> float:
        """The noise of blocks allowed for an SQNR, by the last composition that met a target."""
        if self._found is None:
            return power(aim_db)
        known_db, most = self._found
        return most * power(aim_db - known_db)

    def _placed(self, codes: Codes) -> Placement:
        return self._space.resolve(unit_labels(self._space, self._costs.blocks, codes))
