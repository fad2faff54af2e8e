"""Base class of strategies written as one generator, which yields proposals and receives their trials."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeAlias, TypeVar

from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.search.blocks import spent_by_unit
from qdqspec.search.guide import Guide
from qdqspec.search.repair import drop_noisiest_units
from qdqspec.types import Label, Placement, Trial

Result = TypeVar("Result")
Steps: TypeAlias = Generator[list[Proposal], list[Trial], Result]


class Stepwise:
    """Ask and tell over a generator.

    Repeated proposals, and those whose task metric is expected to miss its limit, are dropped and never answered.
    ``eps`` is the smallest significant difference, as trials report it; ``guide`` predicts accuracies. ``spent`` is the
    time of each unit in floating point, in milliseconds.
    """

    def __init__(self, steps: Steps[None], setup: SearchSetup) -> None:
        """The generator ``steps`` starts here: a subclass sets its own attributes before it calls this."""
        self.eps = 0.01
        self.setup = setup
        self.space = setup.space
        self.guide = Guide(
            setup.accuracy,
            setup.space,
            min_sqnr_db=setup.min_sqnr_db,
            min_accuracy=setup.min_accuracy,
            binds=not setup.pareto,
            always=setup.seeds,
        )
        self.spent = spent_by_unit(setup.space, ())
        self._steps = steps
        self._asked: dict[tuple[str, tuple[str, ...]], bool] = {}  # whether it was to be timed
        self._waiting: list[Proposal] = []  # of the present step, not yet asked for
        self._answers: list[Trial] = []
        self._unanswered = 0
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while earlier ones are unanswered, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._unanswered += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
        self.eps = next((trial.eps for trial in trials if trial.eps is not None), self.eps)
        for trial in trials:
            self.guide.learn(trial)
            if trial.layers and not trial.placement.sites and not trial.subgraph:
                self.spent = spent_by_unit(self.space, trial.layers)
        self._answers.extend(trials)
        self._unanswered -= len(trials)
        self._waiting = list(filter(self._may_be_built, self._waiting))
        if not self._waiting and not self._unanswered:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the steps have ended."""
        return not self._waiting and not self._unanswered

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the generator to its next step with a new proposal."""
        with suppress(StopIteration):
            while not self._waiting:
                proposals = next(self._steps) if answers is None else self._steps.send(answers)
                self._waiting = [
                    each for each in proposals if self._is_unasked(each) and self._may_be_built(each)
                ]
                answers = []

    def _is_unasked(self, proposal: Proposal) -> bool:
        """Note a proposal. One that was only measured for accuracy may still be raced."""
        key = (proposal.placement.digest, proposal.subgraph)
        is_unasked = key not in self._asked or (proposal.timed and not self._asked[key])
        self._asked[key] = proposal.timed or self._asked.get(key, False)
        return is_unasked

    def _may_be_built(self, proposal: Proposal) -> bool:
        """Whether a proposal is not built to win, or not expected to miss the metric's limit, by builds so far too."""
        is_candidate = proposal.timed and not proposal.subgraph and not proposal.informs
        return not is_candidate or self.guide.keeps_metric(proposal.placement)

    def first_proposals(self) -> list[Proposal]:
        """The reference, which is profiled, and the seeds."""
        reference = profiled(self.space.resolve({}), "pure")
        return [reference, *(Proposal(placement=seed, phase="seed") for seed in self.setup.seeds)]

    def is_new(self, placement: Placement) -> bool:
        """Whether timing a placement of the whole model was not requested yet, under any labels."""
        return not self._asked.get((placement.digest, ()), False)

    def is_worth_building(self, placement: Placement) -> bool:
        """Whether a placement is new, and not expected to miss a limit."""
        return self.is_new(placement) and self.guide.is_worth_building(placement)

    def fitted(self, labels: Mapping[str, Label]) -> Placement:
        """The labels without the units with the most noise for their time, as the limits require.

        All of them where no limit is binding; none where no placement is expected to meet the limits.
        """
        guide = self.guide
        if (self._everything_keeps_metric and not guide.is_limited) or guide.limits.aim_db is None:
            return self.space.resolve(labels)
        found = guide.within_limits(lambda least: drop_noisiest_units(guide, labels, self.spent, least))
        return found or self.space.resolve({})

    @cached_property
    def _everything_keeps_metric(self) -> bool:
        return self.guide.keeps_metric(self.space.resolve(self.space.everything()))

    def fitted_everything(self) -> list[Placement]:
        """Everything quantized, in each format, as far as the limits allow; without what is not worth a build."""
        everything = (self.space.everything(choice.name) for choice in self.space.choices)
        return [placed for placed in map(self.fitted, everything) if self.is_worth_building(placed)]
