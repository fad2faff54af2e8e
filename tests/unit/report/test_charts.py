"""Charts and tables of the Pareto front of latency and accuracy, and of a case with its baselines."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qdqspec.app.report.charts import front_chart
from qdqspec.app.report.facts import block_errors
from qdqspec.testing.records import cached_case, sample_errors, sample_pairs, sample_search
from qdqspec.types import FrontPoint, Interval


def test_the_front_is_drawn_with_selected_and_dominated_trials() -> None:
    found = cached_case().evidence.search
    assert found is not None
    search = replace(found, accuracy=None)
    svg = front_chart(search)
    assert 'aria-label="Time over the reference&#x27;s against SQNR, dB' in svg
    assert svg.count('class="mark kept"') == 1
    assert svg.count('class="mark front"') == len(search.front) - 2, "the reference is not drawn"
    assert svg.count('class="mark dropped"') == sum(trial.sqnr_db is not None for trial in search.trials)
    assert "exact" not in svg
    assert "9 pairs: 0.64 of reference, 28.2 dB, selected" in svg


FIGURES = st.floats(1e-3, 1e3)


@example([(1.0, 1.2e-107), (1.0, 1.2e-107)])
@example([(1.0, 0.98), (1.0, 0.9800000000000001)])
@given(st.lists(st.tuples(FIGURES, st.floats(-200, 199)), min_size=2, max_size=8))
def test_marks_of_any_front_are_within_the_image(points: list[tuple[float, float]]) -> None:
    search = cached_case().evidence.search
    assert search is not None
    front = tuple(
        FrontPoint(
            placement=str(number),
            pairs=1,
            ratio=Interval(median=ratio, low=ratio / 2, high=ratio * 3),
            sqnr_db=sqnr_db,
        )
        for number, (ratio, sqnr_db) in enumerate(points)
    )
    assert_inside(front_chart(replace(search, front=front, trials=(), accuracy=None)))


def assert_inside(svg: str) -> None:
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]  # every image has one
    for name, value in re.findall(r' (cx|cy|x1|x2|y1|y2)="([^"]+)"', svg):
        assert 0 <= float(value) <= (width if "x" in name else height), name


def test_errors_of_blocks_are_rows_sorted_by_size() -> None:
    search = replace(sample_search(sample_pairs(3, whole=3), (0.8,)), errors=sample_errors())
    blocks = block_errors(search)
    assert [name for name, *_ in blocks[:2]] == ["/layer0/block0/Conv", "/layer1/block1/Conv"]
    shares = [share for *_, share in blocks]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
