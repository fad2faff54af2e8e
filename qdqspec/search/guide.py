"""The accuracy of placements as predicted without a build: which are worth one, and which units to leave out.

Predictions decide what is built, and never what wins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.qdq import SchemeSpace
from qdqspec.search.blocks import UnitBlock, block_labels
from qdqspec.search.limits import Limits
from qdqspec.types import Label, LabelNoise, Placement, Trial

MOST_NOISE = 1e9  # over signal; of a unit whose rehearsed outputs have no signal it would be infinite


class AccuracyOracle(Protocol):
    """Predicts the SQNR of placements without building them; nothing is computed before the first call.

    Deterministic for a case and the trials learnt, in order, so that a resumed search asks for the same placements.
    """

    @property
    def doubt_db(self) -> float:
        """The standard deviation of its predictions, in dB, estimated from built candidates."""

    def noise(self) -> LabelNoise | None:
        """Noise power over signal power of each (unit, label) alone, where noise is additive; ``None`` if unknown."""

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a build of a placement; ``None`` if it cannot be computed."""

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate how its SQNR differs from the computed one."""


@dataclass(eq=False)
class Guide:
    """What is expected of the accuracy of placements: by an oracle, or none, and by the ``limits`` of the search.

    Nothing is left out for the SQNR limit unless it ``binds``, and placements of ``always`` are built whatever their
    metric. ``doubt_share`` is the safety margin in standard deviations of a prediction. Compositions aim above a limit
    by it: with a larger one fewer of them miss the limit, and they are slower. Other candidates are built if they are
    predicted at most this margin below the limit: with a larger one more of them are built. Compositions are at most
    ``close_db`` above their aim: less takes more predictions, and leaves less of the limit unused. A limit is binding
    if everything quantized is expected within ``binding_db`` of it: a larger one rehearses more candidates. Placements
    ``bracket_db`` below one that missed the metric are not built: a smaller one has fewer builds, and may lose a
    winner.
    """

    oracle: AccuracyOracle | None
    space: SchemeSpace
    limits: Limits
    _: KW_ONLY
    binds: bool = True
    always: Collection[Placement] = ()
    doubt_share: float = 0.5
    close_db: float = 0.4
    binding_db: float = 3.0
    bracket_db: float = 1.0
    # noise of each (unit, label), once known
    _shares: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    # of predictions over the sum of noise, by the last one
    _offset_db: float = field(default=0.0, init=False)

    def learn(self, trial: Trial) -> None:
        """Learn from a trial; the limits of a search that runs have learnt from it before."""
        self.limits.learn(trial)
        if self.oracle is not None:
            self.oracle.learn(trial)

    # ---- predictions ----------------------------------------------------------------------------

    @property
    def margin_db(self) -> float:
        """By how much compositions aim above a limit: they meet it with a probability of 0.7."""
        return 0.0 if self.oracle is None else self.doubt_share * self.oracle.doubt_db

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a placement, measured if it was built; ``None`` if unknown."""
        measured_db = self.limits.measured_db(placement)
        return self.unbuilt_db(placement) if measured_db is None else measured_db

    def unbuilt_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a placement without what was measured of it."""
        return None if self.oracle is None else self.oracle.predicted_db(placement)

    def admits(self, placement: Placement, least_db: float | None) -> bool:
        """Whether a placement may reach ``least_db``; true if nothing is known of it."""
        if least_db is None or math.isinf(least_db) or not placement.sites:
            return True
        predicted = self.predicted_db(placement)
        return predicted is None or predicted + self.margin_db >= least_db

    def keeps_metric(self, placement: Placement) -> bool:
        """Whether a placement is not expected to miss the limit of the task metric. The user's own are always allowed.

        A placement that is clearly noisier than one that missed the limit is expected to miss it too, whatever a
        rehearsal on few samples shows.
        """
        limits, oracle = self.limits, self.oracle
        if limits.metric is None or placement in self.always:
            return True
        if not self.admits(placement, limits.scored.missed_db - self.bracket_db):
            return False
        keeps = None if oracle is None else oracle.keeps_metric(placement)
        if keeps is not None and (db := self.predicted_db(placement)) is not None:
            limits.rehearse(placement, db, kept=keeps)
        return keeps is not False

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is not expected to be below a binding SQNR limit, or that of the task metric."""
        least_db = self.limits.min_sqnr_db if self.is_bound else None
        return self.admits(placement, least_db) and self.keeps_metric(placement)

    @property
    def is_bound(self) -> bool:
        """Whether the SQNR limit is binding: a build missed it, or everything quantized is expected near it."""
        return self.binds and (self.limits.is_missed or self._is_near)

    @cached_property
    def _is_near(self) -> bool:
        """Whether everything quantized is predicted at most ``binding_db`` above the SQNR limit."""
        space, least_db = self.space, self.limits.min_sqnr_db
        if self.oracle is None or least_db is None or not space.units:
            return False
        found = [self.predicted_db(space.resolve(space.everything(c.name))) for c in space.choices]
        return any(db is not None and db < least_db + self.binding_db for db in found)

    @property
    def is_limited(self) -> bool:
        """Whether the SQNR limit is binding, or a placement missed that of the task metric."""
        return self.is_bound or bool(self.limits.scored.lost)

    # ---- noise ----------------------------------------------------------------------------------

    @property
    def has_noise(self) -> bool:
        """Whether the noise of single labels is known; computes it if possible.

        Units share the noise of a tensor between them equally: it is there once.
        """
        noise = None if self._shares or self.oracle is None else self.oracle.noise()
        if noise is not None:
            parts = {(unit, part) for (unit, _), own in noise.parts.items() for part in own}
            owners = Counter(part for _, part in parts)
            self._shares = {
                key: sum(min(noise.powers[part], MOST_NOISE) / owners[part] for part in own)
                for key, own in noise.parts.items()
            }
        return bool(self._shares)

    def _sum_db(self, placement: Placement) -> float:
        """The SQNR of a placement whose noise is the sum of that of its units."""
        return -10 * math.log10(max(sum(self.noise_of(*each) for each in placement.labels), 1e-20))

    def noise_of(self, unit: str, label: Label) -> float:
        """The noise of a unit; for a label that cannot be rehearsed, the largest noise of the unit's other labels."""
        known = self._shares.get((unit, label))
        if known is not None:
            return known
        others = (self._shares.get((unit, other)) for other in self.space.by_id[unit].labels)
        return max((own for own in others if own is not None), default=0.01)

    def block_noise(self, blocks: Sequence[UnitBlock], *, is_assumed: bool = False) -> Floats | None:
        """The noise of blocks under each code; ``None`` if unknown, or that of units of equal noise if assumed so."""
        if not self.has_noise and not is_assumed:
            return None
        noise = np.zeros((len(blocks), len(self.space.labels)))
        for block in blocks:
            for code in block.codes:
                labels = block_labels(self.space, block, code)
                own = (self.noise_of(unit, label) for unit, label in labels.items() if label != "fp")
                noise[block.index, code] = sum(own)
        return noise

    # ---- placements within limits ---------------------------------------------------------------

    def fitted(
        self, labels: Mapping[str, Label], worth: Mapping[str, float], *, predictions: int = 8
    ) -> Placement:
        """Labels of the units of most worth that are expected to meet the limits; all where no limit is binding.

        ``worth`` is that of quantizing each unit, such as its time or its multiplications. All units count as equally
        noisy if the noise of single labels is unknown. For ``predictions`` see `meet`.
        """
        resolve, whole = self.space.resolve, self.space.resolve(labels)
        self.keeps_metric(resolve(self.space.everything()))  # shows whether the metric's limit is binding
        if not self.is_limited:
            return whole
        if not self.has_noise:
            if (predicted := self.unbuilt_db(whole)) is None:
                return whole
            self._offset_db = predicted - self._sum_db(whole)
        noise = {unit: self.noise_of(unit, label) for unit, label in labels.items()}
        found = self.within_limits(
            lambda most: resolve({unit: labels[unit] for unit in units_within(noise, worth, most)}),
            predictions=predictions,
        )
        return found or resolve({})

    def within_limits(
        self, placed: Callable[[float], Placement], *, rehearsals: int = 6, predictions: int = 8
    ) -> Placement | None:
        """The placement of the lowest SQNR that is expected to meet the limits; ``None`` for none.

        ``placed`` gives the placement for an allowed sum of noise. Each rehearsal of the task metric moves the SQNR,
        until it is bracketed. Fewer ``rehearsals`` take less time, and leave more of the metric's limit unused. For
        ``predictions`` see `meet`.
        """
        best = None
        for _ in range(rehearsals):
            least_db = self.limits.aim_db
            placement = None if least_db is None else self.meet(least_db, placed, predictions=predictions)
            if placement is None:
                break
            if self.keeps_metric(placement):
                best, scored = placement, self.limits.scored
                if not scored.lost or min(scored.kept, default=0.0) - scored.missed_db < self.bracket_db:
                    break
        return best

    def meet(
        self, least_db: float, placed: Callable[[float], Placement], *, predictions: int = 8
    ) -> Placement | None:
        """The placement with the most noise that is predicted to have this SQNR, and the margin; ``None`` for none.

        Noise is not exactly additive, so the allowed sum is corrected by the prediction for each placement. A
        correction that would repeat an allowance is replaced by the middle of what is bracketed, or by a step, doubled
        each time. Fewer ``predictions`` take less time, and leave more of the limit unused.
        """
        aim, best, seen, step = least_db + self.margin_db, None, set[Placement](), self.close_db
        low, high = -np.inf, np.inf  # allowances in decibels that met the aim, and that did not
        at = self._offset_db - aim
        for _ in range(predictions):
            placement = placed(10 ** (at / 10))
            predicted = self.predicted_db(placement)
            if predicted is None:
                return placement
            is_met = predicted >= aim
            best, low, high = (placement, at, high) if is_met else (best, low, at)
            if is_met and (placement in seen or predicted <= aim + self.close_db):
                break
            seen.add(placement)
            if placement.sites:
                self._offset_db = predicted - self._sum_db(placement)
            at = self._offset_db - aim if placement.sites else at + 10.0
            if not low < at < high and np.isfinite(low + high):
                at = (low + high) / 2
            elif not low < at < high:
                at, step = low + step if is_met else high - step, 2 * step
        return best


def units_within(
    noise: Mapping[str, float], worth: Mapping[str, float], allowed: float, *, steps: int = 10_000
) -> list[str]:
    """The units of the most worth whose noise together is at most ``allowed``: a knapsack problem.

    Solved by dynamic programming: HiGHS, in `scipy.optimize.milp`, prints on the terminal whatever its options are.
    Noise is rounded up to ``steps`` parts of what is allowed. Fewer take less time, and leave more of it unused.
    """
    units = [unit for unit, power in noise.items() if power <= allowed]
    whole = max(math.fsum(worth[unit] for unit in units), 1e-9)
    costs = [math.ceil(noise[unit] / allowed * steps) for unit in units]
    most = np.zeros(steps + 1)  # worth of the units so far, by their cost
    taken = np.zeros((len(units), steps + 1), bool)
    for unit, cost, row in zip(units, costs, taken, strict=True):
        more = most[: steps + 1 - cost] + worth[unit] / whole + 1e-6  # of equal worth, the most units
        row[cost:] = more > most[cost:]
        most[cost:] = np.maximum(most[cost:], more)
    chosen, left = list[str](), steps
    for unit, cost, row in reversed(list(zip(units, costs, taken, strict=True))):
        if row[left]:
            chosen.insert(0, unit)
            left -= cost
    return chosen
