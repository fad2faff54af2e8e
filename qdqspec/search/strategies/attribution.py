"""The default search: phases that propose placements from the times of kernels, and a belief of what a build saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np

from qdqspec.search.base import SearchSetup, profiled
from qdqspec.search.blocks import Codes
from qdqspec.search.energy import Energy
from qdqspec.search.phases.compose import compose
from qdqspec.search.phases.flip import flip
from qdqspec.search.phases.measure_noise import measure_noise
from qdqspec.search.phases.uniform import uniform
from qdqspec.search.posterior import Posterior
from qdqspec.search.stepwise import Steps, Stepwise
from qdqspec.types import NOT_CANDIDATES, Placement, Trial

Phase: TypeAlias = Callable[["Attribution"], Steps[None]]


class Attribution(Stepwise):
    """The phases, repeated in order until none proposes anything new.

    The reference, profiled, and the seeds are built before. Each phase may assume `trials` and `energy`, which has
    learnt from all of them, and no phase before it:

    - `uniform` leaves profiles of each unit under each label, among neighbours that have it too.
    - `measure_noise` leaves `energy.noise`, if a front is sought or the limit was exceeded.
    - `compose` leaves no composition, within the limit if the noise is known, that the energy expects to save
      `least_gain` of the incumbent's time.
    - `flip` leaves no change of a single block that is expected to save `least_gain` of the incumbent's time.

    ``least_gains`` is the share of the time that a build must be expected to save, by preset: less has more builds.
    ``noise_slack`` is the factor by which the sum of noise may exceed what is allowed before a flip is not even
    rehearsed: more has more rehearsals, and finds flips whose noise does not add up.
    """

    phases: ClassVar[Sequence[Phase]] = (uniform, measure_noise, compose, flip)
    least_gains: ClassVar[Mapping[str, float]] = {"quick": 0.03, "default": 0.01, "extensive": 0.0}
    noise_slack: ClassVar[float] = 1.25
    steps: ClassVar[Mapping[str, str]] = {
        "pure": "uniform placements",
        "compose": "compositions of the fastest labels",
        "refine": "changes of single blocks",
    }

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:  # noqa: ARG002 - the seam's signature
        self.trials: list[Trial] = []  # candidates that ran
        self._energy: Energy | None = None
        self._believed: tuple[int, Posterior] | None = None  # after so many builds
        super().__init__(self._search(), setup)

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
        fresh = [trial for trial in trials if trial.ok and trial.phase not in NOT_CANDIDATES]
        self.trials += fresh
        if self._energy is not None:
            self._energy.learn(fresh)
        super().tell(trials)

    def _search(self) -> Steps[None]:
        yield [profiled(placement, "pure") for placement in (self.space.resolve({}), *self.setup.seeds)]
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
    def incumbent(self) -> Trial:
        """The trial of the best placement so far."""
        return next(trial for trial in reversed(self.trials) if trial.incumbent)

    @property
    def energy(self) -> Energy:
        """The energy of labellings. Its blocks are the kernels of the trials before it was first asked for."""
        if self._energy is None:
            self._energy = Energy.of(self.space, self.trials)
            if self.guide.is_limited:
                self._energy.noise = self.guide.block_noise(self._energy.blocks)
        return self._energy

    @property
    def is_exceeded(self) -> bool:
        """Whether the limit is binding, or a candidate was below the lowest SQNR worth a build."""
        least = self.guide.limits.aim_db
        measured = (trial.sqnr_db for trial in self.trials if trial.sqnr_db is not None)
        return self.guide.is_bound or (least is not None and any(db < least for db in measured))

    def composed(self, share: float) -> Placement | None:
        """The placement of least energy that is expected to meet the limits; ``None`` if there is none."""
        energy, guide = self.energy, self.guide
        if energy.noise is None or guide.limits.aim_db is None:
            return energy.placed(energy.minimize(share))
        return guide.within_limits(
            lambda least_db: guide.meet(least_db, lambda most: energy.placed(energy.within(most, share)))
        )

    def is_promising(self, codes: Codes) -> bool:
        """Whether a labelling is new and expected to be accurate enough and to save `least_gain` of the time."""
        placement, best, guide = self.energy.placed(codes), self.incumbent.ratio or 1.0, self.guide
        if not self.is_new(placement) or self.posterior.expected_gain(codes, best) < self.least_gain:
            return False
        return self._is_accurate(codes, placement) and guide.keeps_metric(placement)

    def _is_accurate(self, codes: Codes, placement: Placement) -> bool:
        """Whether a flip of the incumbent is expected to meet the limit, by its noise, and else by a rehearsal."""
        least, guide = self.guide.limits.aim_db, self.guide
        if least is None or not self.is_exceeded:
            return True
        here = self.incumbent.placement
        noise, sqnr_db = self.energy.noise_of(self.energy.codes_of(here)), guide.predicted_db(here)
        # noise and SQNR of the incumbent tell how noise adds up near it
        allowed = noise * 10 ** ((sqnr_db - least) / 10) if sqnr_db and noise else guide.allowed(least)
        is_quiet = self.energy.noise_of(codes) <= self.noise_slack * allowed
        return is_quiet and guide.admits(placement, least)

    @property
    def posterior(self) -> Posterior:
        """The belief about times after all builds so far."""
        if self._believed is None or self._believed[0] != len(self.trials):
            # eps is two standard deviations of a build; a ratio has the variance of two builds
            belief = Posterior(self.energy, self.eps / 2**0.5, self.trials)
            self._believed = len(self.trials), belief
        return self._believed[1]


strategy = Attribution
