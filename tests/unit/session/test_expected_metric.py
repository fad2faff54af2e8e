"""The prediction of a task metric before a build: rehearsed, and corrected by builds of similar accuracy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qdqspec.accuracy.metrics import Score
from qdqspec.app.session.expected_metric import RehearsedMetric
from qdqspec.types import AccuracyRules, Placement, Site, Trial

SAMPLES = 64


class PerfectScores:
    """A metric that is 1 for the rehearsal of every placement."""

    feeds = SAMPLES

    def of_engine(self, engine: Any, metric: str, output: str | None, *, feeds: int) -> Score:
        return Score(value=1.0, samples=feeds, right=np.ones(feeds, dtype=bool))


def metric() -> RehearsedMetric:
    rules = AccuracyRules(metric="top1", max_drop=0.01)
    return RehearsedMetric(PerfectScores(), rules, 1.0, 0.99)  # type: ignore[arg-type] # a replacement for tests


def rehearsal_with(run_seconds: float) -> Any:
    return SimpleNamespace(
        feeds=lambda: iter([{}]),
        run_seconds=run_seconds,
        engine=lambda placement: SimpleNamespace(placement=placement, run=lambda feed: {}),
    )


REHEARSAL = rehearsal_with(1e-6)


def placement_of(count: int) -> Placement:
    return Placement(
        sites=frozenset(Site(tensor=f"t{number}", consumers=(), format="int8") for number in range(count))
    )


def built(placement: Placement, sqnr_db: float, accuracy: float) -> Trial:
    return Trial(number=1, placement=placement, phase="pure", ratio=0.7, sqnr_db=sqnr_db, accuracy=accuracy)


def test_a_build_that_misses_the_metric_excludes_only_placements_with_more_noise() -> None:
    found, first, better, worse = metric(), placement_of(3), placement_of(2), placement_of(4)
    assert found.keeps(first, REHEARSAL, 30.6, 1e6)
    found.learn(built(first, 30.6, 63 / 64))
    assert found.keeps(better, REHEARSAL, 47.4, 1e6)
    assert not found.keeps(worse, REHEARSAL, 30.0, 1e6)
    assert "not built: 1 rehearsed placement," in found.refused_text()


def test_builds_that_meet_the_metric_allow_placements_with_more_noise() -> None:
    found, placements = metric(), [placement_of(count) for count in (2, 3, 4)]
    for placement, sqnr_db, accuracy in zip(placements, (40.0, 38.0, 30.0), (1.0, 1.0, 63 / 64), strict=True):
        assert found.keeps(placement, REHEARSAL, sqnr_db, 1e6)
        found.learn(built(placement, sqnr_db, accuracy))
    assert found.keeps(placement_of(5), REHEARSAL, 29.0, 1e6)  # one of three builds lost a sample


@pytest.mark.parametrize(
    ("lost", "counts", "seconds", "keeps"),
    [
        (lambda feeds: 0.02, True, 1e6, False),
        (lambda feeds: 0.02, False, 0.001, False),
        (lambda feeds: 1 / feeds, True, 0.001, True),
        (lambda feeds: 2 / feeds, True, 0.001, False),
    ],
    ids=["all data", "a mean", "one sample", "two samples"],
)
def test_a_metric_on_a_part_of_the_data_may_be_lower_by_one_sample(
    lost: Callable[[int], float], counts: bool, seconds: float, keeps: bool
) -> None:
    class Own(PerfectScores):
        """A metric of half of the samples."""

        def of_engine(self, engine: Any, metric: str, output: str | None, *, feeds: int) -> Score:
            value = 0.5 - lost(feeds) * bool(engine.placement.sites)
            return Score(value=value, samples=feeds, right=np.ones(feeds, dtype=bool) if counts else None)

    slow = rehearsal_with(0.01)
    rules = AccuracyRules(metric="own", max_drop=0.01)
    found = RehearsedMetric(Own(), rules, 0.5, 0.49)  # type: ignore[arg-type] # a replacement for tests
    assert found.keeps(placement_of(1), slow, 20.0, seconds) is keeps
