"""The SQNR of candidates on a few samples: `OutputGate`."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from qdqspec.errors import BackendError, DataError
from qdqspec.parity.gate import (
    FEW,
    KNOWN,
    LATEST,
    SAMPLES,
    STEPS,
    AllData,
    AllDataDifference,
    HeldOutputs,
    OutputGate,
)
from qdqspec.types import Placement, Site

SIGNAL = 100.0  # power of the only value of each sample


@dataclass(slots=True)
class Noisy:
    """An engine with one SQNR on the first `FEW` samples and another on all others."""

    few_db: float
    others_db: float
    runs: int = 0

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        db = self.few_db if feeds["number"] < FEW else self.others_db
        return {"y": np.array([SIGNAL * (1 + 10 ** (-db / 20))])}


@pytest.fixture
def gate() -> OutputGate:
    return OutputGate(Noisy(400, 400), [{"number": np.array(number)} for number in range(SAMPLES)])


def runs(gate: OutputGate, few_db: float, others_db: float, limit_db: float) -> int:
    engine = Noisy(few_db, others_db)
    gate.near(engine, limit_db)
    return engine.runs


class Softmax:
    """The float model of masked scores."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            powers = np.exp(feeds["mask"] - feeds["mask"].max())
        return {"y": powers / powers.sum(), "label": np.array([3])}


def test_inputs_with_infinite_values_must_have_numbers_in_each_output_in_a_sample() -> None:
    masked, hidden = ({"mask": np.array(values)} for values in ([0, -np.inf], [-np.inf, -np.inf]))
    assert OutputGate(Softmax(), [hidden, masked]).samples == 2
    assert OutputGate(Softmax(), []).samples == 0
    with pytest.raises(
        DataError, match=r"output 'y' of the model is NaN or infinite in each of 2 samples.*: 'mask'"
    ):
        OutputGate(Softmax(), [hidden, hidden])


def test_few_samples_decide_when_the_others_cannot_raise_the_sqnr_to_the_limit(gate: OutputGate) -> None:
    rises = {number: rise for number, (rise, _) in STEPS.items()}
    for number, rise in rises.items():
        assert runs(gate, 20, 20, 20 + rise + 0.1) == number
    assert runs(gate, 20, 20, 20 + min(rises.values()) - 0.1) == SAMPLES


def test_saturated_first_samples_do_not_hide_the_noise_of_the_others(gate: OutputGate) -> None:
    for few_db, others_db in ((97, 24), (50, 1), (97, 40), (70, 10), (97, 24), (36, 29)):
        engine = Noisy(few_db, others_db)
        found, samples = gate.near(engine, 30)
        assert samples > FEW
        assert (found < 30) == (gate(engine) < 30)


def test_engines_run_on_all_samples_widen_what_few_samples_decide(gate: OutputGate) -> None:
    for number in range(KNOWN):  # all samples are 3 dB worse than the first few, with little variation
        assert runs(gate, 23.2 + 0.1 * number, 20, 20) == SAMPLES
    engine = Noisy(27, 23)
    found, samples = gate.near(engine, 20)
    assert (samples, engine.runs) == (FEW, FEW)
    assert found == pytest.approx(27 - 2.5, abs=0.5)
    assert runs(gate, 22.8, 20, 20) == SAMPLES
    assert gate.near(Noisy(27, 23), 20, 30)[1] == SAMPLES  # between two limits


def test_high_variation_between_samples_prevents_an_early_decision(gate: OutputGate) -> None:
    for others_db in (18, 20, 22, 21):
        assert runs(gate, 20, others_db, 20) == SAMPLES
    assert runs(gate, 22.5, 22.5, 20) > FEW


# ---- all data ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Drawn:
    """An engine whose error varies between samples, with a given mean SQNR."""

    db: float
    runs: int = 0

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        error = np.random.default_rng(int(feeds["number"])).normal(size=100)
        return {"y": SIGNAL * (1 + 10 ** (-self.db / 20) * error)}

    def close(self) -> None:
        pass


COUNT = 8 * SAMPLES


def all_data(
    reference: Drawn, known: int = 0, *, seconds: float = math.inf, at_once: bool = False
) -> AllData:
    feeds = [{"number": np.array(number)} for number in range(COUNT)]
    exact = [Drawn(400).run(feed) for feed in feeds[:known]]
    return AllData(
        feeds, lambda: reference, HeldOutputs(exact), samples=COUNT, seconds=seconds, at_once=at_once
    )


@pytest.mark.parametrize(("db", "seconds"), [(17.0, math.inf), (17.0, 0.0), (23.0, 0.0)])
def test_an_sqnr_far_from_the_limit_is_decided_on_a_part_of_all_data(db: float, seconds: float) -> None:
    engine = Drawn(db)
    found, is_whole = all_data(Drawn(400), seconds=seconds).near(engine, 20.0)
    assert (engine.runs, is_whole) == (2 * SAMPLES, False)
    assert found == pytest.approx(db, abs=0.7)


def test_an_sqnr_above_the_limit_is_measured_on_all_data_if_time_permits() -> None:
    """The first samples may be those whose outputs saturate, which have hardly any noise."""

    class Saturated(Drawn):
        def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.db = 90.0 if feeds["number"] < COUNT // 2 else 18.0
            return super().run(feeds)

    found, is_whole = all_data(Drawn(400)).near(Saturated(0), 25.0)
    assert is_whole
    assert found < 25
    assert all_data(Drawn(400), seconds=0.0).near(Saturated(0), 25.0)[0] > 25


def test_an_sqnr_near_the_limit_is_measured_on_all_data() -> None:
    engine, data = Drawn(20.1), all_data(Drawn(400))
    found, is_whole = data.near(engine, 20.0)
    assert (engine.runs, is_whole) == (COUNT, True)
    assert found == data(Drawn(20.1))


def test_the_reference_is_run_once_on_each_sample_that_is_needed() -> None:
    reference = Drawn(400)
    data = all_data(reference, known=SAMPLES)
    data.near(Drawn(15), 20.0)
    assert reference.runs == SAMPLES
    data(Drawn(30))
    data(Drawn(25))
    assert reference.runs == COUNT - SAMPLES


def test_comparisons_with_the_same_reference_share_its_outputs() -> None:
    """Each sample runs once on it, whichever comparison comes first; the engines of one are not those of the other."""
    reference = Drawn(400)
    data = all_data(reference, known=SAMPLES)
    first = [{"number": np.array(number)} for number in range(COUNT // 2)]
    part = data.rehearsed(first, len(first))
    assert part(Drawn(30)) != data(Drawn(30))
    assert reference.runs == COUNT - SAMPLES
    assert part.samples == COUNT // 2
    again = data.rehearsed(first, len(first))
    assert again.estimated(Drawn(30)) is None
    assert again(Drawn(30)) == part(Drawn(30))
    assert reference.runs == COUNT - SAMPLES


class Uneven(Drawn):
    """One sample in four has a hundred times the noise of the others."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = super().run(feeds)["y"]
        return {"y": SIGNAL + (found - SIGNAL) * (3 if feeds["number"] % 4 == 1 else 0.3)}


def test_a_rehearsal_is_decided_on_fewer_samples_than_a_build() -> None:
    """Noise that differs between samples: two standard errors from the limit are not four."""

    built, rehearsed = Uneven(20), Uneven(20)
    data = all_data(Drawn(400))
    whole_db = all_data(Drawn(400))(Uneven(20))
    assert data.near(built, whole_db + 4)[1]
    feeds = [{"number": np.array(number)} for number in range(COUNT)]
    found_db, is_whole = data.rehearsed(feeds, COUNT).near(rehearsed, whole_db + 4)
    assert (is_whole, rehearsed.runs < built.runs) == (False, True)
    assert found_db == pytest.approx(whole_db, abs=1.0)


class Waiting(Drawn):
    """Each run waits until another one goes on, but for the samples that are known."""

    def __init__(self, db: float, both: threading.Barrier, known: int = 0) -> None:
        super().__init__(db)
        self.both, self.known, self.closed = both, known, False

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert not self.closed
        if feeds["number"] >= self.known:
            self.both.wait()
        return super().run(feeds)

    def close(self) -> None:
        self.closed = True


def test_the_reference_runs_while_the_engine_runs() -> None:
    both = threading.Barrier(2, timeout=10)
    reference, engine = Waiting(400, both), Waiting(20, both, known=SAMPLES)
    data = all_data(reference, known=SAMPLES, at_once=True)
    assert data(engine) == all_data(Drawn(400))(Drawn(20))
    assert (reference.runs, reference.closed) == (COUNT - SAMPLES, True)
    assert data(Drawn(30)) == all_data(Drawn(400))(Drawn(30))  # its outputs are known now


def test_a_failure_of_the_reference_that_runs_beside_is_reported() -> None:
    class Failing(Drawn):
        def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            raise BackendError("the reference crashed")

    with pytest.raises(BackendError, match="the reference crashed"):
        all_data(Failing(400), at_once=True)(Drawn(20))


def test_an_error_in_rare_samples_needs_all_data() -> None:
    """One sample in six has most of the error, so the first samples do not represent all of them."""

    class Rare(Drawn):
        def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            found = super().run(feeds)
            return {"y": found["y"] if feeds["number"] % 6 else np.full(100, 1.5 * SIGNAL)}

    engine = Rare(40)
    assert all_data(Drawn(400)).near(engine, 17.0)[1]
    assert engine.runs == COUNT


class Hard(Drawn):
    """One sample in eight has a hundred times the noise of the others."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = super().run(feeds)["y"]
        return {"y": SIGNAL + (found - SIGNAL) * (10 if feeds["number"] % 8 == 5 else 1)}


def test_the_samples_with_the_most_noise_estimate_the_sqnr_of_all_data() -> None:
    data = all_data(Drawn(400))
    assert data.estimated(Hard(30)) is None
    data(Hard(30))
    engine = Hard(36)
    found = data.estimated(engine)
    assert found == pytest.approx(data(Hard(36)), abs=0.1)
    assert engine.runs < COUNT / 8


def test_an_estimate_near_the_limit_is_followed_by_all_data() -> None:
    data = all_data(Drawn(400))
    whole_db = data(Hard(30))
    assert data.near(Hard(30), whole_db - 5) == (whole_db, True)  # the first estimate is compared
    far, near = Hard(30), Hard(30)
    assert not data.near(far, whole_db + 5)[1]
    assert far.runs < COUNT / 8
    assert data.near(near, whole_db - 0.1) == (whole_db, True)


def test_samples_of_an_estimate_are_not_run_again() -> None:
    data, engine = all_data(Drawn(400)), Hard(30)
    whole_db = data(Hard(30))
    assert data.near(engine, whole_db - 5) == (pytest.approx(whole_db), True)
    assert engine.runs == COUNT
    assert data.estimated(Hard(36)) == pytest.approx(all_data(Drawn(400))(Hard(36)), abs=0.1)


def test_samples_of_an_estimate_count_where_the_first_samples_decide() -> None:
    """They are the ones with the most noise: a mean with them in front would be too large."""
    data, engine = all_data(Drawn(400), seconds=0.0), Uneven(30)
    whole_db = data(Uneven(30))
    found_db, is_whole = data.near(engine, whole_db - 8)
    assert (is_whole, engine.runs < COUNT) == (False, True)
    assert found_db == pytest.approx(whole_db, abs=1.0)


def test_only_the_latest_estimates_show_how_wrong_others_may_be() -> None:
    data = all_data(Drawn(400))
    whole_db = data(Hard(30))
    data.near(Elsewhere(30), whole_db)
    far = Hard(30)
    assert data.near(far, whole_db + 3) == (
        pytest.approx(whole_db),
        True,
    )  # the estimate of another was wrong
    for _ in range(LATEST):
        data.near(Hard(30), whole_db)
    engine = Hard(30)
    assert not data.near(engine, whole_db + 3)[1]
    assert engine.runs < COUNT / 2


@pytest.mark.parametrize("above", [True, False])
def test_an_estimate_above_the_limit_is_enough_only_where_little_depends_on_it(*, above: bool) -> None:
    """Engines with other samples that have most of the noise are estimated too high."""
    data = all_data(Drawn(400))
    whole_db = data(Hard(30))
    data.near(Hard(30), whole_db - 5)
    estimated_db = data.estimated(Elsewhere(30)) or 0.0
    limit_db, others_db = estimated_db - 2, all_data(Drawn(400))(Elsewhere(30))
    assert others_db < limit_db
    found_db, _ = data.near(Elsewhere(30), limit_db, above=above)
    assert found_db == (pytest.approx(estimated_db) if above else pytest.approx(others_db, abs=1.5))
    assert (found_db > limit_db) == above


class Elsewhere(Hard):
    """The samples with the most noise are others."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return super().run({**feeds, "number": feeds["number"] + 3})


def test_estimates_that_were_wrong_need_a_larger_distance_from_the_limit() -> None:
    """The noise of engines may be on other samples than that of the first one."""
    data = all_data(Drawn(400))
    data(Hard(30))
    estimated_db, (whole_db, _) = data.estimated(Elsewhere(30)) or 0.0, data.near(Elsewhere(30), 15.0)
    assert estimated_db > whole_db + 3
    engine = Hard(30)
    assert data.near(engine, whole_db - 5, above=True)[1]
    assert engine.runs >= COUNT


def test_the_difference_on_all_data_is_interpolated_from_placements_of_similar_sqnr() -> None:
    difference = AllDataDifference()
    assert (difference.is_small, difference.at(30.0)) == (False, 0.0)
    difference.learn(24.0, 29.0, placement_of("a"))
    assert difference.at(60.0) == pytest.approx(5.0)
    difference.learn(43.0, 30.0, placement_of("b"))
    assert difference.at(25.0) == pytest.approx(5.0, abs=0.2)
    assert difference.at(42.0) == pytest.approx(-13.0, abs=0.2)
    assert -13 < difference.at(33.5) < 5
    assert not difference.is_small
    little = AllDataDifference()
    little.learn(24.0, 25.5, placement_of("a"))
    assert little.is_small


def placement_of(*tensors: str) -> Placement:
    return Placement(sites=frozenset(Site(tensor=tensor, consumers=(), format="int8") for tensor in tensors))


def test_the_difference_on_all_data_is_that_of_placements_with_the_same_pairs_if_known() -> None:
    first, like_first, second = placement_of(*"abcdefgh"), placement_of(*"abcdefg"), placement_of(*"xyz")
    difference = AllDataDifference()
    difference.learn(24.0, 21.0, first)
    difference.learn(24.0, 26.0, second)
    assert difference.at(24.0) == pytest.approx(-0.5)
    assert -3.0 < difference.at(24.0, like_first) < -2.9
    assert difference.at(30.0, second) == 2.0
    assert (difference.is_of(second), difference.is_of(like_first)) == (True, False)
