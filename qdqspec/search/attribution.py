"""The default search: whole-model builds with pure labels, compositions, a surrogate, single flips.

P1 builds the model with one label everywhere, where neighbours agree as they will in the end, so that each
operator's time under each label is read off with the least bias. P2 composes the best label of each fusion
block, with the cost of crossing between float and integer counted not at all, half and full, builds these,
and learns from their profiles. P3 lets a Bayesian surrogate propose, class by class. P4 flips single blocks
out of their class. May import floors 0 to 3.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.blocks import CostModel, block_codes, flips, fuse, unit_labels
from qdqspec.search.crossings import Codes
from qdqspec.search.surrogate import Surrogate, classes_of
from qdqspec.types import Label, Placement, Trial

SHARES = (0.0, 0.5, 1.0)  # how much a crossing counts in a composition
SURROGATE_PATIENCE = 12  # builds without a won race before P3 ends
DRAWS = 20  # models drawn for one proposal that was not built before
HOPE = 0.02  # a proposal expected to be slower than the incumbent by more than this is not built
FLIPS, FLIP_LOSSES = 8, 5  # builds of P4, and how many losses in a row end it
ROUNDS = 5
PATIENCE = 2  # rounds without a won race before it ends: each still teaches the cost model
LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

Steps = Generator[list[Proposal], list[Trial], None]


class Attribution:
    """Ask/tell over the phases, written as generators: they yield questions and receive answers."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._setup = setup
        self._random = random
        self._measured: list[Trial] = []
        self._asked: set[str] = set()
        self._waiting: list[Proposal] = []
        self._answers: list[Trial] = []
        self._open = 0
        self._steps = self._phases(setup.space)
        self._advance(None)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Return the next proposals; none while answers to earlier ones are awaited, or at the end."""
        batch, self._waiting = self._waiting[:n], self._waiting[n:]
        self._open += len(batch)
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        """Take the answers; when those of a whole step are there, think of the next step."""
        self._answers.extend(trials)
        self._measured.extend(trial for trial in trials if trial.ok)
        self._open -= len(trials)
        if not self._waiting and not self._open:
            answers, self._answers = self._answers, []
            self._advance(answers)

    def done(self) -> bool:
        """Whether the phases have ended."""
        return not self._waiting and not self._open

    @property
    def _incumbent(self) -> Trial:
        return next(trial for trial in reversed(self._measured) if trial.incumbent)

    def _advance(self, answers: list[Trial] | None) -> None:
        """Run the phases to their next step that asks something new."""
        try:
            while not self._waiting:
                proposals = next(self._steps) if answers is None else self._steps.send(answers)
                self._waiting = self._unasked(proposals)
                answers = []
        except StopIteration:
            pass

    def _unasked(self, proposals: Iterable[Proposal]) -> list[Proposal]:
        fresh = []
        for proposal in proposals:
            if proposal.placement.digest not in self._asked:
                self._asked.add(proposal.placement.digest)
                fresh.append(proposal)
        return fresh

    def _phases(self, space: SchemeSpace) -> Steps:
        trials = yield [
            _profiled(placement, "pure") for placement in (*pure_placements(space), *self._setup.seeds)
        ]
        profiled = [trial for trial in trials if trial.ok and trial.layers]
        blocks = fuse(space, (trial.layers for trial in profiled))
        costs = CostModel(space, blocks)
        costs.learn(profiled)
        if blocks:
            yield from self._compose(space, costs)
            yield from self._explore(space, costs)
            yield from self._refine(space, costs)

    def _compose(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """P2: the best label of each block, crossings counted more or less; learn; again while it wins."""
        winless = 0
        for _ in range(ROUNDS):
            trials = yield [
                _profiled(self._placed(space, costs, costs.compose(share)), "compose") for share in SHARES
            ]
            costs.learn(trials)
            winless = 0 if any(trial.incumbent for trial in trials) else winless + 1
            if winless == PATIENCE or not trials:
                return

    def _explore(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """P3: build what the surrogate draws, until it expects nothing more or has not won for long."""
        surrogate = Surrogate(costs, classes_of(space, costs.blocks), self._setup.noise)
        for trial in self._measured:
            surrogate.observe(_codes(costs, trial), trial.ratio or 1.0)
        winless = 0
        while winless < SURROGATE_PATIENCE:
            proposal = self._drawn(space, costs, surrogate)
            if proposal is None:
                return
            for trial in (yield [Proposal(placement=proposal, phase="surrogate")]):
                winless = 0 if trial.incumbent else winless + 1
                if trial.ok:
                    surrogate.observe(_codes(costs, trial), trial.ratio or 1.0)

    def _drawn(self, space: SchemeSpace, costs: CostModel, surrogate: Surrogate) -> Placement | None:
        """A placement not asked before that a drawn model likes; none when the draws keep repeating.

        It also ends when even the most hopeful of them is not expected to gain what would count.
        """
        incumbent = _codes(costs, self._incumbent)
        best = self._incumbent.ratio or 1.0
        for _ in range(DRAWS):
            codes = surrogate.propose(incumbent, self._random)
            placement = self._placed(space, costs, codes)
            if placement.digest not in self._asked and surrogate.predict(codes) < best * (1 + HOPE):
                return placement
        return None

    def _refine(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """P4: flip single blocks, the most promising first; what wins is the new start."""
        losses = builds = 0
        while losses < FLIP_LOSSES and builds < FLIPS:
            for codes in flips(costs, _codes(costs, self._incumbent)):
                placement = self._placed(space, costs, codes)
                if placement.digest not in self._asked:
                    break
            else:
                return
            for trial in (yield [Proposal(placement=placement, phase="refine")]):
                builds += 1
                losses = 0 if trial.incumbent else losses + 1

    def _placed(self, space: SchemeSpace, costs: CostModel, codes: Codes) -> Placement:
        return space.resolve(unit_labels(space, costs.blocks, codes))


def pure_placements(space: SchemeSpace) -> list[Placement]:
    """The reference, everything quantized, linear operators alone with float and with integer outputs."""
    linear: dict[str, Label] = {unit.id: unit.full for unit in space.units if unit.op_type in LINEAR}
    choices: list[Mapping[str, Label]] = [{}, space.everything(), space.uniform("in-only"), linear]
    return [space.resolve(labels) for labels in choices]


def _codes(costs: CostModel, trial: Trial) -> Codes:
    return block_codes(costs.blocks, dict(trial.placement.labels))


def _profiled(placement: Placement, phase: str) -> Proposal:
    return Proposal(placement=placement, phase=phase, profile=True)


strategy = Attribution
