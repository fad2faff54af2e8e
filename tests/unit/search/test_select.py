"""The finalists that are confirmed, and the selected model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from qdqspec.search.select import choose, finalists
from qdqspec.types import Consumer, Interval, Placement, RatioTest, Site, Trial


def placement(pairs: int) -> Placement:
    """A placement of ``pairs`` activation pairs and one weight, which is not counted as a pair."""
    sites = [
        Site(tensor=f"t{i}", consumers=(Consumer("n", i),), format="uint8", weight=i == pairs)
        for i in range(pairs + 1)
    ]
    return Placement(sites=frozenset(sites) if pairs else frozenset())


REFERENCE, FEW, MANY, ALL = (placement(pairs) for pairs in (0, 2, 5, 9))


def ratio(median: float, reach: float = 0.02, slowest: float = 0.0) -> RatioTest:
    """A ratio whose mean has this interval; in one condition its interval extends to ``slowest``."""
    mean = Interval(median=median, low=median - reach, high=median + reach)
    return RatioTest(mean=mean, enclosing=replace(mean, high=max(mean.high, slowest)))


def trial(number: int, what: Placement, at: float | None, *, won: bool = False, ok: bool = True) -> Trial:
    status = "ok" if ok else "failed"
    return Trial(number=number, phase="p", placement=what, ratio=at, incumbent=won, status=status)


# ---- finalists ----------------------------------------------------------------------------------


def test_the_reference_is_the_winner_if_no_candidate_ran_or_is_accurate_enough() -> None:
    failed = [trial(0, REFERENCE, 1.0, won=True), trial(1, ALL, None, ok=False)]
    nothing = {"reference": REFERENCE, "winner": REFERENCE}
    assert finalists(failed, ALL) == finalists(failed, REFERENCE) == nothing
    part = replace(failed[1], phase="isolated", subgraph=("n",))
    assert finalists([failed[0], part], ALL) == {**nothing, "everything": ALL}  # even if it was not built
    inaccurate = [trial(0, REFERENCE, 1.0, won=True), trial(1, FEW, 0.8, won=True), trial(2, MANY, 0.9)]
    assert finalists(inaccurate, REFERENCE, admits=lambda _: False) == nothing


# ---- the choice ---------------------------------------------------------------------------------

ROLES = {"reference": REFERENCE, "winner": MANY, "runner-up": FEW, "everything": ALL}
ONE = ratio(1, reach=0)


@pytest.mark.parametrize(
    ("winner", "others", "role"),
    [
        (ratio(0.5), ratio(0.6), "winner"),
        (ratio(0.5), ratio(0.504), "runner-up"),  # the fewest pairs within the best interval
        (ratio(0.5, reach=0.05), ratio(0.52), "winner"),  # 4 % slower, within a wide interval
    ],
)
def test_the_fastest_finalist_with_fewest_pairs_is_selected(
    winner: RatioTest, others: RatioTest, role: str
) -> None:
    ratios = {"reference": ONE, "winner": winner, "runner-up": others, "everything": others}
    chosen = choose(ROLES, ratios)
    assert chosen.role == role
    assert chosen.reason.startswith(f"{role}: {ratios[role].mean.median:.3f} of the reference's time [")
    fewer = "as fast as winner within its interval, with fewer Q/DQ pairs"
    assert (fewer in chosen.reason) == (role == "runner-up")


SLOWER = "all 5 quantized candidates are slower: the fastest takes 1.04 of the reference's time"
UNPROVED = "the gain is not proved: the best candidate"


@pytest.mark.parametrize(
    ("ratios", "how", "reason"),
    [
        (
            {"winner": ratio(0.99), "everything": ratio(1.4)},
            {"slower": SLOWER},
            f"{UNPROVED} saves 1.0 % of the time (95 %: -1.0 % to 3.0 %)",
        ),
        ({"everything": ratio(1.4)}, {"slower": SLOWER}, SLOWER),
        (
            {"winner": ratio(1.25, reach=0.0)},
            {},
            "no candidate is faster: the best candidate takes 1.25 of the reference's time (95 %: 1.25 to 1.25)",
        ),
        ({}, {}, "no quantized candidate ran"),
        (
            {"winner": ratio(0.99), "everything": ratio(0.4)},
            {"barred": {ALL.digest}},
            (
                "everything quantized takes 0.40 of the reference's time (95 %: 0.38 to 0.42), but is not accurate "
                f"enough; {UNPROVED} saves 1.0 % of the time (95 %: -1.0 % to 3.0 %)"
            ),
        ),
        (
            {"winner": ratio(0.97, reach=0.015)},
            {"min_gain": 0.02},
            f"{UNPROVED} saves 3.0 % of the time (95 %: 1.5 % to 4.5 %), and tune.min_gain asks for 2 %",
        ),
        (
            {"winner": ratio(0.9, slowest=1.004)},
            {"min_gain": 0.02},
            (
                f"{UNPROVED} takes 0.90 of the reference's time (95 %: 0.88 to 0.92), "
                "and up to 1.004 in one of the conditions of the caches"
            ),
        ),
        (  # candidates that are converted from another float type
            {"winner": ratio(0.7), "runner-up": ratio(0.75)},
            {"plain": ratio(0.7)},
            (
                "the best candidate takes 0.70 of the reference's time (95 %: 0.68 to 0.72), and converted to float32 "
                "without pairs it takes 0.70 (95 %: 0.68 to 0.72): its pairs do not make it faster"
            ),
        ),
    ],
)
def test_the_reason_of_an_unchanged_model(
    ratios: dict[str, RatioTest], how: dict[str, Any], reason: str
) -> None:
    chosen = choose(ROLES, {"reference": ONE, **ratios}, **how)
    assert (chosen.role, chosen.placement, chosen.unchanged) == ("reference", REFERENCE, True)
    assert chosen.reason == reason


@given(
    st.dictionaries(
        st.sampled_from(["winner", "runner-up", "everything"]),
        st.tuples(st.floats(0.3, 1.5), st.floats(0.001, 0.3), st.floats(0.3, 1.5)),
    ),
    st.floats(0.0, 0.5),
)
def test_the_selected_model_is_proved_faster_or_is_unchanged(
    drawn: dict[str, tuple[float, float, float]], min_gain: float
) -> None:
    ratios = {"reference": ONE, **{role: ratio(*numbers) for role, numbers in drawn.items()}}
    chosen = choose(ROLES, ratios, min_gain=min_gain)
    proved = [
        role
        for role in drawn
        if ratios[role].at_least > 1 / (1 - min_gain) and ratios[role].enclosing.high < 1
    ]
    assert chosen.placement == ROLES[chosen.role]
    assert chosen.unchanged == (chosen.role == "reference") == (not proved)
    if not chosen.unchanged:
        best = min(proved, key=lambda role: ratios[role].mean.median)
        assert chosen.role in proved
        assert ratios[chosen.role].mean.median <= ratios[best].mean.high
        assert chosen.placement.pairs <= ROLES[best].pairs


# ---- accuracy -----------------------------------------------------------------------------------


def test_a_candidate_rejected_by_the_metric_is_no_finalist() -> None:
    """The limit applies to scored candidates, and not to the reference."""
    trials = [
        replace(trial(0, REFERENCE, 1.0, won=True), accuracy=0.8),
        replace(trial(1, FEW, 0.5), accuracy=0.1),
        replace(trial(2, MANY, 0.8, won=True), accuracy=0.95),
        trial(3, ALL, 0.9),
    ]
    assert [each.reaches(None, 0.9) for each in trials] == [True, False, True, True]
    assert not replace(trials[2], sqnr_db=10.0).reaches(20.0, 0.9)
    roles = finalists(trials, ALL, fits=lambda each: each.reaches(None, 0.9))
    assert roles == {"reference": REFERENCE, "winner": MANY, "runner-up": ALL, "everything": ALL}


def test_finalists_ran_and_are_accurate_enough_on_all_data() -> None:
    """Race winners are evaluated from the last to the first, then the fastest, and no more than needed."""
    other, asked = placement(3), []
    trials = [
        trial(0, REFERENCE, 1.0, won=True),
        trial(1, FEW, 0.9, won=True),
        trial(2, MANY, 0.8, won=True),
        trial(3, other, 0.7),
        trial(4, placement(4), 0.95),
        trial(5, placement(6), 0.1, ok=False),
    ]
    named = finalists(trials, ALL)
    assert named == {"reference": REFERENCE, "winner": MANY, "runner-up": other, "everything": ALL}

    def admits(each: Placement) -> bool:
        asked.append(each)
        return each in (FEW, placement(4))

    roles = finalists(trials, ALL, admits=admits)
    assert (roles["winner"], roles["runner-up"], roles["everything"]) == (FEW, placement(4), ALL)
    assert asked[:2] == [MANY, FEW]
    assert set(asked) == {MANY, FEW, other, placement(4)}
