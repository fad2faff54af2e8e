"""The default search: phases that propose placements from the times of kernels and the expected saving of a build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from qdqspec.search.base import Steps, Stepwise
from qdqspec.search.energy import Energy
from qdqspec.search.phases.compose import compose
from qdqspec.search.phases.flip import flip
from qdqspec.search.phases.front import front
from qdqspec.search.phases.leave_out import leave_out
from qdqspec.search.phases.uniform import uniform
from qdqspec.types import Trial

Phase: TypeAlias = Callable[["Attribution"], Steps[None]]


class Attribution(Stepwise):
    """The phases, repeated in order until none proposes anything new. Each may be removed from `phases`.

    The reference, profiled, and the seeds are built before. Each phase may assume `trials` and `energy`, which has
    learnt from all of them, and no phase before it:

    - `uniform` leaves profiles of each unit under each label, among neighbours that have it too.
    - `leave_out` leaves no label of a block in `energy` with which a placement did not build.
    - `front` leaves the placements of a front of time and accuracy, if one is sought.
    - `compose` leaves no composition, within the limit if the noise is known, that the energy expects to save
      `least_gain` of the incumbent's time.
    - `flip` leaves no change of a single block that the energy expects to save `least_gain` of the incumbent's time.

    ``least_gains`` is the share of the time that a build must be expected to save, by preset: less has more builds.
    """

    phases: ClassVar[Sequence[Phase]] = (uniform, leave_out, front, compose, flip)
    least_gains: ClassVar[Mapping[str, float]] = {"quick": 0.03, "default": 0.01, "extensive": 0.0}
    _energy: Energy | None = None

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
        """The energy of labellings. Its blocks are the kernels of the trials before it was first asked for.

        It has the noise of blocks, by rehearsals, once a limit binds, or for a front: one of a model that cannot be
        rehearsed counts all units as equally noisy.
        """
        is_front, guide = self.setup.pareto, self.guide
        if self._energy is None:
            self._energy = Energy.of(self.space, self.trials)
        if self._energy.noise is None and (is_front or guide.is_limited):
            self._energy.noise = guide.block_noise(self._energy.blocks, is_assumed=is_front)
        return self._energy

    @property
    def refused(self) -> list[str]:
        """The units of placements that failed and of none that was built."""
        failed, built = (
            {unit for trial in trials for unit, _ in trial.placement.labels}
            for trials in (self.failed, self.trials)
        )
        return [unit.id for unit in self.space.units if unit.id in failed - built]


strategy = Attribution
