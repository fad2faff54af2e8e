"""The default search: uniform labels, compositions from layer times, Thompson sampling, and local search.

P1 builds the model with one label everywhere, where neighbours agree as they will in the final placement, so that each
operator's time under each label is measured with the least bias. P2 composes the best label of each fusion block, with
several weights for the cost of crossing between float and integer, builds these, and learns from their profiles. P3
proposes labellings drawn from the uncertainty of this cost model and of a Bayesian surrogate that learns from measured
totals. P4 flips single blocks and small groups of neighbours. P2 to P4 are repeated until nothing new is proposed.

P3 and P4 propose what the surrogate expects to save at least `LEAST_GAINS` of the time: the mean reduction below the
time of the incumbent, increases counted as 0. So the search ends when it expects less of each further build.

If an accuracy oracle predicts that the limit excludes everything quantized, placements by one rule that meet the limit
come first, else one without the units that are noisiest by a rough analysis. Then P1 leaves out the units with the most
noise for their time, P2 composes the labelling of least time for the allowed noise, corrected by the oracle, and only
placements that the oracle admits are built. Labellings that are much faster and nearly meet the limit are changed block
by block until they are predicted to meet it. Without an oracle a sensitivity analysis by builds follows P2 once a
candidate is below the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import ClassVar

import numpy as np

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._bounded import TARGETS_DB, Bounded, measured_noise, priced
from qdqspec.search._classes import pure_labels
from qdqspec.search._noise import BlockNoise
from qdqspec.search._steps import APPROACHES, MARGINS_DB, Steps
from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.search.blocks import CostModel, block_labels, flips
from qdqspec.search.crossings import FP, Codes
from qdqspec.search.first import FirstPlacements
from qdqspec.search.select import reaches
from qdqspec.search.surrogate import Surrogate
from qdqspec.types import NOT_CANDIDATES, Placement, Trial, format_of, kind_of

SHARES = (0.0, 0.5, 1.0, 2.0)  # weights of crossings in a composition
PATIENCE = 2  # rounds of compositions without a won race before they end: each improves the cost model
DRAWS = 30  # models drawn for one new proposal
HEATING = 10  # draws after which the spread of the drawn cost models has doubled
LEAST_GAINS = {
    "quick": 0.03,
    "default": 0.01,
    "extensive": 0.0,
}  # expected of a build, as a share of the time
REFUSALS = 20  # consecutive rejections by the oracle before a phase ends
NEARLY_DB = 6.0  # below the limit, at most, where labellings are changed until they meet it, ...
MUCH = 0.1  # ... and of the incumbent's time that these save, at least
APPROACH_PREDICTIONS = 40  # of labellings near those
APPROACH_BUILDS, RISE_DB = 4, 0.05  # of these, and the smallest rise of the SQNR that counts
UNMEASURED_DB = 20.0  # assumed for a block that could not be measured alone


class Attribution(FirstPlacements):
    """The phases as one generator: it yields proposals and receives their trials."""

    steps: ClassVar[Mapping[str, str]] = {
        "pure": "uniform placements",
        "compose": "compositions of the fastest labels",
        "surrogate": "proposals of the cost model",
        "refine": "changes of single blocks",
    }

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._random = random
        self._measured: list[Trial] = []
        self._bounded: Bounded | None = None  # set once the noise of blocks is known
        self._believed: tuple[int, Surrogate] | None = None  # after so many builds
        self._turn = 0  # which draws first: the cost model (0) or the surrogate (1)
        super().__init__(self._phases(), setup)

    def tell(self, trials: Sequence[Trial]) -> None:
        """Receive trials; once those of a whole step are complete, advance to the next step."""
        self._measured.extend(trial for trial in trials if trial.ok and trial.phase not in NOT_CANDIDATES)
        super().tell(trials)

    @property
    def least_gain(self) -> float:
        """The share of the incumbent's time that a build must be expected to save."""
        return LEAST_GAINS[self._setup.preset]

    @property
    def _incumbent(self) -> Trial:
        return next(trial for trial in reversed(self._measured) if trial.incumbent)

    def _phases(self) -> Steps[None]:
        reference = self._space.resolve({})
        trials = yield [profiled(placement, "pure") for placement in (reference, *self._setup.seeds)]
        if self.is_bound or self.is_hardly_kept or not self.everything_keeps_metric:
            trials += yield from self.simple(trials)
            trials += yield from self.roughly_thinned(trials)
        self.rehearse_metric(trials)
        is_limited = self.is_limited and self.guide.has_noise
        trials += yield from self._thinned(trials) if is_limited else self._pure()
        costs = CostModel.of(self._space, trials)
        if not costs.blocks:
            return
        if is_limited:
            self._bounded = Bounded.of(costs, self.guide)
        built = -1
        while built < len(self._measured):
            built = len(self._measured)
            yield from self._compose(costs)
            yield from self._apply_accuracy(costs)
            yield from self._approach_limit(costs)
            yield from self._sample(costs)
            if self._must_analyse:
                yield from self._apply_accuracy(costs)
            yield from self._flip(costs)

    def _is_promising(self, costs: CostModel, codes: Codes) -> bool:
        """Whether the build of a labelling is expected to save `least_gain` of the time or more."""
        best = self._incumbent.ratio or 1.0
        return self._posterior(costs).expected_gain(codes, best) >= self.least_gain

    def _posterior(self, costs: CostModel) -> Surrogate:
        """The belief about times after all builds so far."""
        if self._believed is None or self._believed[0] != len(self._measured):
            # eps is two standard deviations of a build; a ratio has the variance of two builds
            surrogate = Surrogate(costs, noise=self.eps / 2**0.5)
            for trial in self._measured:
                if trial.ratio is not None:  # else it missed a limit, and was not timed
                    surrogate.observe(costs.codes_of(trial.placement), trial.ratio)
            self._believed = len(self._measured), surrogate
        return self._believed[1]

    def _pure(self) -> Steps[list[Trial]]:
        """P1 without a binding limit, or without the noise of labels."""
        placements = [self._space.resolve(labels) for labels in pure_labels(self._space)]
        if self.is_limited:  # without the noise of labels
            placements = [placement for placement in placements if self.is_worth_building(placement)]
        if not placements:
            return []
        return (yield [profiled(placement, "pure") for placement in placements])

    def _thinned(self, past: Sequence[Trial]) -> Steps[list[Trial]]:
        """P1 under a limit: simple and pure placements without the units with the most noise for their time.

        Those that are expected to quantize most of the time come first; each is built before the next is thinned.
        """
        trials, simple = list[Trial](), self._by_thinned_time(past)
        trials += yield from self.recomposed(past, rough=False)
        for labels in simple:
            placement = self._space.resolve(self.thinned(labels, past))
            if placement.sites:
                trials += yield [profiled(placement, "pure")]
                trials += yield from self.recomposed([*past, *trials], rough=False)
        return trials

    @property
    def _must_analyse(self) -> bool:
        """Whether the sensitivity analysis is due: for a front, or after a candidate below the limit.

        Where placements are predicted and labels could not be measured, builds of single blocks would take longer.
        """
        if self._bounded is not None or not (self._setup.pareto or self._is_exceeded):
            return False
        return self._setup.pareto or self.guide.has_noise or self.guide.predicted_db(self.everything) is None

    @property
    def _is_exceeded(self) -> bool:
        """Whether the limit is binding, or a candidate was below the lowest SQNR worth a build."""
        least = self.least_db
        measured = (trial.sqnr_db for trial in self._measured if trial.sqnr_db is not None)
        return self.is_bound or (least is not None and any(db < least for db in measured))

    def _apply_accuracy(self, costs: CostModel) -> Steps[None]:
        """Under accuracy limits, measure each block's quantization error, and trade error for time."""
        if not self._must_analyse:
            return
        bounded = Bounded.of(costs, self.guide)
        if bounded is None:
            bounded = Bounded(costs, (yield from self._sensitivity_analysis(costs)), self.guide)
        self._bounded = bounded
        if self._setup.min_accuracy is not None:
            yield from self._approach(costs, bounded)
        yield from self._trade(costs, bounded)

    def _compose(self, costs: CostModel) -> Steps[None]:
        """P2: compose the best labels with several weights of crossings, learn, and repeat while it wins."""
        winless = 0
        while winless < PATIENCE:
            composed = (costs.placed(self.quickest(costs, self._bounded, share)) for share in SHARES)
            trials = yield [
                profiled(placement, "compose") for placement in composed if self.is_worth_building(placement)
            ]
            if not trials:
                return
            costs.learn(trials)
            winless = 0 if any(trial.incumbent for trial in trials) else winless + 1

    def _sensitivity_analysis(self, costs: CostModel) -> Steps[BlockNoise]:
        """The noise of each block, from the SQNR with it alone in each format and with all quantized; untimed."""
        space = self._space
        alone = [
            {
                name: space.resolve(block_labels(space, block, code))
                for name, code in fullest(space, block.codes).items()
            }
            for block in costs.blocks
        ]
        measured_db: dict[str, float] = {
            t.placement.digest: t.sqnr_db for t in self._measured if t.sqnr_db is not None
        }
        trials = yield [
            Proposal(placement=placement, phase="sensitivity", timed=False)
            for placements in alone
            for placement in placements.values()
        ]
        measured_db |= {t.placement.digest: t.sqnr_db for t in trials if t.sqnr_db is not None}
        together = {
            c.name: measured_db.get(space.resolve(space.everything(c.name)).digest) for c in space.choices
        }
        return measured_noise(
            space.labels,
            [
                {name: measured_db.get(p.digest, UNMEASURED_DB) for name, p in placed.items()}
                for placed in alone
            ],
            {name: known for name, known in together.items() if known is not None},
        )

    def _approach(self, costs: CostModel, bounded: Bounded) -> Steps[None]:
        """Search for the noise at which a task metric is at its limit: less after a rejection, more after a win.

        Ends if the next labelling is known, such as after one that was accurate enough and not faster.
        """
        more = 0.0
        for _ in range(APPROACHES):
            aim = self.least_db
            if aim is None:
                return
            codes = self.quickest(costs, bounded, more_db=more)
            placement = costs.placed(codes)
            if not self.is_new(placement):
                return
            trials = yield [profiled(placement, "trade")]
            costs.learn(trials)
            refused = any(not reaches(trial, None, self._setup.min_accuracy) for trial in trials)
            more = more + MARGINS_DB[0] if refused and self.least_db == aim else 0.0

    def _trade(self, costs: CostModel, bounded: Bounded) -> Steps[None]:
        """Labellings between fastest and most accurate, for several SQNR targets and prices of noise."""
        least, targets = self.least_db, list(TARGETS_DB)
        if not self._setup.pareto:
            targets = [] if least is None else [least, least + MARGINS_DB[0]]
        trials = yield [
            profiled(costs.placed(codes), "trade")
            for codes in chain(map(bounded.compose, targets), priced(costs, bounded.noise))
            if self._setup.pareto or self._accurate(costs, codes)
        ]
        costs.learn(trials)
        least = self._setup.min_sqnr_db  # the error of predictions is known for an SQNR only
        if least is not None and not any(t.sqnr_db is not None and t.sqnr_db >= least for t in trials):
            for margin in MARGINS_DB:  # predictions were too high: raise the target
                codes = self.quickest(costs, bounded, more_db=margin)
                costs.learn((yield [profiled(costs.placed(codes), "trade")]))

    def _accurate(self, costs: CostModel, codes: Codes, near: Codes | None = None) -> bool:
        """Whether a labelling is expected to be accurate enough to win; ``near`` as of `Bounded.admits`."""
        least = self.least_db
        if least is None:
            return True
        if self._bounded is not None:
            return self._bounded.admits(codes, least, near)
        return not self._is_exceeded or self.guide.admits(costs.placed(codes), least)

    def _sample(self, costs: CostModel) -> Steps[None]:
        """P3: build placements that a drawn model predicts to be fastest, while enough is expected of one."""
        while not self._must_analyse and (placement := self._drawn(costs)):
            costs.learn((yield [profiled(placement, "surrogate")]))

    def _drawn(self, costs: CostModel) -> Placement | None:
        """The new placement that a drawn model predicts to be fastest; ``None`` without enough of an expected gain.

        Cost model and surrogate alternate: the first models blocks and neighbours from profiles, the second classes
        from measured totals.
        """
        surrogate, incumbent, refusals = self._posterior(costs), costs.codes_of(self._incumbent.placement), 0
        for number in range(DRAWS):
            if number % 2 == self._turn:
                # larger spread while nothing new comes
                codes = costs.draw(self._random, heat=1 + number / HEATING)
            else:
                codes = surrogate.propose(incumbent, self._random)
            if self._bounded is not None and self.least_db is not None:
                codes = self._bounded.reduced(codes, self.least_db)
            placement = costs.placed(codes)
            if self._is_promising(costs, codes) and self.is_new(placement):
                if self._accurate(costs, codes) and self.keeps_metric(placement):
                    self._turn = 1 - self._turn
                    return placement
                refusals += 1
            if refusals == REFUSALS:
                break
        return None

    def _flip(self, costs: CostModel) -> Steps[None]:
        """P4: flip single blocks and small groups of neighbours, the most promising first; a win is the new start."""
        placement = next(self._flipped(costs), None)
        while placement is not None:
            yield [Proposal(placement=placement, phase="refine")]
            placement = next(self._flipped(costs), None)

    def _flipped(self, costs: CostModel) -> Iterator[Placement]:
        """New placements near the incumbent that are expected to be accurate enough, the most promising first.

        Noise of neighbours that share a tensor does not add up, and the oracle decides more often than elsewhere. It
        ends after several rejections in a row.
        """
        refusals, here = 0, costs.codes_of(self._incumbent.placement)
        for codes in flips(costs, here):
            placement = costs.placed(codes)
            if not self.is_new(placement) or not self._is_promising(costs, codes):
                continue
            if self._accurate(costs, codes, here):
                refusals = 0
                yield placement
            elif self.guide.has_oracle and self._is_near(codes, here):
                refusals += 1
                if refusals == REFUSALS:
                    return

    def _approach_limit(self, costs: CostModel) -> Steps[None]:
        """Labellings that are much faster and nearly meet the SQNR limit, with blocks changed until they meet it.

        Behind operators that saturate, and by chance, noise does not add up: other labels of a block may raise the SQNR
        by a few decibels. Only those are built that are predicted to meet the limit.
        """
        least, bounded = self._setup.min_sqnr_db, self._bounded
        if least is None or bounded is None:
            return
        most = (1 - MUCH) * costs.predict(costs.codes_of(self._incumbent.placement))
        start = bounded.within(most)
        predicted_db = None if start is None else self.guide.predicted_db(costs.placed(start))
        if start is None or predicted_db is None or predicted_db < least - NEARLY_DB:
            return
        found = self._risen(costs, bounded, start, least + self.guide.margin_db, most)
        for placement in islice(found, APPROACH_BUILDS):
            trials = yield [profiled(placement, "approach")]
            costs.learn(trials)
            if any(trial.incumbent for trial in trials):
                return

    def _risen(
        self, costs: CostModel, bounded: Bounded, start: Codes, aim: float, most: float
    ) -> Iterator[Placement]:
        """New placements predicted to meet ``aim`` in at most ``most`` milliseconds, found by changes of single blocks.

        The next change is the one with the least noise of blocks that raises the predicted SQNR.
        """
        codes, best_db = start, self.guide.predicted_db(costs.placed(start))
        known, has_risen = {start.tobytes()}, costs.predict(start) <= most
        while has_risen and best_db is not None:
            has_risen = False
            for changed in bounded.changes(codes, most):
                if changed.tobytes() in known:
                    continue
                known.add(changed.tobytes())
                placement = costs.placed(changed)
                found_db = self.guide.predicted_db(placement)
                if found_db is None or len(known) > APPROACH_PREDICTIONS:
                    return
                if found_db >= aim and self.is_new(placement):
                    yield placement
                if found_db >= best_db + RISE_DB:
                    codes, best_db, has_risen = changed, found_db, True
                    break

    def _is_near(self, codes: Codes, here: Codes) -> bool:
        """Whether the noise of blocks alone does not exclude a labelling of P4."""
        least, bounded = self.least_db, self._bounded
        return least is None or bounded is None or bounded.is_within(codes, least, here)


def fullest(space: SchemeSpace, codes: Sequence[int]) -> dict[str, int]:
    """The code that quantizes most, for each format of the codes."""
    found: dict[str, int] = {}
    for code in codes:
        if code != FP:
            name = format_of(space.labels[code])
            if name not in found or kind_of(space.labels[code]) == "in+out":
                found[name] = code
    return found


strategy = Attribution
