"""How an accuracy oracle guides a strategy: which placements are worth a build, and what is left out of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.blocks import Block, unit_labels
from qdqspec.search.crossings import FP, Floats
from qdqspec.types import Label, Placement, Trial

DOUBT_SHARE = 0.5  # of the doubt, by which a prediction may lie below the limit: a chance of three in ten
BINDING_DB = 3.0  # a limit matters where everything quantized comes as near to it
UNKNOWN = 0.01  # noise over signal of a label that cannot be rehearsed, where nothing of its unit can


class Guide:
    """The oracle of a search, or none: then every placement is worth a build."""

    def __init__(self, oracle: AccuracyOracle | None) -> None:
        self._oracle = oracle

    @property
    def is_open(self) -> bool:
        """Whether there is an oracle."""
        return self._oracle is not None

    @property
    def has_noise(self) -> bool:
        """Whether the noise of single labels is known; finds it where it can be."""
        return self._oracle is not None and self._oracle.noise() is not None

    @property
    def doubt_db(self) -> float:
        """How far predictions are off, in dB."""
        return 0.0 if self._oracle is None else self._oracle.doubt_db

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate."""
        if self._oracle is not None:
            self._oracle.learn(trial)

    def predicted_db(self, placement: Placement) -> float | None:
        """The SQNR expected of a placement; ``None`` where that is unknown."""
        return None if self._oracle is None else self._oracle.predicted_db(placement)

    def admits(self, placement: Placement, least_db: float | None) -> bool:
        """Whether a placement may have ``least_db``; one of which nothing is known may."""
        if self._oracle is None or least_db is None or not placement.sites:
            return True
        predicted = self._oracle.predicted_db(placement)
        return predicted is None or predicted + DOUBT_SHARE * self.doubt_db >= least_db

    def is_binding(self, space: SchemeSpace, least_db: float | None) -> bool:
        """Whether everything quantized, in any format, is expected to be near a limit or below it."""
        if self._oracle is None or least_db is None or not space.units:
            return False
        found = [self.predicted_db(space.resolve(space.everything(c.name))) for c in space.choices]
        return any(db is not None and db < least_db + BINDING_DB for db in found)

    def powers(self, space: SchemeSpace, blocks: Sequence[Block]) -> Floats | None:
        """The noise of each block alone under each code; ``None`` where it is unknown."""
        noise = None if self._oracle is None else self._oracle.noise()
        if noise is None:
            return None
        powers = np.zeros((len(blocks), len(space.labels)))
        codes = np.full(len(blocks), FP, dtype=np.int8)
        for block in blocks:
            for code in block.codes:
                codes[block.index] = code
                labels = unit_labels(space, [block], codes)
                powers[block.index, code] = sum(
                    _noise(noise, unit, label) for unit, label in labels.items() if label != "fp"
                )
            codes[block.index] = FP
        return powers

    def thinned(
        self, space: SchemeSpace, labels: Mapping[str, Label], least_db: float, spent: Mapping[str, float]
    ) -> dict[str, Label]:
        """The labels without the units that make most noise for their time, as few as the limit takes.

        ``spent`` are milliseconds of units in floating point.
        """
        aim = least_db + self.doubt_db
        noise = None if self._oracle is None else self._oracle.noise()
        if noise is None or self._reaches(space, labels, aim):
            return dict(labels)
        ranked = sorted(
            labels, key=lambda unit: _noise(noise, unit, labels[unit]) / max(spent[unit], 1e-6), reverse=True
        )
        low, high = 0, len(ranked)  # without the first ``low`` it is below the limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._reaches(space, {unit: labels[unit] for unit in ranked[middle:]}, aim):
                high = middle
            else:
                low = middle
        return {unit: labels[unit] for unit in ranked[high:]}

    def _reaches(self, space: SchemeSpace, labels: Mapping[str, Label], aim: float) -> bool:
        predicted = self.predicted_db(space.resolve(labels))
        return predicted is None or predicted >= aim


def _noise(noise: Mapping[tuple[str, Label], float], unit: str, label: Label) -> float:
    """The noise of a unit; of a label that cannot be rehearsed, that of its noisiest other label."""
    known = noise.get((unit, label))
    if known is not None:
        return known
    return max((power for (name, _), power in noise.items() if name == unit), default=UNKNOWN)
