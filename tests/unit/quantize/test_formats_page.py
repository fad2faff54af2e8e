"""The table of formats in the documentation is generated from the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import onnxruntime
import pytest
from packaging.version import Version


def test_the_table_of_formats_is_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if Version(onnxruntime.__version__) < Version("1.32"):
        pytest.skip("the page states the lint rules that apply with ONNX Runtime 1.32 and newer")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    formats_page = importlib.import_module("formats_page")
    page = formats_page.PAGE.read_text(encoding="utf-8")
    assert page == formats_page.page(), "the formats changed; run: python tools/formats_page.py"
