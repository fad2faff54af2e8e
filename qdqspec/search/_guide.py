"""Uses an accuracy oracle to guide a strategy: which placements are worth a build, and which units to leave out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.parity.compare import power_of
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.blocks import UnitBlock, block_labels
from qdqspec.types import Label, Placement, Trial

BINDING_DB = 3.0  # a limit is binding if everything quantized is within this margin of it
MOST_NOISE = 1e9  # over signal; of a unit whose rehearsed outputs have no signal it would be infinite
UNKNOWN = 0.01  # noise over signal assumed for a unit of which no label can be rehearsed


class Guide:
    """The oracle of a search, or none; without one every placement is worth a build.

    ``doubt_share`` is the safety margin in standard deviations of a prediction: compositions aim above a limit by it,
    and candidates are built up to it below. A larger one has fewer builds that miss the limit, and slower winners.
    """

    def __init__(
        self, oracle: AccuracyOracle | None, space: SchemeSpace, *, doubt_share: float = 0.5
    ) -> None:
        self._oracle = oracle
        self._space = space
        self._doubt_share = doubt_share
        self._shares = dict[tuple[str, str], float]()  # noise of each (unit, label), once known
        self._offset_db = 0.0  # of predictions over the sum of noise, by the last one

    def replace(self, oracle: AccuracyOracle) -> None:
        """Take another oracle."""
        self._oracle = oracle

    @property
    def has_noise(self) -> bool:
        """Whether the noise of single labels is known; computes it if possible.

        Units share the noise of a tensor between them equally: it is there once.
        """
        noise = None if self._shares or self._oracle is None else self._oracle.noise()
        if noise is not None:
            parts = {(unit, part) for (unit, _), own in noise.parts.items() for part in own}
            owners = Counter(part for _, part in parts)
            self._shares = {
                key: sum(min(noise.powers[part], MOST_NOISE) / owners[part] for part in own)
                for key, own in noise.parts.items()
            }
        return bool(self._shares)

    @property
    def margin_db(self) -> float:
        """By how much compositions aim above a limit: they meet it with a probability of 0.7."""
        return 0.0 if self._oracle is None else self._doubt_share * self._oracle.doubt_db

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate."""
        if self._oracle is not None:
            self._oracle.learn(trial)

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a placement; ``None`` if unknown."""
        return None if self._oracle is None else self._oracle.predicted_db(placement)

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""
        return None if self._oracle is None else self._oracle.keeps_metric(placement)

    def admits(self, placement: Placement, least_db: float | None) -> bool:
        """Whether a placement may reach ``least_db``; true if nothing is known of it."""
        if least_db is None or not placement.sites:
            return True
        predicted = self.predicted_db(placement)
        return predicted is None or predicted + self.margin_db >= least_db

    def is_binding(self, least_db: float | None) -> bool:
        """Whether everything quantized, in any format, is expected to be near a limit or below it."""
        space = self._space
        if self._oracle is None or least_db is None or not space.units:
            return False
        found = [self.predicted_db(space.resolve(space.everything(c.name))) for c in space.choices]
        return any(db is not None and db < least_db + BINDING_DB for db in found)

    # ---- noise ----------------------------------------------------------------------------------

    def noise_of(self, unit: str, label: Label) -> float:
        """The noise of a unit; for a label that cannot be rehearsed, the largest noise of the unit's other labels."""
        known = self._shares.get((unit, label))
        if known is not None:
            return known
        others = (self._shares.get((unit, other)) for other in self._space.by_id[unit].labels)
        return max((own for own in others if own is not None), default=UNKNOWN)

    def block_noise(self, blocks: Sequence[UnitBlock]) -> Floats | None:
        """The noise of blocks under each code; ``None`` if unknown."""
        if not self.has_noise:
            return None
        noise = np.zeros((len(blocks), len(self._space.labels)))
        for block in blocks:
            for code in block.codes:
                labels = block_labels(self._space, block, code)
                own = (self.noise_of(unit, label) for unit, label in labels.items() if label != "fp")
                noise[block.index, code] = sum(own)
        return noise

    # ---- limits ---------------------------------------------------------------------------------

    def allowed(self, least_db: float) -> float:
        """The sum of noise with which a placement is worth a build, by the last prediction."""
        return power_of(least_db - self.margin_db - self._offset_db)

    def meet(
        self,
        least_db: float,
        placed: Callable[[float], Placement],
        *,
        predictions: int = 8,
        close_db: float = 0.4,
    ) -> Placement | None:
        """The placement with the most noise that is predicted to have this SQNR, and the margin; ``None`` for none.

        ``placed`` gives the placement for an allowed sum of noise. Noise is not exactly additive, so what is allowed is
        corrected by the prediction for each placement, until one is at most ``close_db`` above the aim. Fewer
        ``predictions`` take less time, and leave more of the limit unused.
        """
        aim, best, seen = least_db + self.margin_db, None, set[Placement]()
        low, high = -np.inf, np.inf  # allowances in decibels that met the aim, and that did not
        at = self._offset_db - aim
        for _ in range(predictions):
            placement = placed(10 ** (at / 10))
            predicted = self.predicted_db(placement)
            if predicted is None:
                return placement
            is_met = predicted >= aim
            best, low, high = (placement, at, high) if is_met else (best, low, at)
            if is_met and (placement in seen or predicted <= aim + close_db):
                break
            seen.add(placement)
            made_db = 10 * math.log10(max(self._sum_of(placement), 1e-30))
            if placement.sites:
                self._offset_db = predicted + made_db
            at = self._offset_db - aim if placement.sites else at + 10.0
            if not low < at < high:
                at = (low + high) / 2 if np.isfinite(low + high) else at
        return best

    def _sum_of(self, placement: Placement) -> float:
        return sum(self.noise_of(unit, label) for unit, label in placement.labels)

    def thinned(
        self, labels: Mapping[str, Label], least_db: float, spent: Mapping[str, float]
    ) -> Placement | None:
        """The labels without the units with the most noise for their time, as few as an SQNR requires.

        ``spent`` is the time of units in floating point, in milliseconds. ``None`` if no placement has that SQNR.
        """
        if not self.has_noise:
            return self._space.resolve(labels)
        own = {unit: self.noise_of(unit, label) for unit, label in labels.items()}
        ranked = sorted(labels, key=lambda unit: own[unit] / max(spent[unit], 1e-6))

        def placed(most: float) -> Placement:
            kept, left = dict[str, Label](), most
            for unit in ranked:
                if own[unit] <= left:
                    kept[unit] = labels[unit]
                    left -= own[unit]
            return self._space.resolve(kept)

        return self.meet(least_db, placed)
