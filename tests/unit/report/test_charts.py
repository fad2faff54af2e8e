"""Charts and tables of the Pareto front of latency and accuracy, and of a case with its baselines."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qdqspec.app.report.charts import baseline_chart, errors_chart, front_chart
from qdqspec.app.report.facts import MOST_BLOCKS, block_errors, case_tables
from qdqspec.app.report.formats import html
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.tables import Table
from qdqspec.testing.records import (
    cached_case,
    faster_case,
    sample_errors,
    sample_pairs,
    sample_run,
    sample_search,
)
from qdqspec.types import (
    BaselineFigure,
    BlockError,
    Evidence,
    FrontPoint,
    Interval,
    Placement,
    RegressionEvidence,
)

SEEN = faster_case().evidence.regression["regression"]


def baseline_tables(found: Evidence) -> list[Table]:
    return [table for table in case_tables(found) if table.title.startswith("Baseline of")]


def drawn(text: str, label: str) -> str:
    """The SVG image whose description begins with ``label``."""
    return next(svg for svg in re.findall(r"<svg .*?</svg>", text) if f'aria-label="{label}' in svg)


def test_the_front_is_drawn_with_selected_and_dominated_trials() -> None:
    found = cached_case().evidence.search
    assert found is not None
    search = replace(found, accuracy=None)
    svg = drawn(front_chart(search), "Time over the reference&#x27;s against SQNR, dB")
    assert svg.count('class="mark kept"') == 1
    assert svg.count('class="mark front"') == len(search.front) - 2, "the reference is not drawn"
    assert svg.count('class="mark dropped"') == sum(trial.sqnr_db is not None for trial in search.trials)
    assert "exact" not in svg
    assert "9 pairs: 0.64 of reference, 28.2 dB, selected" in svg


def test_a_record_read_from_json_has_the_placements_of_the_front() -> None:
    """Without placements of trials, the page could not draw candidates beside the front."""
    run = sample_run()
    case = cached_case()
    found = case.evidence.search
    assert found is not None
    reference = Placement(sites=frozenset())
    front = (*found.front[:-1], replace(found.front[-1], placement=reference.digest))
    digests = [reference.digest, front[0].placement, *(f"{number:016}" for number in range(90, 99))]
    trials = tuple(
        replace(trial, placement=Placement.of_digest(digest), ratio=0.9, sqnr_db=30.0)
        for trial, digest in zip(found.trials, digests, strict=False)
    )
    search = replace(found, accuracy=None, front=front, trials=trials)
    case = replace(case, evidence=replace(case.evidence, search=search))
    read = record_from_json(record_to_json(replace(run, cases=(case,))))
    again = read.cases[0].evidence.search
    assert again is not None
    assert [trial.placement.digest for trial in again.trials] == digests[: len(trials)]
    assert front_chart(again).count('class="mark dropped"') == len(trials) - 2


def test_candidates_slower_than_the_reference_are_not_beside_the_front() -> None:
    found = cached_case().evidence.search
    assert found is not None
    slow = [replace(trial, ratio=2.0) for trial in found.trials]
    assert "mark dropped" not in front_chart(replace(found, accuracy=None, trials=tuple(slow)))


def test_the_front_shows_the_requested_metric() -> None:
    svg = drawn(html.report_format.render(sample_run()), "Time over the reference&#x27;s against top1")
    assert svg.count('class="mark front"') == 3, "the reference has a metric"
    assert ">top1</text>" in svg
    assert "9 pairs: 0.64 of reference, top1 98.1 %, selected" in svg


def test_faster_points_are_left_and_more_accurate_ones_higher() -> None:
    def place(svg: str) -> list[tuple[float, float]]:
        found = re.findall(r'class="mark (?:kept|front)" cx="([\d.]+)" cy="([\d.]+)"', svg)
        return [(float(x), float(y)) for x, y in found]

    places = place(
        drawn(html.report_format.render(sample_run()), "Time over the reference&#x27;s against top1")
    )
    assert places == sorted(places), "faster points are further left"
    heights = [y for _, y in places]
    assert heights == sorted(heights, reverse=True), "more accurate points are higher"


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


@given(
    st.lists(st.tuples(FIGURES, st.floats(0, 1), st.floats(1, 99) | st.just(float("inf"))), max_size=5),
    st.lists(FIGURES, max_size=3),
)
def test_marks_of_any_history_are_within_the_image(
    history: list[tuple[float, float, float]], elsewhere: list[float]
) -> None:
    figures = tuple(
        BaselineFigure(device="d", ratio=Interval(median=m, low=m * low, high=m * high))
        for m, low, high in history
    )
    others = tuple(BaselineFigure(device="e", ratio=Interval(median=m, low=m, high=m)) for m in elsewhere)
    one = Interval(median=1, low=1, high=1)
    found = RegressionEvidence(state="compared", ratio=one, history=figures, elsewhere=others)
    svg = baseline_chart(found)
    assert bool(svg) == bool(history or elsewhere)
    if svg:
        assert_inside(svg)


def test_the_baseline_table_lists_earlier_runs_this_run_and_other_devices() -> None:
    (table,) = baseline_tables(faster_case().evidence)
    assert [row[0] for row in table.rows] == [
        "2025-11-20",
        "2025-12-12",
        "2026-01-08",
        "this run",
        "x86-64 avx2 onnxruntime-1.31 2026-01-09",
    ]
    assert [row[3] for row in table.rows] == ["", "-17.0 %", "+0.5 %", "+0.4 %", ""]
    assert table.rows[2][4] == "model: was 9c0d1e55a1b2, is 3f3f3f3f3f3f"
    assert table.title == "Baseline of regression (__baselines__/squeezenet/sample-device.json)"


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        (RegressionEvidence(state="off"), None),
        (RegressionEvidence(state="missing"), None),
        (RegressionEvidence(state="missing", elsewhere=SEEN.elsewhere), ["another device"]),
        (replace(SEEN, state="written", elsewhere=()), [" ", " ", " "]),
    ],
    ids=["off", "missing", "missing here", "written"],
)
def test_the_baseline_table_without_a_comparison_omits_this_run(
    found: RegressionEvidence, rows: list[str] | None
) -> None:
    tables = baseline_tables(replace(faster_case().evidence, regression={"regression": found}))
    assert len(tables) == (rows is not None)
    for table in tables:
        assert len(table.rows) == len(rows or [])
        assert "this run" not in [row[0] for row in table.rows]


def test_a_wide_table_spans_the_page_and_repeats_headers_in_cells() -> None:
    text = html.report_format.render(sample_run())
    assert text.count('<section class="wide"><h3>Parity with the reference') == 3
    assert '<td class="number" data-head="by runtime dB">' in text
    assert "<section><h3>Latency <small>" in text


def test_errors_of_blocks_are_bars_sorted_by_size() -> None:
    search = replace(sample_search(sample_pairs(3, whole=3), (0.8,)), errors=sample_errors())
    chart = errors_chart(search)
    assert_inside(chart)
    assert chart.count("<rect") == MOST_BLOCKS
    assert chart.index("block0/Conv") < chart.index("block1/Conv")
    shares = [share for *_, share in block_errors(search)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    assert errors_chart(replace(search, errors=())) == ""


def test_a_block_without_error_is_reported_as_exact() -> None:
    exact = (
        BlockError(block="a", label="in+out", sqnr_db=200.0),
        BlockError(block="b", label="in+out", sqnr_db=9.0),
    )
    found = block_errors(replace(sample_search(sample_pairs(3, whole=3), (0.8,)), errors=exact))
    assert [(block, labels) for block, labels, *_ in found] == [("b", "in+out 9.0"), ("a", "in+out exact")]


def test_the_axis_of_a_share_ends_at_one() -> None:
    found = cached_case().evidence.search
    assert found is not None
    front = tuple(replace(point, accuracy=1.0) for point in found.front)
    trials = tuple(replace(trial, accuracy=1.0) for trial in found.trials)
    ticks = re.findall(r'class="tick end">([\d.]+)<', front_chart(replace(found, front=front, trials=trials)))
    assert max(map(float, ticks)) == 1.0


def test_an_unchanged_case_shows_the_reference_once() -> None:
    run = sample_run()
    unchanged = next(case for case in run.cases if case.evidence.status == "unchanged")
    page = html.report_format.render(replace(run, cases=(unchanged,)))
    assert ">reference</text>" in page
    assert ">tuned</text>" not in page
    assert "<td>tuned</td>" not in page
    assert "tuned ms" not in page
