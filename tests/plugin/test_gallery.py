"""The specs of docs/gallery load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from qdqspec.spec.load import load_spec

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
SPECS = sorted(GALLERY.glob("*.qdq.yaml"))


@pytest.fixture(scope="module")
def fetching() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery_fetch", GALLERY / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_gallery_spec_has_a_model_and_a_line_in_the_page(fetching: ModuleType) -> None:
    page = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert {path.name.partition(".")[0] for path in SPECS} == set(fetching.MODELS)
    for path in SPECS:
        name, spec = path.name.partition(".")[0], load_spec(path, root=GALLERY)
        assert Path(str(spec.model)).name == f"{name}.onnx"
        assert spec.checks
        assert path.name in page
        assert fetching.MODELS[name].package.partition("==")[0] in page
