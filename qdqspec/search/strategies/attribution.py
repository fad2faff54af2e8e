"""The default search: phases that propose placements from the times of kernels and the expected saving of a build."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np

from qdqspec.accuracy import power_of
from qdqspec.search.base import Proposal, SearchSetup, Steps, Stepwise, profiled
from qdqspec.search.blocks import FP, Halving, block_labels, named_in, pure_labels
from qdqspec.search.energy import Energy
from qdqspec.types import Label, Placement, Trial, format_of, kind_of

Phase: TypeAlias = Callable[["Attribution"], Steps[None]]


class Attribution(Stepwise):
    """The phases, repeated in order until none proposes anything new. Each may be removed from `phases`.

    The reference, profiled, and the seeds are built before. Each phase may assume `trials` and `energy`, which has
    learnt from all of them, and no phase before it:

    - `uniform` leaves profiles of each unit under each label, among neighbours that have it too.
    - `leave_out` leaves no label of a block in `energy` with which a placement did not build.
    - `measure_noise` leaves `energy.noise`, if a front is sought or the limit was exceeded.
    - `compose` leaves no composition, within the limit if the noise is known, that the energy expects to save
      `least_gain` of the incumbent's time.
    - `flip` leaves no change of a single block that the energy expects to save `least_gain` of the incumbent's time.

    ``least_gains`` is the share of the time that a build must be expected to save, by preset: less has more builds.
    """

    least_gains: ClassVar[Mapping[str, float]] = {"quick": 0.03, "default": 0.01, "extensive": 0.0}

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._energy: Energy | None = None
        super().__init__(setup, random)

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
        if self._energy is not None:
            self._energy.learn(self.candidates_among(trials))
        super().tell(trials)

    def _search(self) -> Steps[None]:
        built = -1
        while built < len(self.trials) and self.space.units:
            built = len(self.trials)
            for phase in self.phases:
                yield from phase(self)

    @property
    def least_gain(self) -> float:
        """The share of the incumbent's time that a build must be expected to save."""
        return self.least_gains[self.setup.preset]

    @property
    def energy(self) -> Energy:
        """The energy of labellings. Its blocks are the kernels of the trials before it was first asked for."""
        if self._energy is None:
            self._energy = Energy.of(self.space, self.trials)
            if self.guide.is_limited:
                self._energy.noise = self.guide.block_noise(self._energy.blocks)
        return self._energy

    @property
    def refused(self) -> list[str]:
        """The units of placements that failed and of none that was built."""
        failed, built = (
            {unit for trial in trials for unit, _ in trial.placement.labels}
            for trials in (self.failed, self.trials)
        )
        return [unit.id for unit in self.space.units if unit.id in failed - built]

    # ---- phases ---------------------------------------------------------------------------------

    def uniform(self, *, least_db: float = -100.0) -> Steps[None]:
        """Build placements by one rule: everything quantized, one label everywhere, linear operators only.

        Neighbours agree as they will in the final placement, so that the time of each operator under each label is
        measured with the least bias. They are built for these times, even if they miss a binding limit and cannot win.
        Under a limit, those below ``least_db`` are not built: outputs of another shape count as -200 dB.
        """
        if any(trial.phase not in ("pure", "seed") for trial in self.trials):
            return  # each other build has told more than these would
        placements = [each for each in map(self.space.resolve, pure_labels(self.space)) if each.sites]
        if placements:
            self.guide.keeps_metric(placements[0])  # shows whether the limit of the metric is binding
        if self.guide.is_limited:
            placements = [each for each in placements if self.guide.admits(each, least_db)]
        yield [Proposal(placement=each, phase="pure", profile=True, informs=True) for each in placements]

    def leave_out(self) -> Steps[None]:
        """Halve placements that failed until the largest part that builds is known; compositions leave out the rest.

        Blocks that the error names, and those with another label that did not build, are suspected first.
        """
        energy = self.energy
        for failed in self.failed:  # grows with the parts that fail too
            codes = energy.codes_of(failed.placement)
            chosen = [block for block in energy.blocks if codes[block.index] != FP]
            if any(codes[block.index] not in block.codes for block in chosen):
                continue
            units = named_in(failed, self.space)
            suspected = [b for b in chosen if not units.isdisjoint(b.units) or b.index in energy.left_out]
            halving = Halving([block for block in chosen if block not in suspected], suspected)
            while halving.left:
                only = np.full_like(codes, FP)
                for block in halving.tried:
                    only[block.index] = codes[block.index]
                part = energy.placed(only)
                yield [Proposal(placement=part, phase="leave out", profile=True, informs=True)]
                halving.learn(builds=all(trial.placement != part for trial in self.failed))
            kept = halving.kept
            energy.leave_out({block.index: int(codes[block.index]) for block in chosen if block not in kept})

    def measure_noise(self, *, prices: int = 12) -> Steps[None]:
        """Give the energy the noise of each block, for a front of time and accuracy or if a limit was exceeded.

        It is known from rehearsals; where nothing can be rehearsed, each block is built alone, and only run for its
        accuracy. For a front, the labellings of least energy at rising prices are built: the convex part of the front
        of time and noise. More ``prices`` of noise give a front with more points, and more builds.
        """
        energy, guide, is_front = self.energy, self.guide, self.setup.pareto
        least_db, measured = guide.limits.aim_db, (trial.sqnr_db for trial in self.trials)
        is_exceeded = least_db is not None and any(db is not None and db < least_db for db in measured)
        if not (is_front or guide.is_bound or is_exceeded) or energy.noise is not None:
            return
        everything = self.space.resolve(self.space.everything())
        if not guide.has_noise and guide.unbuilt_db(everything) is None:
            noise = yield from self._built_noise()
            guide.predict_by(noise, self.trials)
        energy.noise = guide.block_noise(energy.blocks)
        if is_front and energy.noise is not None:
            largest = float(energy.noise.max(axis=1, initial=0.0).sum())
            rate = float(energy.times[:, FP].sum()) / max(largest, 1e-12)
            codes = [energy.minimize(price=rate * 10**each) for each in np.linspace(-2, 4, prices)]
            yield [profiled(energy.placed(each), "trade") for each in codes]

    def _built_noise(self) -> Steps[dict[tuple[str, Label], float]]:
        """The noise of units from builds of each block alone, in each format; its units share it equally."""
        space, blocks = self.space, self.energy.blocks
        labels, alone = space.labels, dict[tuple[int, str], Placement]()
        for block in blocks:
            quantized = (code for code in block.codes if code != FP)
            for code in sorted(quantized, key=lambda code: kind_of(labels[code]) != "in+out"):
                key = block.index, format_of(labels[code])
                alone.setdefault(key, space.resolve(block_labels(space, block, code)))
        trials = yield [Proposal(placement=each, phase="sensitivity", timed=False) for each in alone.values()]
        known = (*self.trials, *trials)
        measured = {trial.placement: trial.sqnr_db for trial in known if trial.sqnr_db is not None}
        return {
            # a block that could not be built alone counts as one of 20 dB
            (unit, label): power_of(measured.get(alone[block.index, format_of(label)], 20.0))
            / len(block.units)
            for block in blocks
            for unit in block.units
            for label in (*space.by_id[unit].labels[1:], *space.by_id[unit].halves)
            if (block.index, format_of(label)) in alone
        }

    def compose(self, *, shares: Sequence[float] = (0.0, 0.5, 1.0, 2.0)) -> Steps[None]:
        """Build labellings of least time with each weight of conversions, learn their profiles, and repeat while one
        saves enough.

        ``shares`` are the weights: more help where the times of conversions are estimated badly.
        """
        energy, guide = self.energy, self.guide

        def composed(share: float) -> Placement | None:
            """The placement of least energy that is expected to meet the limits; ``None`` if there is none."""
            if energy.noise is None or guide.limits.aim_db is None:
                return energy.placed(energy.minimize(share))
            return guide.within_limits(lambda most: energy.placed(energy.within(most, share)))

        while True:
            most_ms = (1 - self.least_gain) * energy.predict(energy.codes_of(self.incumbent.placement))
            proposed = [
                placement
                for placement in filter(None, map(composed, shares))
                if energy.predict(energy.codes_of(placement)) <= most_ms and self.is_worth_building(placement)
            ]
            trials = yield [profiled(placement, "compose") for placement in proposed]
            if not trials:
                return

    def flip(self) -> Steps[None]:
        """Build the fastest change of a block that is new, saves enough and is expected to meet the limits; a win is
        the new start.

        A composition leaves no change that saves time, unless it did not build or missed a limit. Where nothing needs
        to be saved, each change is built.
        """
        energy, least = self.energy, self.least_gain
        while True:
            start = energy.codes_of(self.incumbent.placement)
            most_ms = -least * energy.predict(start) if least else math.inf
            for added_ms, block, code in energy.changes(start):
                codes = start.copy()
                codes[block] = code
                if added_ms <= most_ms and self.is_worth_building(placement := energy.placed(codes)):
                    yield [profiled(placement, "refine")]
                    break
            else:
                return

    phases: ClassVar[Sequence[Phase]] = (uniform, leave_out, measure_noise, compose, flip)


strategy = Attribution
