"""The HTML report in a browser: no page is wider than its window. Skipped without Chromium."""

from __future__ import annotations

import html as entities
import re
import shutil
import subprocess

import pytest

from qdqspec.report.formats import html
from qdqspec.testing.records import bare_run, empty_run, hostile_run, sample_run

WIDTHS = (400, 700, 1000, 2000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCRIPT = """<p id="widths"></p><script>onload = () => {
  document.getElementById("widths").textContent = [...document.querySelectorAll("iframe")].map(frame =>
    frame.contentDocument.documentElement.scrollWidth).join(" ")
}</script>"""


def overflow(page: str, folder) -> dict[int, int]:
    """The pixels by which a page is wider than each window: frames of these widths in one page."""
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
    found = re.search(r'<p id="widths">([\d ]+)</p>', shown)
    assert found, shown[-2000:]
    return {width: int(is_) - width for width, is_ in zip(WIDTHS, found[1].split(), strict=True)}


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_wide_element_is_found(tmp_path):
    page = html.report_format.render(empty_run()).replace(
        "</body>", '<div style="width:800px">x</div></body>'
    )
    wide = overflow(page, tmp_path)
    assert wide[400] > 0
    assert wide[1000] <= 0


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(
    "record", [sample_run(), hostile_run(), bare_run()], ids=["sample", "hostile", "bare"]
)
def test_no_page_is_wider_than_its_window(record, tmp_path):
    wide = overflow(html.report_format.render(record), tmp_path)
    assert {width: more for width, more in wide.items() if more > 0} == {}
