"""The SQNR of candidates on the first samples, and on all data: `Evaluator` and `Offset`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from qdqspec.accuracy.data import InputSpec, open_data
from qdqspec.accuracy.evaluator import SAMPLES, Evaluator, Offset
from qdqspec.types import EXACT_DB
from tests.support.lab import placement


@dataclass(slots=True)
class Computed:
    """An engine that counts its runs."""

    outputs: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    runs: int = 0

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        return self.outputs(feeds)

    def close(self) -> None:
        pass


def brighter(more: int) -> Computed:
    """A model of which all outputs are integers."""
    return Computed(lambda feeds: {"image": (feeds["x"] + more).astype(np.uint8), "text": np.array(["a"])})


def test_integers_are_judged_if_no_output_is_a_float() -> None:
    judge = Evaluator([{"x": np.full((4, 4), 200)}], lambda: brighter(0))
    assert judge(brighter(2)) == pytest.approx(40)
    assert judge(brighter(0)) == EXACT_DB


def test_samples_that_fill_up_the_last_batch_do_not_count(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.array([[4.0], [3.0], [2.0]]))
    data = open_data(tmp_path / "data.npz", {"x": InputSpec(dtype=np.dtype(np.float64), shape=(2, 1))})
    judge = Evaluator(data, lambda: Computed(lambda feeds: {"y": feeds["x"]}))
    halved = Computed(lambda feeds: {"y": np.where(feeds["x"] == 4, 2, feeds["x"])})
    assert judge(halved) == pytest.approx(10 * math.log10((16 + 9 + 4) / 4))


@pytest.mark.parametrize("given", [(1, -np.inf), (-np.inf, np.nan), (0, np.nan)])
def test_other_values_where_the_reference_is_not_finite_are_below_each_limit(
    given: tuple[float, ...],
) -> None:
    judge = Evaluator([{}], lambda: Computed(lambda _: {"y": np.array(given)}))
    assert judge(Computed(lambda _: {"y": np.array(given)})) == EXACT_DB
    assert judge(Computed(lambda _: {"y": np.nan_to_num(given)})) == -EXACT_DB


def drawn(db: float) -> Computed:
    """An engine whose error varies between samples, with a given mean SQNR."""

    def outputs(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        error = np.random.default_rng(int(feeds["number"])).normal(size=100)
        return {"y": 100 * (1 + 10 ** (-db / 20) * error)}

    return Computed(outputs)


COUNT = 8 * SAMPLES


def evaluator(reference: Computed | None = None, *, seconds: float = math.inf) -> Evaluator:
    feeds = [{"number": np.array(number)} for number in range(COUNT)]
    return Evaluator(feeds, lambda: reference or drawn(400), COUNT, seconds=seconds)


def test_the_first_samples_are_the_same_for_each_candidate() -> None:
    engine = drawn(20)
    found_db = evaluator().first(engine)
    assert engine.runs == SAMPLES
    assert found_db == pytest.approx(20, abs=0.7)
    assert evaluator().by_output(drawn(20)) == {"y": found_db}


@pytest.mark.parametrize(
    ("db", "seconds", "runs"),
    [
        (17.0, math.inf, 2 * SAMPLES),
        (17.0, 0.0, 2 * SAMPLES),
        (23.0, 0.0, 2 * SAMPLES),
        (20.1, math.inf, COUNT),
    ],
)
def test_only_an_sqnr_near_the_limit_is_measured_on_all_data(db: float, seconds: float, runs: int) -> None:
    engine, data = drawn(db), evaluator(seconds=seconds)
    found, is_whole = data.near(engine, 20.0)
    assert (engine.runs, is_whole) == (runs, runs == COUNT)
    assert found == (data(drawn(db)) if is_whole else pytest.approx(db, abs=0.7))


def test_the_reference_is_run_once_on_each_sample_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = drawn(400)
    data = evaluator(reference)
    assert reference.runs == SAMPLES
    data.near(drawn(15), 20.0)
    assert reference.runs == 2 * SAMPLES
    data(drawn(30))
    data(drawn(25))
    assert reference.runs == COUNT
    monkeypatch.setattr("qdqspec.accuracy.evaluator.HELD_BYTES", 0)
    again = evaluator(reference)
    assert again(drawn(25)) == data(drawn(25))
    assert reference.runs == 2 * COUNT + SAMPLES


def test_an_offset_is_the_median_of_placements_of_similar_sqnr() -> None:
    offset = Offset()
    assert (offset.at(30.0), offset.is_small) == (0.0, False)
    for number, found in enumerate((29.0, 28.5, 30.0, 29.2, 12.0)):
        offset.learn(24.0, found, placement(str(number)))
    for number in range(5):
        offset.learn(43.0, 30.0, placement(f"x{number}"))
    assert offset.at(25.0) == pytest.approx(5.0)
    assert offset.at(42.0) == pytest.approx(-13.0)
    assert not offset.is_small


def test_the_offset_of_a_placement_is_its_own_if_that_is_known() -> None:
    offset, first, second = Offset(), placement("a"), placement("b")
    offset.learn(24.0, 21.0, first)
    offset.learn(24.0, 25.0, second)
    assert offset.at(24.0) == offset.at(24.0, placement("c")) == pytest.approx(-1.0)
    assert offset.at(30.0, second) == 1.0


def test_the_deviation_of_an_offset_is_bounded() -> None:
    offset = Offset(prior=True)
    assert offset.doubt_db == offset.first_doubt_db
    for name, error in (("a", -8.0), ("b", 8.0)):
        offset.learn(24.0, 24.0 + error, placement(name))
    assert offset.doubt_db == max(offset.doubts_db)
