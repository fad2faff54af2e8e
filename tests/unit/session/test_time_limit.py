"""The time limit of a run applies to all its cases together."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec.session import Session


def test_the_time_left_decreases_to_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(root=tmp_path, backend="fake", time_limit=100.0)
    started = session._started[1]
    for now, left in ((0.0, 100.0), (40.0, 60.0), (500.0, 0.0)):
        monkeypatch.setattr("qdqspec.session.session.time.monotonic", lambda now=now: started + now)
        assert session._seconds_left() == pytest.approx(left)
    session.close()


def test_there_is_no_time_left_without_a_limit(tmp_path: Path) -> None:
    session = Session(root=tmp_path, backend="fake")
    assert session._seconds_left() is None
    session.close()
