"""The default strategy on a simulated device: its phases, and accuracy as a constraint and an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from searches import Additive, Device, ScoringDevice, all_placements, residual_space

from qdqspec._core.registry import resolve
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.units import Unit
from qdqspec.search.base import SearchSetup
from qdqspec.search.posterior import Posterior
from qdqspec.search.select import front_of
from qdqspec.search.strategies.attribution import Attribution
from qdqspec.testing.strategies import Oracle, drive, small_space
from qdqspec.types import Placement, Trial


def searched(seed: int, **setup: object) -> tuple[list[Trial], Device]:
    space = small_space()
    least = setup.get("min_sqnr_db")
    oracle = Device(space, seed, Additive(space), least if isinstance(least, float) else None)
    strategy = Attribution(SearchSetup(space=space, clock="cpu", **setup), np.random.default_rng(seed))  # type: ignore[arg-type] # keyword arguments of the setup
    return drive(strategy, oracle), oracle


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


@pytest.mark.parametrize("seed", range(4))
def test_the_winner_meets_the_sqnr_limit_and_blocks_measured_alone_are_no_candidates(seed: int) -> None:
    trials, oracle = searched(seed, min_sqnr_db=38.0)
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert winner.sqnr_db is not None
    assert winner.sqnr_db >= 38.0
    assert oracle.cost(winner.placement) < oracle.cost(oracle.space.resolve({}))
    alone = [trial for trial in trials if trial.phase == "sensitivity"]
    assert 0 < len(alone) <= len(oracle.space.units)
    assert not any(trial.incumbent for trial in alone)


class Rehearsed(Additive):
    """An oracle that also predicts whether a ``score`` is at least ``least``."""

    score: Callable[[Placement], float]
    least: float

    def keeps_metric(self, placement: Placement) -> bool | None:
        return self.score(placement) >= self.least


def scored_search(
    seed: int, least: float, *, is_rehearsed: bool = False
) -> tuple[list[Trial], ScoringDevice]:
    """A search on a device on which the score grows with the SQNR, with variation."""
    space = small_space()
    truth = Rehearsed(space)

    def score(placement: Placement) -> float:
        uneven = int(placement.digest[:4], 16) / 0xFFFF  # of two decibels
        return min(1.0, (truth.truth(placement) + 2 * uneven) / 50)

    truth.score, truth.least = score, least
    oracle = ScoringDevice(space, seed, truth, least, score)
    asked = SearchSetup(
        space=space, clock="cpu", min_accuracy=least, accuracy=truth if is_rehearsed else None
    )
    return drive(Attribution(asked, np.random.default_rng(seed)), oracle, trials=60), oracle


@pytest.mark.parametrize("seed", range(6))
def test_the_winner_meets_the_metric_and_is_close_to_the_best_that_does(seed: int) -> None:
    trials, oracle = scored_search(seed, 0.78)
    space = oracle.space
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert winner.placement.sites
    assert oracle.score(winner.placement) >= 0.78
    best = min(oracle.cost(each) for each in all_placements(space) if oracle.score(each) >= 0.78)
    assert oracle.cost(winner.placement) <= 1.08 * best


def test_the_mean_distance_from_the_optimum_is_small_under_a_rehearsed_metric() -> None:
    """The uniform placements all miss the metric. Without the times of their kernels the mean is 1.031."""
    distances = []
    for seed in range(30):
        trials, oracle = scored_search(seed, 0.78, is_rehearsed=True)
        best = min(oracle.cost(p) for p in all_placements(oracle.space) if oracle.score(p) >= 0.78)
        won = [trial for trial in trials if trial.incumbent][-1]
        distances.append(oracle.cost(won.placement) / best)
    assert np.mean(distances) <= 1.02


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
    thin = front_of(trials, 3)
    assert (len(thin), thin[0], thin[-1]) == (3, front[0], front[-1])


@pytest.mark.parametrize("phase", Attribution.phases, ids=lambda phase: phase.__name__)
def test_a_search_without_one_phase_ends_within_its_limit(
    monkeypatch: pytest.MonkeyPatch, phase: object
) -> None:
    monkeypatch.setattr(Attribution, "phases", [each for each in Attribution.phases if each is not phase])
    trials, _ = searched(0, min_sqnr_db=38.0)
    winner = [trial for trial in trials if trial.incumbent][-1]
    assert (winner.sqnr_db or 0.0) >= 38.0


@pytest.mark.parametrize(("strategy", "mean"), [("attribution", 1.01), ("region", 1.01), ("subgraph", 1.02)])
def test_the_mean_distance_from_the_optimum_is_small(strategy: str, mean: float) -> None:
    distances = []
    for seed in range(30):
        space = small_space()
        oracle = Oracle(space, seed)
        make = resolve("strategy", strategy)
        setup = SearchSetup(space=space, clock="cpu", trials=40)
        trials = drive(make(setup, np.random.default_rng(seed)), oracle, trials=40)
        best = min(map(oracle.cost, all_placements(space)))
        distances.append(min(oracle.cost(trial.placement) for trial in trials) / best)
    assert np.mean(distances) <= mean
    assert max(distances) <= 1.1


class TwoFormats(Oracle):
    """Each unit has a time of its own in each format, and tensors are converted between formats."""

    def __init__(self, space: SchemeSpace, seed: int) -> None:
        lots = np.random.default_rng([seed, 1])
        self.gains = {
            (unit.id, label): lots.uniform(0.3, 1.2) for unit in space.units for label in unit.labels[1:]
        }
        super().__init__(space, seed)

    def _kernel_ms(self, unit: Unit, labels: Mapping[str, str]) -> float:
        return self._float[unit.id] * self.gains.get((unit.id, labels.get(unit.id, "fp")), 1.0)

    def _crossings(self, labels: Mapping[str, str]) -> list[str]:
        read = {unit.id: labels.get(unit.id, "fp").replace("in-only", "in+out") for unit in self.space.units}
        full = {name: read[name] if labels.get(name, "fp") == read[name] else "fp" for name in read}
        made = {tensor: full[unit.id] for unit in self.space.units for tensor in unit.outputs}
        edges = {(tensor, read[unit.id]) for unit in self.space.units for tensor, _ in unit.edges}
        return sorted(tensor for tensor, label in edges if label != made.get(tensor, "fp"))


def test_the_best_format_of_each_block_is_found() -> None:
    space = residual_space("int8", "fp8")
    placements, distances, mixed = all_placements(space), [], []
    for seed in range(30):
        oracle = TwoFormats(space, seed)
        setup = SearchSetup(space=space, clock="cpu", trials=60)
        trials = drive(Attribution(setup, np.random.default_rng(seed)), oracle, trials=60)
        found = min((trial.placement for trial in trials), key=oracle.cost)
        distances.append(oracle.cost(found) / min(map(oracle.cost, placements)))
        mixed.append({site.format for site in found.sites} >= {"uint8", "fp8"})
    assert np.mean(distances) <= 1.02  # 1.07 for the best placements of one format
    assert np.mean(mixed) > 0.5


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
