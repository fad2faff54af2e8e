"""The time limit of a run applies to all its cases together."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec.app.session import Session
from qdqspec.app.session.tuning import named, trials_of
from qdqspec.testing.strategies import small_space
from qdqspec.types import TuneRules


def test_the_time_left_decreases_to_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(root=tmp_path, backend="fake", time_limit=100.0)
    started = session._started[1]
    for now, left in ((0.0, 100.0), (40.0, 60.0), (500.0, 0.0)):
        monkeypatch.setattr("qdqspec.app.session.session.time.monotonic", lambda now=now: started + now)
        assert session._seconds_left() == pytest.approx(left)
    session.close()


def test_there_is_no_time_left_without_a_limit(tmp_path: Path) -> None:
    session = Session(root=tmp_path, backend="fake")
    assert session._seconds_left() is None
    session.close()


def test_with_a_time_limit_a_search_may_build_more_unless_it_has_a_number_of_builds() -> None:
    space, make = small_space(), named(TuneRules().strategy)
    untimed, timed = (trials_of(TuneRules(minutes=minutes), space, make) for minutes in (None, 1.0))
    assert timed > untimed
    assert trials_of(TuneRules(minutes=1.0, trials=7), space, make) == 7
