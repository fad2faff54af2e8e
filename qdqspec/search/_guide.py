"""Uses an accuracy oracle to guide a strategy: which placements are worth a build, and which units to leave out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.parity.compare import power_of
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._classes import spent_by_unit
from qdqspec.search._noise import BlockNoise
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.blocks import UnitBlock, block_labels
from qdqspec.types import Label, LabelNoise, Placement, Trial

# Of the uncertainty: how far above a limit compositions aim, and how far below it candidates are still built.
DOUBT_SHARE = 0.5
BINDING_DB = 3.0  # a limit is binding if everything quantized is within this margin of it
THINNINGS = 6  # predictions for the number of units to leave out
LITTLE_SHARE = 0.02  # of the time: predictions end if more of them cannot regain more
MOVES = 3  # of one end in a row, after which a bracket is halved
# margin above the limit within which a labelling is not corrected; with rough noise, of a first placement
CLOSE_DB, ROUGHLY_CLOSE_DB = 0.4, 1.5
SLACK_DB = 1.0  # above the aim, from which units that were left out are tried again
REFILLS = 3  # predictions for these
MOST_NOISE = 1e9  # over signal; of a unit whose rehearsed outputs have no signal it would be infinite
UNKNOWN = 0.01  # noise over signal assumed for a unit of which no label can be rehearsed


class Guide:
    """The oracle of a search, or none; without one every placement is worth a build."""

    def __init__(self, oracle: AccuracyOracle | None, space: SchemeSpace) -> None:
        self._oracle = oracle
        self._space = space
        self._spent: Mapping[str, float] = {}  # milliseconds of units in floating point, once known
        # of labels in order of their noise: the predicted placements without the first ones, by the number of these
        self._families: dict[tuple[tuple[str, Label], ...], dict[int, Placement]] = {}
        # an SQNR and the noise of blocks that just meets it, by the last composition that did; of rough noise: true
        self.allowed: dict[bool, tuple[float, float]] = {}

    @property
    def has_oracle(self) -> bool:
        """Whether there is an oracle."""
        return self._oracle is not None

    @property
    def has_noise(self) -> bool:
        """Whether the noise of single labels is known; computes it if possible."""
        return self._oracle is not None and self._oracle.noise() is not None

    @property
    def has_rough_noise(self) -> bool:
        """Whether the noise of neighbours together is known and that of single labels would take much longer."""
        return self._oracle is not None and self._oracle.rough_noise(self._spent) is not None

    def _noise(self, *, rough: bool) -> LabelNoise | None:
        """The noise of single labels, or with ``rough`` that of neighbours together if it takes much less time."""
        if self._oracle is None:
            return None
        return (self._oracle.rough_noise(self._spent) if rough else None) or self._oracle.noise()

    @property
    def margin_db(self) -> float:
        """By how much compositions aim above a limit: they meet it with a probability of 0.7."""
        return 0.0 if self._oracle is None else DOUBT_SHARE * self._oracle.doubt_db

    def close_db(self, *, rough: bool) -> float:
        """The distance above a limit within which a labelling is not corrected any more; ``rough`` as of `thinned`."""
        return ROUGHLY_CLOSE_DB if rough and self.has_rough_noise else CLOSE_DB

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate, or from the reference the time of units."""
        if trial.layers and not trial.placement.sites and not trial.subgraph:
            self._spent = spent_by_unit(self._space, trial.layers)
        if self._oracle is not None:
            self._oracle.learn(trial)

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a placement; ``None`` if unknown."""
        return None if self._oracle is None else self._oracle.predicted_db(placement)

    def roughly_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement on very few samples; ``None`` if unknown."""
        return None if self._oracle is None else self._oracle.roughly_db(placement)

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""
        return None if self._oracle is None else self._oracle.keeps_metric(placement)

    def admits(self, placement: Placement, least_db: float | None) -> bool:
        """Whether a placement may reach ``least_db``; true if nothing is known of it."""
        if self._oracle is None or least_db is None or not placement.sites:
            return True
        predicted = self._oracle.predicted_db(placement)
        return predicted is None or predicted + self.margin_db >= least_db

    def is_binding(self, least_db: float | None) -> bool:
        """Whether everything quantized, in any format, is expected to be near a limit or below it."""
        space = self._space
        if self._oracle is None or least_db is None or not space.units:
            return False
        found = [self.predicted_db(space.resolve(space.everything(c.name))) for c in space.choices]
        return any(db is not None and db < least_db + BINDING_DB for db in found)

    def block_noise(self, blocks: Sequence[UnitBlock], *, rough: bool = False) -> BlockNoise | None:
        """The noise of blocks under each code; ``None`` if unknown. ``rough`` as of `thinned`."""
        noise = self._noise(rough=rough)
        if noise is None:
            return None
        own, parts = np.zeros((len(blocks), len(self._space.labels))), dict[int, dict[int, set[int]]]()
        for block in blocks:
            for code in block.codes:
                for unit, label in block_labels(self._space, block, code).items():
                    known = noise.parts.get((unit, label))
                    if known is None and label != "fp":
                        own[block.index, code] += _noise_of(unit, label, noise)
                    for part in known or ():
                        parts.setdefault(part, {}).setdefault(block.index, set()).add(code)
        return BlockNoise.of_parts(own, parts, [min(power, MOST_NOISE) for power in noise.powers])

    def thinned(
        self,
        labels: Mapping[str, Label],
        least_db: float,
        spent: Mapping[str, float],
        *,
        rough: bool = False,
    ) -> dict[str, Label]:
        """The labels without the units with the most noise for their time, as few as the limit requires.

        Where a single unit has so much noise that only leaving it out meets the limit, those left out before it are
        added again, as many as fit.

        ``spent`` is the time of units in floating point, in milliseconds. With ``rough`` the noise of neighbours
        together ranks the units.
        """
        aim = least_db + self.margin_db
        whole = self._space.resolve(labels)
        predicted = self.predicted_db(whole)
        if predicted is None or predicted >= aim:
            return dict(labels)
        noise = self._noise(rough=rough)
        if noise is None:
            return dict(labels)
        ranked, left = _ranked(noise, labels, spent)
        known = self._families.setdefault(tuple((unit, labels[unit]) for unit in ranked), {0: whole})
        # asked again, which costs nothing: what was built since may have changed the predictions
        found = {number: self.predicted_db(placement) for number, placement in known.items()}
        points = {number: db for number, db in found.items() if db is not None}
        high = min((number for number, db in points.items() if db >= aim), default=len(ranked))
        low = max(number for number in points if number < high)  # the result is below the limit without these
        time = np.cumsum([0.0, *(spent[unit] for unit in ranked)])
        close_db, moves, was_met = self.close_db(rough=rough), 0, False  # moves of the same end in a row
        for _ in range(THINNINGS):
            is_close = points.get(high, np.inf) <= aim + close_db
            if high - low <= 1 or is_close or time[high] - time[low + 1] <= LITTLE_SHARE * time[-1]:
                break
            middle = (
                (low + high) // 2 if moves >= MOVES else _between(left, low, high, points, aim + close_db / 3)
            )
            kept = {unit: labels[unit] for unit in ranked[middle:]}
            placement = self._space.resolve(kept)
            predicted = self.predicted_db(placement)
            if predicted is None:
                return kept
            known[middle], points[middle] = placement, predicted
            is_met = predicted >= aim
            low, high = (low, middle) if is_met else (middle, high)
            moves, was_met = moves + 1 if is_met == was_met else 1, is_met
        kept = {unit: labels[unit] for unit in ranked[high:]}
        kept_db = points.get(high, -np.inf if kept else np.inf)
        if kept_db < aim + max(SLACK_DB, close_db):
            return kept
        if points[low] >= least_db:  # the aim is above the limit
            return {unit: labels[unit] for unit in ranked[low:]}
        slack = power_of(aim) - power_of(kept_db)
        fitting = _fitting(noise, labels, kept, ranked[:high], slack)
        more = {unit: labels[unit] for unit in fitting}
        if sum(spent[unit] for unit in more) < time[-1] - time[high]:
            return kept  # more conversions than gain
        return self._refilled(kept, more, aim, LITTLE_SHARE * time[-1], spent)

    def _refilled(
        self,
        kept: dict[str, Label],
        more: dict[str, Label],
        aim: float,
        least_time: float,
        spent: Mapping[str, float],
    ) -> dict[str, Label]:
        """The labels ``kept`` with the first of ``more``, as many as are predicted to reach the aim.

        Half as many after each prediction below it, and none if they would take less than ``least_time`` together.
        """
        for _ in range(REFILLS):
            if sum(spent[unit] for unit in more) <= least_time:
                break
            predicted = self.predicted_db(self._space.resolve(kept | more))
            if predicted is None:
                break
            if predicted >= aim:
                return kept | more
            more = dict(islice(more.items(), len(more) // 2))
        return kept

    def most_spent(
        self,
        labels: Mapping[str, Label],
        least_db: float,
        spent: Mapping[str, float],
        *,
        rough: bool = False,
    ) -> float:
        """The time that `thinned` labels are expected to quantize, by the sum of the noise of single units."""
        noise = self._noise(rough=rough)
        if noise is None:
            return sum(spent[unit] for unit in labels)
        ranked, left = _ranked(noise, labels, spent)
        return sum(spent[unit] for unit in ranked[int(np.searchsorted(-left, -power_of(least_db))) :])


def _fitting(
    noise: LabelNoise,
    labels: Mapping[str, Label],
    kept: Collection[str],
    units: Iterable[str],
    slack: float,
) -> list[str]:
    """Those of the units, from the least noise on, whose noise fits into what those before leave of the ``slack``."""
    found, present = (
        list[str](),
        {part for unit in kept for part in noise.parts.get((unit, labels[unit])) or ()},
    )
    for unit in sorted(units, key=lambda unit: _noise_of(unit, labels[unit], noise)):
        parts = noise.parts.get((unit, labels[unit]))
        if parts is None:
            added = _noise_of(unit, labels[unit], noise)
        else:
            added = noise.power_of(part for part in parts if part not in present)
        if added <= slack:
            found.append(unit)
            present.update(parts or ())
            slack -= added
    return found


def _ranked(
    noise: LabelNoise, labels: Mapping[str, Label], spent: Mapping[str, float]
) -> tuple[list[str], Floats]:
    """Units with the most noise for their time first, and the noise of the others without the first 0, 1, ..."""
    own = {unit: _noise_of(unit, label, noise) for unit, label in labels.items()}
    ranked = sorted(labels, key=lambda unit: own[unit] / max(spent[unit], 1e-6), reverse=True)
    left, present = [0.0], set[int]()
    for unit in reversed(ranked):
        parts = noise.parts.get((unit, labels[unit]))
        added = own[unit] if parts is None else noise.power_of(part for part in parts if part not in present)
        present.update(parts or ())
        left.append(left[-1] + min(added, MOST_NOISE))
    return ranked, np.array(left[::-1], np.float64)


def _between(left: Floats, low: int, high: int, points: Mapping[int, float], aim: float) -> int:
    """The number of units to leave out by the noise ``left`` and the predictions ``points`` below and above the aim."""
    if high in points and left[high]:
        added_db = -10 * np.log10(left[[low, high]])
        wanted = float(np.interp(aim, [points[low], points[high]], added_db))
    elif low and left[low]:
        wanted = aim - points[low] - 10 * math.log10(left[low])
    else:
        wanted = aim  # of the sum: everything may have so much noise that it does not add up
    return int(np.clip(np.searchsorted(-left, -power_of(wanted)), low + 1, high - 1))


def _noise_of(unit: str, label: Label, noise: LabelNoise) -> float:
    """The noise of a unit; for a label that cannot be rehearsed, the largest noise of the unit's other labels."""
    known = noise.get((unit, label))
    if known is None:
        known = max((power for (name, _), power in noise.items() if name == unit), default=UNKNOWN)
    return min(known, MOST_NOISE)
