"""The default search: whole-model builds with pure labels, compositions, draws, flips.

P1 builds the model with one label everywhere, where neighbours agree as they will in the end, so that each
operator's time under each label is read off with the least bias. P2 composes the best label of each fusion
block, with the cost of crossing between float and integer counted less and more, builds these, and learns
from their profiles. P3 draws further ones from the doubts of this cost model and of a Bayesian surrogate
that learns from measured totals. P4 flips single blocks and small groups of neighbours out of their class.
Where accuracy counts too, each block is heard alone between P2 and P3, and labellings that trade latency for
accuracy are built. May import floors 0 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._accuracy import TARGETS_DB, NoiseModel, noisiest_first, priced
from qdqspec.search._steps import Steps, Stepwise
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.blocks import CostModel, block_codes, flips, fuse, unit_labels
from qdqspec.search.crossings import FULL, Codes
from qdqspec.search.surrogate import Surrogate, classes_of
from qdqspec.types import NOT_CANDIDATES, Label, Placement, Trial

SHARES = (0.0, 0.5, 1.0, 2.0)  # how much a crossing counts in a composition
SURROGATE_PATIENCE = 12  # builds without a won race before P3 ends
DRAWS = 30  # models drawn for one proposal that was not built before
HEATING = 10  # draws after which the cost model's doubts have doubled
HOPE = 0.02  # a proposal expected to be slower than the incumbent by more than this is not built
FLIPS, FLIP_LOSSES = 16, 10  # builds of P4, and how many losses in a row end it
MARGINS_DB = (3.0, 6.0, 10.0)  # asked for beyond the target where the noise model proves too hopeful
DOUBT_DB = 1.0  # how far below the target a prediction may lie and still be tried
UNHEARD_DB = 20.0  # what a block counts as that could not be heard alone
ROUNDS = 5
PATIENCE = 2  # rounds without a won race before it ends: each still teaches the cost model
LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class Attribution(Stepwise):
    """The phases as one generator: it yields proposals and receives their trials."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._setup = setup
        self._random = random
        self._measured: list[Trial] = []
        self._noise: NoiseModel | None = None
        self._turn = 0  # whose draw comes first: the cost model's or the surrogate's
        super().__init__(self._phases(setup.space))

    def tell(self, trials: Sequence[Trial]) -> None:
        """Take the answers; when those of a whole step are there, think of the next step."""
        self._measured.extend(trial for trial in trials if trial.ok and trial.phase not in NOT_CANDIDATES)
        super().tell(trials)

    @property
    def _incumbent(self) -> Trial:
        return next(trial for trial in reversed(self._measured) if trial.incumbent)

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
            if self._setup.watches_accuracy:
                yield from self._listen(space, costs)
                yield from self._trade(space, costs)
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

    def _listen(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """Quantize each block alone, untimed, to hear what noise it makes; and take all of them together."""
        alone = [self._placed(space, costs, _single(costs, index)) for index in range(len(costs.blocks))]
        heard: dict[str, float] = {
            t.placement.digest: t.sqnr_db for t in self._measured if t.sqnr_db is not None
        }
        trials = yield [Proposal(placement=p, phase="sensitivity", timed=False) for p in alone]
        heard |= {t.placement.digest: t.sqnr_db for t in trials if t.sqnr_db is not None}
        everything = space.resolve(space.everything())
        self._noise = NoiseModel(
            [heard.get(placement.digest, UNHEARD_DB) for placement in alone], heard.get(everything.digest)
        )

    def _trade(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """Labellings between quickest and most accurate: by a price on noise, and noisiest blocks first to go."""
        least = self._setup.min_sqnr_db
        trials = yield [
            Proposal(placement=self._placed(space, costs, codes), phase="trade", profile=True)
            for codes in self._trades(costs)
            if self._setup.pareto or self._accurate(codes)
        ]
        costs.learn(trials)
        if least is not None and not any(t.sqnr_db is not None and t.sqnr_db >= least for t in trials):
            for margin in MARGINS_DB:  # the model was too hopeful: ask for more than is needed
                codes = noisiest_first(costs.compose(1.0), self._known_noise, least + margin)
                costs.learn((yield [_profiled(self._placed(space, costs, codes), "trade")]))

    def _trades(self, costs: CostModel) -> Iterator[Codes]:
        noise, least = self._known_noise, self._setup.min_sqnr_db
        targets = (
            TARGETS_DB if self._setup.pareto else () if least is None else (least, least + MARGINS_DB[0])
        )
        yield from priced(costs, noise)
        quickest = costs.compose(1.0)
        yield from (noisiest_first(quickest, noise, target) for target in targets)

    @property
    def _known_noise(self) -> NoiseModel:
        assert self._noise is not None
        return self._noise

    def _accurate(self, codes: Codes) -> bool:
        """Whether a labelling is expected to be accurate enough to win."""
        least = self._setup.min_sqnr_db
        return least is None or self._noise is None or self._noise.sqnr_db(codes) >= least - DOUBT_DB

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
            for trial in (yield [_profiled(proposal, "surrogate")]):
                winless = 0 if trial.incumbent else winless + 1
                costs.learn([trial])
                if trial.ok:
                    surrogate.observe(_codes(costs, trial), trial.ratio or 1.0)

    def _drawn(self, space: SchemeSpace, costs: CostModel, surrogate: Surrogate) -> Placement | None:
        """A placement not asked before that a drawn model likes best; none when the draws keep repeating.

        Cost model and surrogate take turns: the first knows blocks and neighbours from profiles, the second
        classes from measured totals. The surrogate's are built only where it expects nothing much worse than
        the incumbent.
        """
        incumbent = _codes(costs, self._incumbent)
        best = self._incumbent.ratio or 1.0
        for number in range(DRAWS):
            if number % 2 == self._turn:
                codes = costs.draw(self._random, heat=1 + number / HEATING)  # hotter while nothing new comes
            else:
                codes = surrogate.propose(incumbent, self._random)
                if surrogate.predict(codes) > best * (1 + HOPE):
                    continue
            placement = self._placed(space, costs, codes)
            if self.is_new(placement) and self._accurate(codes):
                self._turn = 1 - self._turn
                return placement
        return None

    def _refine(self, space: SchemeSpace, costs: CostModel) -> Steps:
        """P4: flip single blocks and small groups, the most promising first; what wins is the new start."""
        losses = builds = 0
        while losses < FLIP_LOSSES and builds < FLIPS:
            for codes in flips(costs, _codes(costs, self._incumbent)):
                placement = self._placed(space, costs, codes)
                if self.is_new(placement) and self._accurate(codes):
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


def _single(costs: CostModel, index: int) -> Codes:
    """One block quantized as far as it can be, all others float."""
    codes = np.zeros(len(costs.blocks), dtype=np.int8)
    offered = costs.blocks[index].codes
    codes[index] = FULL if FULL in offered else offered[-1]
    return codes


def _codes(costs: CostModel, trial: Trial) -> Codes:
    return block_codes(costs.blocks, dict(trial.placement.labels))


def _profiled(placement: Placement, phase: str) -> Proposal:
    return Proposal(placement=placement, phase=phase, profile=True)


strategy = Attribution
