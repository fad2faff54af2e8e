"""Who is confirmed, and what is shipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.search.select import choose, finalists, reaches
from qdqspec.types import Consumer, Interval, Placement, Site, Trial


def placement(pairs: int, name: str = "t") -> Placement:
    """A placement of so many activation pairs, and one weight, which does not count."""
    sites = [
        Site(tensor=f"{name}{i}", consumers=(Consumer("n", i),), format="uint8", weight=i == pairs)
        for i in range(pairs + 1)
    ]
    return Placement(sites=frozenset(sites) if pairs else frozenset())


REFERENCE, FEW, MANY, ALL = (placement(pairs) for pairs in (0, 2, 5, 9))


def ratio(median: float, reach: float = 0.02) -> Interval:
    return Interval(median=median, low=median - reach, high=median + reach)


def trial(number: int, what: Placement, at: float | None, *, won: bool = False, ok: bool = True) -> Trial:
    status = "ok" if ok else "failed"
    return Trial(number=number, phase="p", placement=what, ratio=at, incumbent=won, status=status)


# ---- finalists ----------------------------------------------------------------------------------


def test_reference_winner_runner_up_and_everything() -> None:
    trials = [
        trial(0, REFERENCE, 1.0, won=True),
        trial(1, ALL, 0.9, won=True),
        trial(2, FEW, 0.7, won=True),
        trial(3, MANY, 0.8),
        trial(4, placement(3), 0.1, ok=False),
    ]
    assert finalists(trials, ALL) == {
        "reference": REFERENCE,
        "winner": FEW,
        "runner-up": MANY,
        "everything": ALL,
    }


def test_the_last_to_win_a_race_is_the_winner_not_the_best_ratio() -> None:
    trials = [trial(0, REFERENCE, 1.0, won=True), trial(1, FEW, 0.8, won=True), trial(2, MANY, 0.7)]
    roles = finalists(trials, ALL)
    assert (roles["winner"], roles["runner-up"]) == (FEW, MANY)


def test_everything_is_confirmed_though_the_search_ended_before_it() -> None:
    assert finalists([trial(0, REFERENCE, 1.0, won=True)], ALL)["everything"] == ALL
    parts = replace(trial(1, ALL, 0.5, ok=False), phase="isolated", subgraph=("n",))
    assert finalists([trial(0, REFERENCE, 1.0, won=True), parts], ALL)["everything"] == ALL


def test_nothing_is_confirmed_as_everything_where_nothing_can_be_quantized() -> None:
    assert finalists([trial(0, REFERENCE, 1.0, won=True)], REFERENCE) == {
        "reference": REFERENCE,
        "winner": REFERENCE,
    }


def test_where_nothing_won_the_best_of_the_others_is_still_looked_at() -> None:
    trials = [trial(0, REFERENCE, 1.0, won=True), trial(1, FEW, 0.99), trial(2, MANY, None)]
    roles = finalists(trials, FEW)
    assert roles == {"reference": REFERENCE, "winner": REFERENCE, "runner-up": FEW, "everything": FEW}


def test_only_the_reference_ran() -> None:
    trials = [trial(0, REFERENCE, 1.0, won=True), trial(1, ALL, None, ok=False)]
    assert finalists(trials, ALL) == {"reference": REFERENCE, "winner": REFERENCE}


# ---- the choice ---------------------------------------------------------------------------------

ROLES = {"reference": REFERENCE, "winner": MANY, "runner-up": FEW, "everything": ALL}
ONE = Interval(median=1, low=1, high=1)


def test_the_best_is_selected() -> None:
    chosen = choose(ROLES, {"reference": ONE, "winner": ratio(0.5), "runner-up": ratio(0.6)})
    assert (chosen.role, chosen.placement, chosen.unchanged) == ("winner", MANY, False)
    assert chosen.reason == "winner: 0.500 of the reference's time [0.480, 0.520]"


def test_the_simplest_inside_the_best_interval_is_selected() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.5), "runner-up": ratio(0.504), "everything": ratio(0.503)}
    chosen = choose(ROLES, ratios)
    assert (chosen.role, chosen.placement) == ("runner-up", FEW)
    assert "as fast as winner within its interval, with fewer Q/DQ pairs" in chosen.reason


def test_of_equally_simple_ones_the_faster_is_selected() -> None:
    other = placement(5, "u")
    roles = {"reference": REFERENCE, "winner": MANY, "runner-up": other}
    chosen = choose(roles, {"reference": ONE, "winner": ratio(0.51), "runner-up": ratio(0.5)})
    assert chosen.placement == other


def test_not_proved_faster_is_unchanged() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.99), "everything": ratio(1.4)}
    chosen = choose(ROLES, ratios)
    assert (chosen.role, chosen.placement, chosen.unchanged) == ("reference", REFERENCE, True)
    assert chosen.reason == (
        "winner took 0.990 of the reference's time [0.970, 1.010]: "
        "a gain of +1.0 % (95 %: -1.0 % to +3.0 %) does not prove a gain"
    )


def test_a_reference_that_won_is_no_rival_of_itself() -> None:
    roles = {"reference": REFERENCE, "winner": REFERENCE, "runner-up": FEW}
    chosen = choose(roles, {"reference": ONE, "winner": ONE, "runner-up": ratio(1.2)})
    assert chosen.unchanged
    assert "runner-up" in chosen.reason


def test_even_a_rival_without_any_noise_is_named() -> None:
    chosen = choose(ROLES, {"reference": ONE, "winner": ratio(1.25, reach=0.0)})
    assert chosen.reason == "winner took 1.250 of the reference's time [1.250, 1.250]"


def test_nothing_but_the_reference() -> None:
    chosen = choose({"reference": REFERENCE, "winner": REFERENCE}, {"reference": ONE, "winner": ONE})
    assert chosen.unchanged
    assert chosen.reason == "no placement was faster than the reference in any race"


@pytest.mark.parametrize("ratios", [{"winner": ONE}, {"winner": ratio(0.99), "everything": ratio(1.4)}])
def test_an_unchanged_model_for_want_of_budget_states_the_reason(ratios: dict[str, Interval]) -> None:
    roles = {"reference": REFERENCE, "winner": REFERENCE} if len(ratios) == 1 else ROLES
    limit = "its limit of 12 builds"
    chosen = choose(roles, {"reference": ONE, **ratios}, ended_by=limit)
    assert chosen.reason.endswith("; the search ended at its limit of 12 builds, before it was done")
    assert "limit" not in choose(roles, {"reference": ONE, **ratios}).reason


def test_fast_candidates_that_are_not_accurate_enough_are_reported() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.99), "everything": ratio(0.4)}
    chosen = choose(ROLES, ratios, barred={ALL.digest})
    assert chosen.unchanged
    assert chosen.reason == (
        "everything took 0.400 of the reference's time [0.380, 0.420], but is not accurate enough; "
        "winner took 0.990 of the reference's time [0.970, 1.010]: "
        "a gain of +1.0 % (95 %: -1.0 % to +3.0 %) does not prove a gain"
    )


def test_a_gain_below_min_gain_is_unchanged_with_the_gain() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.97, reach=0.015)}
    assert not choose(ROLES, ratios, min_gain=0.01).unchanged
    chosen = choose(ROLES, ratios, min_gain=0.02)
    assert chosen.unchanged
    assert chosen.reason.endswith(
        "a gain of +3.0 % (95 %: +1.5 % to +4.5 %) does not prove the 2 % of tune.min_gain"
    )


def test_the_simplest_is_chosen_among_those_that_prove_the_gain() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.95, reach=0.02), "runner-up": ratio(0.959, reach=0.03)}
    assert choose(ROLES, ratios).role == "runner-up"
    assert choose(ROLES, ratios, min_gain=0.02).role == "winner"


def test_a_wide_interval_does_not_excuse_a_slower_placement() -> None:
    """An interval of 5 % holds a placement that is 4 % slower and has fewer pairs."""
    ratios = {"reference": ONE, "winner": ratio(0.50, reach=0.05), "runner-up": ratio(0.52, reach=0.02)}
    assert choose(ROLES, ratios).role == "winner"


def test_the_selected_model_needs_no_excuse() -> None:
    chosen = choose(ROLES, {"reference": ONE, "winner": ratio(0.5)}, ended_by="its limit of 12 builds")
    assert "limit" not in chosen.reason


@given(
    st.dictionaries(
        st.sampled_from(["winner", "runner-up", "everything"]),
        st.tuples(st.floats(0.3, 1.5), st.floats(0.001, 0.3)),
    )
)
def test_what_ships_is_proved_faster_or_unchanged(drawn: dict[str, tuple[float, float]]) -> None:
    ratios = {"reference": ONE, **{role: ratio(*numbers) for role, numbers in drawn.items()}}
    chosen = choose(ROLES, ratios)
    assert chosen.placement == ROLES[chosen.role]
    assert chosen.unchanged == (chosen.role == "reference")
    assert chosen.unchanged == all(ratios[role].high >= 1 for role in drawn)
    if not chosen.unchanged:
        proved = [role for role in drawn if ratios[role].high < 1]
        best = min(proved, key=lambda role: ratios[role].median)
        assert ratios[chosen.role].median <= ratios[best].high
        assert chosen.placement.pairs <= ROLES[best].pairs


# ---- accuracy -----------------------------------------------------------------------------------


def test_what_a_metric_refused_is_no_finalist() -> None:
    trials = [
        trial(0, REFERENCE, 1.0, won=True),
        replace(trial(1, FEW, 0.5), accuracy=0.1),
        replace(trial(2, MANY, 0.8, won=True), accuracy=0.95),
        trial(3, ALL, 0.9),
    ]
    roles = finalists(trials, ALL, fits=lambda each: reaches(each, None, 0.9))
    assert roles == {"reference": REFERENCE, "winner": MANY, "runner-up": ALL, "everything": ALL}


def test_a_metric_counts_only_where_it_is_known_and_never_for_the_reference() -> None:
    assert reaches(trial(1, FEW, 0.5), None, 0.9)
    assert not reaches(replace(trial(1, FEW, 0.5), accuracy=0.8), None, 0.9)
    assert reaches(replace(trial(0, REFERENCE, 1.0), accuracy=0.8), None, 0.9)
    assert not reaches(replace(trial(1, FEW, 0.5), accuracy=0.95, sqnr_db=10.0), 20.0, 0.9)


def test_only_inaccurate_candidates_were_faster_is_reported() -> None:
    ratios = {"reference": ONE, "winner": ratio(0.5), "runner-up": ratio(0.99)}
    chosen = choose(ROLES, ratios, barred={MANY.digest})
    assert chosen.unchanged
    assert chosen.reason.startswith(
        "winner took 0.500 of the reference's time [0.480, 0.520], but is not accurate"
    )
    assert "runner-up took 0.990" in chosen.reason


def test_finalists_are_those_that_are_accurate_enough_on_all_data() -> None:
    """Asked of race winners from the last on, then of the fastest, and of no more than are needed."""
    other, asked = placement(3), []
    trials = [
        trial(0, REFERENCE, 1.0, won=True),
        trial(1, FEW, 0.9, won=True),
        trial(2, MANY, 0.8, won=True),
        trial(3, other, 0.7),
        trial(4, placement(4), 0.95),
    ]

    def admits(each: Placement) -> bool:
        asked.append(each)
        return each in (FEW, placement(4))

    roles = finalists(trials, ALL, admits=admits)
    assert (roles["winner"], roles["runner-up"], roles["everything"]) == (FEW, placement(4), ALL)
    assert asked[:2] == [MANY, FEW]
    assert set(asked) == {MANY, FEW, other, placement(4)}


def test_where_none_is_accurate_enough_on_all_data_the_reference_is_the_winner() -> None:
    trials = [trial(0, REFERENCE, 1.0, won=True), trial(1, FEW, 0.8, won=True), trial(2, MANY, 0.9)]
    assert finalists(trials, REFERENCE, admits=lambda _: False) == {
        "reference": REFERENCE,
        "winner": REFERENCE,
    }
