from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.types import Trial
from tests.support.lab import NO_LIMITS, placement

FAR_BELOW_DB, STEP_DB = 3.0, 5.0


def bar(**scores: float) -> Limits:
    """Limits after candidates: ``bar(db20=0.9)`` is one of 20 dB with a score of 0.9, where 0.5 is accepted."""
    metric = MetricLimit(least=0.5)
    found = Limits(asked=NO_LIMITS, metric=metric, far_db=FAR_BELOW_DB, step_db=STEP_DB)
    for name, score in scores.items():
        found.learn(_trial(float(name.removeprefix("db")), score))
    return found


def _trial(sqnr_db: float, score: float) -> Trial:
    """A trial of a placement of its own for each SQNR."""
    return Trial(number=1, phase="p", placement=placement(str(sqnr_db)), sqnr_db=sqnr_db, accuracy=score)


def test_a_higher_sqnr_is_proposed_after_a_rejection_at_most_the_middle_to_an_accepted_one() -> None:
    assert bar(db10=0.1).aim_db == 10 + STEP_DB
    assert bar(db10=0.1, db15=0.2).aim_db == 15 + STEP_DB
    assert bar(db10=0.1, db16=0.9).aim_db == 13
    assert bar(db10=0.1, db40=0.9).aim_db == 10 + STEP_DB  # the increase is limited to one step


def test_an_sqnr_far_below_a_rejected_one_is_excluded() -> None:
    found = bar(db20=0.1, db30=0.9)
    assert found.is_far_below(20 - FAR_BELOW_DB)
    assert not found.is_far_below(20 - FAR_BELOW_DB + 0.1)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_build_replaces_the_rehearsal_of_its_placement(*, is_first: bool) -> None:
    found, built = bar(), _trial(16.0, 0.1)
    if is_first:
        found.learn(built)
    found.rehearse(built.placement, 18.0, kept=True)
    if not is_first:
        assert found.scored[0] == [18]
        found.learn(built)
    assert found.scored == ([], [16])


@given(st.lists(st.tuples(st.floats(-50, 100, allow_subnormal=False), st.booleans()), max_size=8))
def test_no_accepted_candidate_is_far_below_and_the_next_sqnr_is_above_the_rejected(results) -> None:
    found = bar()
    for sqnr_db, good in results:
        found.learn(_trial(sqnr_db, 1.0 if good else 0.0))
    assert not any(found.is_far_below(sqnr_db) for sqnr_db in found.scored[0])
    if found.aim_db is not None:
        assert math.isfinite(found.aim_db)
        assert found.aim_db > found.missed_db
