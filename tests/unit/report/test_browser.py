"""The HTML report in a browser: no page is wider than its window. Skipped without Chromium."""

from __future__ import annotations

import html as entities
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from qdqspec.app.report.formats import html
from qdqspec.testing.records import bare_run, hostile_run, sample_run
from qdqspec.types import RunRecord

WIDTHS = (400, 700, 1000, 2000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
# Of each frame: the width of the page, the number of texts cut by their chart, and of parts that scroll.
SCRIPT = """<p id="seen"></p><script>onload = () => {
  const cut = text => {
    const [own, whole] = [text, text.ownerSVGElement].map(each => each.getBoundingClientRect())
    return own.left < whole.left - 1 || own.right > whole.right + 1
  }
  const scrolls = each => each.scrollWidth > each.clientWidth + 1
  document.getElementById("seen").textContent = [...document.querySelectorAll("iframe")].map(frame => {
    const count = (which, test) => [...frame.contentDocument.querySelectorAll(which)].filter(test).length
    const width = frame.contentDocument.documentElement.scrollWidth
    return [width, count("figure > svg text", cut), count(".scroll, figure", scrolls)].join(" ")
  }).join(" ")
}</script>"""
LONG = "set tune.min_sqnr_db, or exclude nodes/that/have/a/long/path/without/any/space/in/between"


def in_frames(page: str, folder) -> dict[int, tuple[int, int, int]]:
    """The pixels by which a page is wider than each window, and the counts of cut texts and of scrolling parts."""
    opened = page.replace("<details>", "<details open>")
    frames = "".join(
        f'<iframe width="{width}" height="900" style="border:0" srcdoc="{entities.escape(opened)}"></iframe>'
        for width in WIDTHS
    )
    file = folder / "frames.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{frames}{SCRIPT}", encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
    ]
    shown = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()],
        capture_output=True,
        check=True,
        encoding="utf-8",
        timeout=120,
    ).stdout
    found = re.search(r'<p id="seen">([\d ]+)</p>', shown)
    assert found, shown[-2000:]
    numbers = map(int, found[1].split())
    return {width: (next(numbers) - width, next(numbers), next(numbers)) for width in WIDTHS}


def advising_run() -> RunRecord:
    """A run with checks of long names whose advice has long words."""
    run = sample_run()
    case = run.cases[0]
    results = tuple(
        replace(result, id=f"{result.id}-of-the-exported-model", verdict=replace(result.verdict, advice=LONG))
        for result in case.results
    )
    return replace(run, cases=(replace(case, results=results),))


@pytest.mark.parametrize(
    "record",
    [sample_run(), hostile_run(), bare_run(), advising_run()],
    ids=["sample", "hostile", "bare", "advice"],
)
def test_no_page_is_wider_than_its_window(record, tmp_path):
    seen = in_frames(html.report_format.render(record), tmp_path)
    assert {width: wider for width, (wider, _, _) in seen.items() if wider > 0} == {}


def test_no_text_of_a_chart_is_cut_and_no_part_of_the_page_scrolls(tmp_path):
    page = html.report_format.render(sample_run())
    longest = "...ModelOfManyWords/Encoder_1/MagikaV2/LayerNorm_1/Square"
    page = re.sub(r">/layer\d/block\d/Conv<", f">{longest}<", page)
    assert longest in page
    assert {seen[1:] for seen in in_frames(page, tmp_path).values()} == {(0, 0)}
