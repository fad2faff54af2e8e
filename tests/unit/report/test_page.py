"""Pages, tables and colours of the terminal."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from qdqspec.app.report.charts import ticks
from qdqspec.app.report.formats import fit_page, html, markdown
from qdqspec.app.report.tables import summary_table
from qdqspec.app.report.terminal import color_words, wants_color
from qdqspec.testing.records import empty_run, faster_case, hostile_run, sample_pairs, sample_run
from qdqspec.types import CaseRecord, Interval, RatioTest, RunRecord

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
    found = ticks(low, low + span)
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
