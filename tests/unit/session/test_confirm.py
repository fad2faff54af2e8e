"""The confirmation of a search: the selected model, and the second measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.deadline import Deadline
from qdqspec._core.units import proved_text
from qdqspec.app.session.confirm import APART_SECONDS, MOST_TIMES, _Confirmation, confirm
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.search.limits import Limits
from qdqspec.timing import bench as measurement
from qdqspec.timing.together import Together
from qdqspec.types import (
    Consumer,
    Interval,
    LatencyEvidence,
    Placement,
    Race,
    RatioTest,
    Samples,
    SearchLimits,
    Site,
    Trial,
)


def placed(*tensors: str) -> Placement:
    return Placement(
        sites=frozenset(Site(tensor=t, consumers=(Consumer(f"n_{t}", 0),), format="uint8") for t in tensors)
    )


REFERENCE, FAST, EVERYTHING = placed(), placed("a"), placed("a", "b")
SURE = {"reference": Interval(median=1, low=1, high=1), "everything": Interval(median=1.2, low=1.1, high=1.3)}


def ratio(low: float, median: float, high: float) -> Interval:
    return Interval(median=median, low=low, high=high)


def ratio_tests_of(ratios: Mapping[str, Interval]) -> dict[str, RatioTest]:
    """Tests of ratios that are equal in both conditions."""
    return {role: RatioTest(mean=each, enclosing=each) for role, each in ratios.items()}


class Bench:
    """Returns the intervals of the winner in order, and records the roles of each measurement."""

    def __init__(self, *winner: Interval) -> None:
        self._winner = iter(winner)
        self.asked: list[set[str]] = []

    def compare(
        self,
        roles: Mapping[str, Placement],
        *,
        builds: int = 3,
        is_settled: Callable[[Any], bool],
        again: Callable[[Any], bool] = lambda _: False,
    ) -> LatencyEvidence:
        self.is_settled = is_settled
        while True:
            self.asked.append(set(roles))
            fast = next(self._winner)
            ratios = {role: fast if placement == FAST else SURE[role] for role, placement in roles.items()}
            if not again(ratio_tests_of(ratios)):
                break
        samples = {role: Samples(wall_ms=(interval.median,) * builds) for role, interval in ratios.items()}
        return LatencyEvidence(
            clock="wall",
            samples=samples,
            ratios=ratios,
            tested=ratio_tests_of(ratios),
            speedup=ratio(1, 1, 1),
            builds=builds,
        )


def confirmed(
    bench: Bench,
    min_gain: float = 0.02,
    more_trials: tuple[Trial, ...] = (),
    build_seconds: float = 0.0,
    **more: Any,
) -> Any:
    race = Race(opponent=REFERENCE.digest, ratio=0.9, p_value=0.01, pairs=12, verdict="faster")
    trials = (
        Trial(
            number=0,
            phase="pure",
            placement=REFERENCE,
            incumbent=True,
            ratio=1.0,
            build_seconds=build_seconds,
        ),
        Trial(number=1, phase="pure", placement=FAST, incumbent=True, ratio=0.9, race=race),
        *more_trials,
    )
    limits = Limits(asked=SearchLimits(min_gain=min_gain, min_sqnr_db=None))
    deadline = more.pop("deadline", None) or Deadline(clock=lambda: 0.0)
    more.setdefault("wait", lambda seconds: None)
    return confirm(trials, EVERYTHING, bench, limits, deadline, pareto=False, **more)  # type: ignore[arg-type] # only the used attributes


def test_a_gain_proved_by_the_first_measurement_is_not_measured_again() -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    found = confirmed(bench)
    assert found.choice.placement == FAST
    assert len(bench.asked) == 1


def after(share: float) -> Deadline:
    """A time limit of which this share is spent; a confirmation may take twice the limit if it is likely to decide."""
    clock = iter([0.0])
    return Deadline(seconds=100.0, clock=lambda: next(clock, 100 * share))


def test_full_quantization_is_not_confirmed_if_its_builds_take_too_long() -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    found = confirmed(bench, build_seconds=7.0, deadline=after(1.6))  # 6 builds would take 42 s
    assert bench.asked[0] == {"reference", "winner", "tuned"}
    assert "everything" not in found.latency.ratios
    built = Trial(number=2, phase="pure", placement=EVERYTHING, ratio=1.2)
    searched = Bench(ratio(0.85, 0.9, 0.95))
    confirmed(searched, more_trials=(built,), build_seconds=7.0, deadline=after(1.6))
    assert "everything" in searched.asked[0]  # built in the search already


@pytest.mark.parametrize(
    ("second", "selected"), [(ratio(0.9, 0.93, 0.96), FAST), (ratio(0.9, 0.985, 1.02), REFERENCE)]
)
def test_an_unproved_gain_is_decided_by_a_second_measurement(second: Interval, selected: Placement) -> None:
    bench = Bench(ratio(0.85, 0.93, 1.01), second)
    found = confirmed(bench)
    assert found.choice.placement == selected
    assert len(bench.asked) == 2
    if selected == FAST:
        assert found.latency.ratios["tuned"] == second
        assert found.latency.ratios["everything"] == SURE["everything"]


def test_a_measurement_that_does_not_decide_is_repeated_at_other_times() -> None:
    """The fourth interval proves the gain, the third one is too close to the limit for a repeated test."""
    close, waited = ratio(0.85, 0.93, 1.01), list[float]()
    bench = Bench(close, close, close, ratio(0.89, 0.93, 0.975), ratio(0.9, 0.93, 0.96))
    assert confirmed(bench, wait=waited.append).choice.placement == FAST
    assert len(bench.asked) == 5
    assert waited == [APART_SECONDS] * 3


def test_the_last_repetition_decides_by_the_interval_of_the_test() -> None:
    close = ratio(0.85, 0.93, 1.01)
    proved = ratio(0.89, 0.93, 0.975)  # not by a wider interval
    bench = Bench(*[close] * MOST_TIMES, proved)
    assert confirmed(bench).choice.placement == FAST
    assert len(bench.asked) == 1 + MOST_TIMES
    assert confirmed(Bench(*[close] * (1 + MOST_TIMES))).choice.unchanged


def changing_bench(true: float, random: np.random.Generator) -> measurement.Bench:
    """A bench on which the ratio differs between measurements by 3 %, known with six degrees of freedom."""
    bench = measurement.Bench(FakeDevice(), lambda placement: Path("model"), {}, clock="wall", random=random)
    known = 0.03 * math.sqrt(random.chisquare(6) / 6)
    bench._looks = SimpleNamespace(deviation=(known, 6))  # type: ignore[assignment] # only the used attribute

    def build(level: float) -> Samples:
        level *= math.exp(random.normal(0, 0.005))
        steady, first = (tuple(level * np.exp(random.normal(0, each, 24))) for each in (0.02, 0.03))
        return Samples(wall_ms=steady, first=Samples(wall_ms=first))

    def together(candidates: Mapping[str, Any], builds: int, *_: Any, **__: Any) -> Together:
        levels = dict(zip(candidates, (1.0, true * math.exp(random.normal(0, 0.03))), strict=True))
        return Together({name: [build(level) for _ in range(builds)] for name, level in levels.items()})

    bench._together = together  # type: ignore[method-assign]
    return bench


@pytest.mark.parametrize(("true", "least", "most"), [(0.98, 0.0, 0.06), (0.93, 0.65, 1.0)])
def test_repetitions_prove_gains_on_a_changing_machine_and_few_that_are_none(
    true: float, least: float, most: float
) -> None:
    """With one measurement .93 is proved in 31 % (decision 7)."""
    random, proved = np.random.default_rng(3), 0
    for _ in range(150):
        own = _Confirmation(
            (), changing_bench(true, random), Limits(asked=SearchLimits(min_gain=0.02, min_sqnr_db=None))
        )
        again = own.repetitions({"tuned": FAST}, Deadline(), lambda seconds: None)
        found = own.bench.compare({"reference": REFERENCE, "tuned": FAST}, again=again)
        proved += found.tested["tuned"].proves(0.02)
    assert least <= proved / 150 <= most


def test_without_time_a_measurement_is_not_repeated() -> None:
    proved = ratio(0.89, 0.93, 0.975)
    bench = Bench(ratio(0.85, 0.93, 1.01), proved)
    assert confirmed(bench, deadline=after(1.5)).choice.placement == FAST
    assert len(bench.asked) == 2


@pytest.mark.parametrize(
    ("tuned", "is_settled"),
    [
        (ratio(0.88, 0.9, 0.92), True),  # a gain
        (ratio(0.99, 1.0, 1.01), True),  # less than the smallest gain
        (ratio(0.95, 0.96, 0.97), True),
        (ratio(0.95, 0.96, 0.975), False),  # proved now, and so close that it must be proved by all rounds
        (ratio(0.97, 0.98, 0.99), False),  # neither gain nor loss is proved
        (ratio(0.8, 0.85, 0.9), False),  # a gain of unknown size
    ],
)
def test_a_confirmation_ends_early_if_every_role_is_decided(tuned: Interval, is_settled: bool) -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    confirmed(bench)
    known = {"reference": SURE["reference"], "winner": tuned, "everything": ratio(1.19, 1.2, 1.21)}
    assert bench.is_settled(ratio_tests_of(known)) is is_settled
    assert not bench.is_settled(ratio_tests_of({"winner": tuned, "everything": ratio(1.1, 1.2, 1.3)}))


def test_a_confirmation_goes_on_while_a_condition_may_be_slower() -> None:
    bench = Bench(ratio(0.85, 0.9, 0.95))
    confirmed(bench)
    mean = ratio(0.88, 0.9, 0.92)
    assert bench.is_settled({"winner": RatioTest(mean=mean, enclosing=ratio(0.7, 0.9, 0.99))})
    assert not bench.is_settled({"winner": RatioTest(mean=mean, enclosing=ratio(0.7, 0.9, 1.01))})


@pytest.mark.parametrize(
    "first", [ratio(0.982, 0.99, 1.01), ratio(0.96, 0.99, 1.02), ratio(0.97, 1.01, 1.06)]
)
def test_a_gain_that_is_excluded_or_unlikely_is_not_measured_again(first: Interval) -> None:
    bench = Bench(first)
    assert confirmed(bench).choice.unchanged
    assert len(bench.asked) == 1


def test_an_unproved_gain_is_not_measured_again_without_time() -> None:
    bench = Bench(ratio(0.85, 0.93, 1.01))
    assert confirmed(bench, deadline=after(2.5)).choice.unchanged
    assert len(bench.asked) == 1


SIMULATED = st.tuples(st.floats(0.6, 1.2), st.floats(0.0, 0.2)).map(
    lambda each: ratio(each[0] * math.exp(-each[1]), each[0], each[0] * math.exp(each[1]))
)


@given(
    st.lists(SIMULATED, min_size=1 + MOST_TIMES, max_size=1 + MOST_TIMES), st.sampled_from([0.0, 0.02, 0.1])
)
def test_the_bound_of_a_selected_model_is_never_below_the_gain_asked_for(
    measured: list[Interval], min_gain: float
) -> None:
    """Of one to five measurements, the one that decided is reported."""
    found = confirmed(Bench(*measured), min_gain)
    text = proved_text(found.latency, min_gain)
    assert found.latency.at_least is not None
    if found.choice.unchanged:
        assert found.latency.at_least == found.latency.speedup.median == 1
    else:
        assert found.latency.at_least >= 1 / (1 - min_gain)
        assert text.startswith(", at least ")


# ---- candidates that are converted from the float type of the user's model ----------------------


@pytest.mark.parametrize(("plain", "unchanged"), [(0.95, False), (0.8, True), (0.7, True)])
def test_a_placement_must_be_faster_than_the_user_model_and_the_converted_one(
    monkeypatch: pytest.MonkeyPatch, plain: float, unchanged: bool
) -> None:
    monkeypatch.setitem(SURE, "float32", ratio(plain - 0.01, plain, plain + 0.01))
    bench = Bench(ratio(0.79, 0.8, 0.81))
    found = confirmed(bench, beside={"reference": Path("given.onnx")})
    (roles,) = bench.asked
    assert {"reference", "float32", "tuned"} <= roles
    assert found.choice.unchanged == unchanged
    assert found.latency.ratios["float32"].median == plain
    assert found.latency.speedup.median == pytest.approx(1 if unchanged else 1.25)
