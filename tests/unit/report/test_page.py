"""Pages with their charts, tables and colours of the terminal."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from qdqspec.app.report.charts import Axis, front_chart, layers_chart, model_graph, style_of
from qdqspec.app.report.formats import fit_page, html, markdown
from qdqspec.app.report.tables import section_text, summary_table
from qdqspec.app.report.terminal import color_words, wants_color
from qdqspec.testing.records import cached_case, empty_run, faster_case, hostile_run, sample_pairs, sample_run
from qdqspec.types import CaseRecord, FrontPoint, GraphPart, Interval, RatioTest, RunRecord, Section

PAGES = (markdown, html)


def big_run(cases: int, pairs: int) -> RunRecord:
    case = faster_case()
    many = replace(case.evidence, pairs=sample_pairs(pairs))
    return replace(sample_run(), cases=(CaseRecord(evidence=many, results=case.results),) * cases)


# ---- terminal -----------------------------------------------------------------------------------


def test_the_text_of_the_summary_table(golden) -> None:
    golden("report/summary.txt", summary_table(sample_run()) + "\n")


@pytest.mark.parametrize("unchanged", [True, False])
@pytest.mark.parametrize(
    ("reach", "text"),
    [
        (0.01, "1.25x, at least 1.23x"),
        (0.25, "1.25x, inconclusive"),  # a cached winner that is kept
        (None, "1.25x (95 %: 0.91 to 2.00)"),  # of a record without the test
    ],
)
def test_a_row_has_what_was_proved_and_an_unchanged_one_has_no_bound(reach, text, *, unchanged):
    """The prediction interval is wider and contains 1."""
    case = replace(faster_case(), results=())
    found = case.evidence
    mean = Interval(median=0.8, low=0.8 - (reach or 0), high=0.8 + (reach or 0))
    tested = {} if reach is None else {"tuned": RatioTest(mean=mean, enclosing=mean)}
    speedup = Interval(median=1.25, low=0.91, high=2.0)
    latency = replace(found.latency, tested=tested, speedup=speedup)
    evidence = replace(found, latency=latency, search=replace(found.search, unchanged=unchanged))
    run = replace(sample_run(), cases=(replace(case, evidence=evidence),))
    for render in (summary_table, markdown.report_format.render, html.report_format.render):
        shown = render(run)
        assert (text in shown) is not unchanged
        assert ("1.25x" in shown) is not unchanged
        assert ("0.91 to 2.00" in shown) is (reach is None and not unchanged)


def test_the_reason_of_an_inconclusive_check_is_below_the_summary_table() -> None:
    """pytest shows the reasons of skipped tests with ``-rs`` only."""
    run = sample_run()
    first = next(case for case in run.cases if case.results)
    result = first.results[0]
    open_ = replace(result, verdict=replace(result.verdict, outcome="inconclusive", headline="no baseline"))
    text = summary_table(replace(run, cases=(replace(first, results=(open_,)),)))
    assert f"{result.id} inconclusive: no baseline" in text


def test_an_sqnr_just_below_its_limit_is_written_below_it() -> None:
    case = faster_case()
    outputs = tuple(replace(out, sqnr_db=19.996) for out in case.evidence.parity.outputs)
    evidence = replace(case.evidence, parity=replace(case.evidence.parity, outputs=outputs))
    text = summary_table(replace(sample_run(), cases=(replace(case, evidence=evidence),)))
    assert " 19.996 < 20 " in text
    assert "its SQNR of 19.996 dB is below 20 dB" in text


# ---- HTML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [sample_run, empty_run, hostile_run])
def test_a_page_is_well_formed_and_loads_and_runs_nothing(run) -> None:
    page = html.report_format.render(run())
    xml = re.sub(r"(<(?:meta|wbr)[^>/]*)>", r"\1/>", page.removeprefix("<!DOCTYPE html>"))
    elements = [*ET.fromstring(re.sub(r"&(?!amp|lt|gt|quot|#)\w+;", "", xml)).iter()]
    tags = {element.tag.rpartition("}")[2] for element in elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "image"}
    names = {name for element in elements for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or name in ("src", "style")}
    assert "url(" not in page


def test_a_role_with_parentheses_stays_whole_in_the_heading_of_its_table() -> None:
    """A heading has its parentheses in small type: they begin before the role, which may have some of its own."""
    run = sample_run()
    case = next(one for one in run.cases if one.evidence.search and one.evidence.search.rejected)
    rejected = [replace(one, role="fastest candidate (all)") for one in case.evidence.search.rejected]
    search = replace(case.evidence.search, rejected=tuple(rejected))
    case = replace(case, evidence=replace(case.evidence, search=search))
    page = html.report_format.render(replace(run, cases=(case,)))
    assert "<small>fastest candidate (all); one profile of each model</small>" in page


def test_a_wide_table_of_few_rows_has_a_line_for_each_column() -> None:
    headers = tuple(f"a long heading of column {number}" for number in range(6))
    wide = Section(title="Wide", headers=headers, rows=(("0", "1", "2", "3", "4", "5"),) * 2)
    assert section_text(wide).splitlines()[:2] == ["Wide", "  a long heading of column 0  0  0"]
    assert len(section_text(replace(wide, rows=wide.rows * 2)).splitlines()) == 1 + 2 + 4, (
        "many rows are rows"
    )


def test_names_are_escaped_in_markdown() -> None:
    text = markdown.escape("a|b <i> [x](y) `c` *d* _e_ http://x.y @me #1 www.z.de\n- f")
    assert text == (r"a\|b \<i\> \[x\](y) \`c\` \*d\* \_e\_ http:\//x.y \@me \#1 www\.z.de\\n- f")


# ---- size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_above_the_size_limit_omits_pairs_first_then_the_last_cases(page) -> None:
    whole, cut, few = (page.report_format.render(big_run(*size)) for size in ((1, 2000), (2, 3500), (900, 4)))
    assert "fire1999/x" in whole
    assert "left out" not in whole
    assert cut.count("Q/DQ pairs and drawings are left out") == cut.count("7 built, 1 failed") == 2
    assert "fire3499/x" not in cut
    assert re.search(r"\d+ more cases left out", few)
    assert "and 400 more" in few
    assert max(len(text.encode()) for text in (whole, cut, few)) <= page.LIMIT_BYTES


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6), st.integers(150, 900))
def test_a_fitted_page_is_within_the_limit_and_keeps_its_order(sizes: list, limit: int) -> None:
    def render_cases(details: bool) -> list[str]:
        return [f"{n}:".ljust(size + more * details, "x") for n, (size, more) in enumerate(sizes)]

    texts = fit_page(["head"], render_cases, ["tail"], limit, lambda left: f"{left} left")
    assert sum(len(text) + 2 for text in texts) <= limit
    assert (texts[0], texts[-1]) == ("head", "tail")
    for details in (True, False):
        if sum(len(text) + 2 for text in ["head", *render_cases(details), "tail"]) <= limit:
            assert texts[1:-1] == render_cases(details)
            break


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_limited_in_number_and_within_the_range(low: float, span: float) -> None:
    found = Axis(low, low + span, 0, 1).ticks()
    assert len(found) <= 9
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    assert found == sorted(found)


# ---- colours of a terminal -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "environment", "is_terminal", "wanted"),
    [
        ("auto", {}, True, True),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_follows_the_option_then_the_environment(choice, environment, is_terminal, wanted):
    assert wants_color(choice, environment, is_terminal=is_terminal) is wanted


def test_only_verdicts_and_labels_of_messages_are_coloured():
    assert color_words("latency FAIL, 4 passed") == "latency \x1b[31mFAIL\x1b[0m, \x1b[32m4 passed\x1b[0m"
    assert color_words("warning: x\nfail: y") == "\x1b[33mwarning:\x1b[0m x\n\x1b[31mfail:\x1b[0m y"
    plain = "case  ref ms\nFAILURE a warning: of x"
    assert color_words(plain) == plain


# ---- charts of a case and the drawing of its model: well-formed, within their frames and small, for any names


FIGURES = st.floats(1e-3, 1e3)


@example([(1.0, 1.2e-107), (1.0, 1.2e-107)])
@example([(1.0, 0.98), (1.0, 0.9800000000000001)])
@given(st.lists(st.tuples(FIGURES, st.floats(-200, 199)), min_size=2, max_size=8))
def test_marks_of_any_front_are_within_the_image(points: list[tuple[float, float]]) -> None:
    search = cached_case().evidence.search
    front = tuple(
        FrontPoint(
            placement=str(number),
            pairs=1,
            ratio=Interval(median=ratio, low=ratio / 2, high=ratio * 3),
            sqnr_db=sqnr_db,
        )
        for number, (ratio, sqnr_db) in enumerate(points)
    )
    svg = front_chart(replace(search, front=front, trials=(), accuracy=None))
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    marks = re.findall(r' (cx|cy|x1|x2|y1|y2)="([^"]+)"', svg)
    assert len(marks) >= 2 * len(points)
    for name, value in marks:
        assert 0 <= float(value) <= float(size[1 if "x" in name else 2]), name


# ---- the drawing of a model ------------------------------------------------------------------------

NAMES = st.text(max_size=12) | st.sampled_from(
    ["</svg><script>", "a&b", '"quoted"', "\x00\x1b[31m", "/model/conv_1", "\u202e"]
)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[GraphPart, ...]:
    """Parts of a graph that may have cycles, with odd names, operators and formats."""
    ms = st.none() | st.floats(0, 100)
    part = st.builds(
        GraphPart,
        name=NAMES,
        ops=st.dictionaries(NAMES, st.integers(6, 9), min_size=1, max_size=3),
        formats=st.dictionaries(NAMES, st.integers(1, 3), max_size=2),  # of no more nodes than there are
        reference_ms=ms,
        tuned_ms=ms,
        sqnr_db=st.none() | st.floats(-20, 200),
    )
    parts = draw(st.lists(part, min_size=1, max_size=12))
    makers = st.sets(st.integers(0, len(parts) - 1), max_size=3)
    inputs = (tuple(sorted(draw(makers) - {at})) for at in range(len(parts)))
    return tuple(replace(one, inputs=read) for one, read in zip(parts, inputs, strict=True))


def drawn_run(parts: tuple[GraphPart, ...], cases: int = 1) -> RunRecord:
    case = faster_case()
    found = replace(case, evidence=replace(case.evidence, graph=parts))
    return replace(sample_run(), cases=(found,) * cases)


def chain(count: int) -> tuple[GraphPart, ...]:
    return tuple(
        GraphPart(
            name=f"/layer{at}/Conv",
            ops={"Conv": 4, "Relu": 3},
            formats={"uint8": 4, "int4": 1},
            reference_ms=1.0 + at,
            tuned_ms=0.5,
            sqnr_db=30.0 + at,
            inputs=tuple(range(max(0, at - 3), at)),
        )
        for at in range(count)
    )


@given(graphs())
def test_a_drawing_is_well_formed_and_within_its_frame_for_any_names(parts) -> None:
    pytest.importorskip("graph_layout")
    svg, start = model_graph(parts)
    root = ET.fromstring(svg)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    boxes = [rect for rect in root.iter("rect") if rect.attrib["class"] == "node"]
    assert len(boxes) == len(parts)
    assert float(boxes[0].attrib["x"]) == pytest.approx(start, abs=0.1)
    for rect in root.iter("rect"):
        x, y, wide, tall = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + wide <= width + 0.2
        assert y + tall <= height + 0.2
    corners = [(float(box.attrib["x"]), float(box.attrib["y"])) for box in boxes]
    assert len(set(corners)) == len(parts), "no box covers another"
    assert len(list(root.iter("path"))) == sum(len(part.inputs) for part in parts)
    if chart := layers_chart(parts):
        ET.fromstring(chart)


def test_a_page_shows_the_drawing_with_a_legend_and_the_times_side_by_side() -> None:
    pytest.importorskip("graph_layout")
    page = html.report_format.render(drawn_run(chain(6)))
    assert "42 nodes in 6 parts" in page
    assert style_of(chain(6)) == {"uint8": "f0", "int4": "f1"}
    assert '<i class="f0"></i>uint8' in page
    assert "6.00 \u2192 0.500 ms" in page
    assert "error 27.5 %" in page
    assert 'aria-label="Milliseconds by part of the model' in page


def test_a_page_of_many_cases_with_drawings_is_within_the_size_limit() -> None:
    drawing = model_graph(chain(60))
    assert drawing is None or len(drawing[0]) < 80_000
    page = html.report_format.render(drawn_run(chain(60), cases=30))
    assert len(page.encode()) <= html.LIMIT_BYTES
    assert page.count("<h2>squeezenet") == page.count("drawings are left out") == 30


def test_without_the_library_the_page_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graph_layout", None)
    page = html.report_format.render(drawn_run(chain(3)))
    assert "pip install &#39;qdqspec[report]&#39;" in page
    assert 'aria-label="Milliseconds by part of the model' in page, "charts need no library"
