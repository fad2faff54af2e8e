"""The default strategy on a simulated device: its phases, and accuracy as a constraint and an objective."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qdqspec.accuracy.compare import power_of
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.base import SearchSetup
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.search.posterior import Posterior
from qdqspec.search.select import front_of, reaches
from qdqspec.search.strategies.attribution import Attribution
from qdqspec.testing.strategies import Oracle, drive, small_space
from qdqspec.types import Placement, Trial


def sqnr_of(space: SchemeSpace) -> Callable[[Placement], float]:
    """The SQNR of a placement: every quantized unit adds noise, the second convolution most."""
    powers = {unit.id: power_of(45.0 - 4 * (index == 1) * 3) for index, unit in enumerate(space.units)}

    def sqnr_db(placement: Placement) -> float:
        noise = sum(powers[name] for name, _ in placement.labels)
        return 200.0 if noise == 0 else -10 * float(np.log10(noise))

    return sqnr_db


class Measuring(Oracle):
    """An oracle with SQNR, on which candidates below ``least`` do not win."""

    def __init__(self, space: SchemeSpace, seed: int, least: float | None) -> None:
        super().__init__(space, seed)
        self._sqnr, self._least = sqnr_of(space), least

    def answer(self, proposal):  # type: ignore[no-untyped-def] # as in the base class
        best = self._best
        trial = replace(super().answer(proposal), sqnr_db=self._sqnr(proposal.placement))
        if not proposal.timed or (self._least is not None and not reaches(trial, self._least)):
            self._best = best
            return replace(trial, incumbent=False, race=None)
        return trial


def searched(seed: int, **setup: object) -> tuple[list[Trial], Measuring]:
    space = small_space()
    least = setup.get("min_sqnr_db")
    oracle = Measuring(space, seed, least if isinstance(least, float) else None)
    strategy = Attribution(SearchSetup(space=space, clock="cpu", **setup), np.random.default_rng(seed))  # type: ignore[arg-type] # keyword arguments of the setup
    return drive(strategy, oracle), oracle


def test_the_order_of_phases() -> None:
    space = small_space()
    strategy = Attribution(SearchSetup(space=space, clock="cpu"), np.random.default_rng(0))
    phases = [trial.phase for trial in drive(strategy, Oracle(space))]
    order = ["pure", "compose", "refine"]
    assert phases == sorted(phases, key=order.index)
    assert phases.count("pure") >= 3
    assert "sensitivity" not in phases


@pytest.mark.parametrize("seed", range(5))
def test_the_winner_is_close_to_the_best_of_all_labellings(seed: int) -> None:
    space = small_space()
    oracle = Oracle(space, seed)
    strategy = Attribution(SearchSetup(space=space, clock="cpu"), np.random.default_rng(seed))
    found = min(oracle.cost(t.placement) for t in drive(strategy, oracle, trials=40))
    names = [unit.id for unit in space.units]
    all_labels = itertools.product(*(unit.labels for unit in space.units))
    best = min(oracle.cost(space.resolve(dict(zip(names, labels, strict=True)))) for labels in all_labels)
    assert found <= 1.05 * best


@pytest.mark.parametrize("seed", range(6))
def test_a_preset_that_expects_less_of_a_build_builds_more_and_is_not_slower(seed: int) -> None:
    space = small_space()
    built, times = [], []
    for preset in ("quick", "default", "extensive"):
        oracle = Oracle(space, seed)
        strategy = Attribution(
            SearchSetup(space=space, clock="cpu", preset=preset), np.random.default_rng(seed)
        )
        trials = drive(strategy, oracle)
        assert strategy.done()
        built.append(len(trials))
        times.append(oracle.cost([t.placement for t in trials if t.incumbent][-1]))
    assert built == sorted(built)
    assert built[1] < built[2]
    assert times[2] <= times[1] <= times[0]


@pytest.mark.parametrize("seed", range(6))
def test_the_search_ends_within_a_hundredth_of_what_many_more_builds_find(seed: int) -> None:
    space = small_space()
    found = {}
    for preset in ("default", "extensive"):
        oracle = Oracle(space, seed)
        setup = SearchSetup(space=space, clock="cpu", preset=preset)
        trials = drive(Attribution(setup, np.random.default_rng(seed)), oracle, trials=100)
        found[preset] = min(oracle.cost(trial.placement) for trial in trials)
    assert found["default"] <= 1.01 * found["extensive"]


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_starts_from_its_result_builds_no_more(seed: int) -> None:
    space = small_space()

    def built(*seeds: Placement) -> list[Trial]:
        setup = SearchSetup(space=space, clock="cpu", seeds=seeds)
        return drive(Attribution(setup, np.random.default_rng(seed)), Oracle(space, seed))

    cold = built()
    best = [trial.placement for trial in cold if trial.incumbent][-1]
    warm = built(best)
    assert len(warm) <= len(cold)
    assert [trial.placement for trial in warm if trial.incumbent][-1] == best
    assert space.resolve(space.everything()).digest in {trial.placement.digest for trial in warm}


def test_a_seed_that_is_much_slower_starts_a_full_search() -> None:
    space = small_space()
    worse = space.resolve({space.units[-1].id: space.units[-1].full})
    setup = SearchSetup(space=space, clock="cpu", seeds=(worse,))
    trials = drive(Attribution(setup, np.random.default_rng(1)), Oracle(space, 1))
    ratios = {trial.placement.digest: trial.ratio or 1.0 for trial in trials}
    assert min(ratios.values()) < 0.9 * ratios[worse.digest]


@pytest.mark.parametrize("seed", range(4))
def test_the_winner_meets_the_sqnr_limit(seed: int) -> None:
    trials, oracle = searched(seed, min_sqnr_db=38.0)
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert winner.sqnr_db is not None
    assert winner.sqnr_db >= 38.0
    assert winner.placement.sites
    assert oracle.cost(winner.placement) < oracle.cost(oracle.space.resolve({}))


def test_blocks_are_measured_separately_once_and_are_no_candidates() -> None:
    trials, oracle = searched(0, min_sqnr_db=38.0)
    alone = [trial for trial in trials if trial.phase == "sensitivity"]
    assert 0 < len(alone) <= len(oracle.space.units)
    assert not any(trial.incumbent for trial in alone)


class Scoring(Oracle):
    """An oracle with the SQNR of all candidates, and a score of race winners that grows with it, with variation.

    Candidates with a low score do not win, and candidates far below the noise bar are not raced.
    """

    def __init__(self, space: SchemeSpace, seed: int, least: float) -> None:
        super().__init__(space, seed)
        self.least = least
        self.scored: list[Placement] = []
        self._sqnr, self._limits = sqnr_of(space), Limits(metric=MetricLimit(least=least))

    def score(self, placement: Placement) -> float:
        uneven = int(placement.digest[:4], 16) / 0xFFFF  # of two decibels
        return min(1.0, (self._sqnr(placement) + 2 * uneven) / 50)

    def answer(self, proposal):  # type: ignore[no-untyped-def] # as in the base class
        best = self._best
        sqnr_db = self._sqnr(proposal.placement)
        trial = replace(super().answer(proposal), sqnr_db=sqnr_db)
        if not proposal.timed or self._limits.is_far_below(sqnr_db):
            self._best = best
            return replace(trial, incumbent=False, race=None)
        if trial.incumbent and proposal.placement.sites:
            self.scored.append(proposal.placement)
            trial = replace(trial, accuracy=self.score(proposal.placement))
            self._limits.learn(trial)
            if not reaches(trial, None, self.least):
                self._best = best
                return replace(trial, incumbent=False)
        return trial


def scored_search(seed: int, least: float, **setup: object) -> tuple[list[Trial], Scoring]:
    space = small_space()
    oracle = Scoring(space, seed, least)
    asked = SearchSetup(space=space, clock="cpu", min_accuracy=least, **setup)  # type: ignore[arg-type] # keyword arguments of the setup
    return drive(Attribution(asked, np.random.default_rng(seed)), oracle, trials=60), oracle


@pytest.mark.parametrize("seed", range(6))
def test_the_winner_meets_the_metric_and_is_close_to_the_best_that_does(seed: int) -> None:
    trials, oracle = scored_search(seed, 0.78)
    space = oracle.space
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert winner.placement.sites
    assert oracle.score(winner.placement) >= 0.78
    names = [unit.id for unit in space.units]
    labellings = itertools.product(*(unit.labels for unit in space.units))
    placements = (space.resolve(dict(zip(names, labels, strict=True))) for labels in labellings)
    best = min(oracle.cost(placement) for placement in placements if oracle.score(placement) >= 0.78)
    assert oracle.cost(winner.placement) <= 1.08 * best


@pytest.mark.parametrize("seed", range(6))
def test_few_candidates_are_scored_and_none_twice(seed: int) -> None:
    trials, oracle = scored_search(seed, 0.78)
    assert len(oracle.scored) == len({placement.digest for placement in oracle.scored})
    assert len(oracle.scored) <= max(6, len(trials) / 2)


def test_a_block_measured_separately_may_still_be_raced() -> None:
    trials, _ = scored_search(5, 0.9)
    measured = {trial.placement.digest for trial in trials if trial.phase == "sensitivity"}
    assert any(t.placement.digest in measured for t in trials if t.phase not in ("sensitivity", "pure"))


def test_blocks_are_measured_only_where_a_metric_rejected_a_candidate() -> None:
    easy, oracle = scored_search(0, 0.1)
    assert oracle.scored
    assert "sensitivity" not in {trial.phase for trial in easy}
    hard, _ = scored_search(0, 0.78)
    assert "sensitivity" in {trial.phase for trial in hard}


def test_a_metric_that_no_candidate_meets_keeps_the_reference_with_few_scores() -> None:
    trials, oracle = scored_search(0, 0.999)
    assert [trial.placement.sites for trial in trials if trial.incumbent] == [frozenset()]
    assert len(oracle.scored) <= 16


def test_two_objectives_result_in_a_pareto_front() -> None:
    trials, _ = searched(1, pareto=True)
    front = front_of(trials, 8)
    assert len(front) >= 3
    times = [trial.ratio or 0.0 for trial in front]
    accuracies = [trial.sqnr_db or 0.0 for trial in front]
    assert times == sorted(times)
    assert accuracies == sorted(accuracies)
    beaten = [
        t
        for t in trials
        for f in front
        if (t.ratio or 9) < (f.ratio or 0) and (t.sqnr_db or 0) > (f.sqnr_db or 0)
    ]
    assert not beaten


def test_a_long_front_is_thinned_between_its_ends() -> None:
    space = small_space()
    trials = [
        Trial(number=n, phase="trade", placement=space.resolve({}), ratio=0.5 + n / 100, sqnr_db=20.0 + n)
        for n in range(30)
    ]
    thin = front_of(trials, 5)
    assert [thin[0].number, thin[-1].number, len(thin)] == [0, 29, 5]


@pytest.mark.parametrize("phase", Attribution.phases, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("least_db", [None, 38.0])
def test_a_search_without_one_phase_ends_within_its_limit(
    monkeypatch: pytest.MonkeyPatch, phase: object, least_db: float | None
) -> None:
    monkeypatch.setattr(Attribution, "phases", [each for each in Attribution.phases if each is not phase])
    trials, _ = searched(0, min_sqnr_db=least_db)
    assert not trials[0].placement.sites
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert least_db is None or winner.sqnr_db is None or winner.sqnr_db >= least_db


def test_the_mean_distance_from_the_optimum_is_small() -> None:
    distances = []
    for seed in range(30):
        space = small_space()
        oracle = Oracle(space, seed)
        setup = SearchSetup(space=space, clock="cpu")
        trials = drive(Attribution(setup, np.random.default_rng(seed)), oracle, trials=40)
        names = [unit.id for unit in space.units]
        labellings = itertools.product(*(unit.labels for unit in space.units))
        costs = (oracle.cost(space.resolve(dict(zip(names, each, strict=True)))) for each in labellings)
        distances.append(min(oracle.cost(trial.placement) for trial in trials) / min(costs))
    assert np.mean(distances) <= 1.01
    assert max(distances) <= 1.1


# ---- the belief about times ---------------------------------------------------------------------


def test_a_class_is_learnt_from_totals(learnt) -> None:
    energy, _ = learnt(4)
    codes = energy.minimize(1.0)
    before = Posterior(energy, 0.01).predict(codes)
    posterior = Posterior(energy, 0.01)
    for _ in range(30):
        posterior.observe(codes, before + 0.2)
    assert posterior.predict(codes) == pytest.approx(before + 0.2, abs=0.02)


def test_the_posterior_is_that_of_the_normal_equations(learnt) -> None:
    energy, _ = learnt(1)
    posterior = Posterior(energy, 0.02)
    random = np.random.default_rng(0)
    mean, precision = posterior._mean, np.linalg.inv(posterior._covariance)
    weighted = precision @ mean
    for _ in range(12):
        codes = np.array([random.choice(block.codes) for block in energy.blocks], dtype=np.int8)
        ratio = posterior.predict(codes) + random.normal(0, 0.1)
        features = posterior._features(codes)
        precision += np.outer(features, features) / 0.02**2
        weighted += features * ratio / 0.02**2
        posterior.observe(codes, ratio)
    assert posterior._mean == pytest.approx(np.linalg.solve(precision, weighted), abs=1e-8)
    assert posterior._covariance == pytest.approx(np.linalg.inv(precision), abs=1e-8)


def test_similar_blocks_are_one_class(learnt) -> None:
    energy, _ = learnt(0)
    kinds = [energy.space.by_id[block.units[0]].op_type for block in energy.blocks]
    assert len(set(energy.classes)) < len(energy.blocks)
    convs = {number for number, kind in zip(energy.classes, kinds, strict=True) if kind == "Conv"}
    assert len(convs) == 2  # with and without a Relu


def test_the_expected_gain_is_the_mean_improvement_in_draws(learnt) -> None:
    energy, _ = learnt(1)
    posterior = Posterior(energy, 0.02)
    codes = energy.minimize(1.0)
    posterior.observe(codes, posterior.predict(codes) + 0.05)
    features = posterior._features(codes)
    deviation = np.sqrt(features @ posterior._covariance @ features)
    ratios = np.random.default_rng(0).normal(posterior.predict(codes), deviation, 100_000)
    for best in (share * posterior.predict(codes) for share in (0.97, 1.0, 1.1)):
        expected = np.maximum(0, best - ratios).mean() / best
        assert posterior.expected_gain(codes, best) == pytest.approx(expected, rel=0.05, abs=2e-5)


def test_the_expected_gain_of_a_slower_labelling_is_zero(learnt) -> None:
    energy, _ = learnt(0)
    posterior = Posterior(energy, 0.01)
    codes = energy.minimize(1.0)
    for _ in range(20):
        posterior.observe(codes, 0.8)
    assert posterior.expected_gain(codes, 0.6) < 1e-6
    assert posterior.expected_gain(codes, 1.0) == pytest.approx(0.2, abs=0.01)
