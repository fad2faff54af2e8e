"""Charts of a case and the drawing of its model: well-formed, within their frames and small, for any names."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from qdqspec.app.report.charts import front_chart, layers_chart, model_graph, style_of
from qdqspec.app.report.formats import html
from qdqspec.testing.records import cached_case, faster_case, sample_run
from qdqspec.types import FrontPoint, GraphPart, Interval, RunRecord

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
    for name, value in re.findall(r' (cx|cy|x1|x2|y1|y2)="([^"]+)"', svg):
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
    drawing = model_graph(parts)
    root = ET.fromstring(drawing.svg)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    boxes = [rect for rect in root.iter("rect") if rect.attrib["class"] == "node"]
    assert len(boxes) == len(parts)
    assert float(boxes[0].attrib["x"]) == pytest.approx(drawing.start, abs=0.1)
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
    assert drawing is None or len(drawing.svg) < 80_000
    page = html.report_format.render(drawn_run(chain(60), cases=30))
    assert len(page.encode()) <= html.LIMIT_BYTES
    assert page.count("<h2>squeezenet") == page.count("drawings are left out") == 30


def test_without_the_library_the_page_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graph_layout", None)
    page = html.report_format.render(drawn_run(chain(3)))
    assert "pip install &#39;qdqspec[report]&#39;" in page
    assert 'aria-label="Milliseconds by part of the model' in page, "charts need no library"
