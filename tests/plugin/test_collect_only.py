"""Collecting loads no runtime and no drawing library, and opens no model."""

from __future__ import annotations

HEAVY = (
    "onnx",
    "numpy",
    "scipy",
    "onnxruntime",
    "tensorrt",
    "torch",
    "rich",
    "tabulate",
    "polygraphy",
    "hypothesis.strategies",
)

LIST_LOADED = f"""\
import sys


def pytest_sessionfinish():
    loaded = [name for name in {HEAVY} if name in sys.modules]
    print("LOADED", loaded)
"""


def test_collecting_a_spec_loads_no_heavy_module(project):
    (project.path / "conftest.py").write_text(LIST_LOADED)
    result = project.run_apart("--collect-only", "-s", "specs")
    result.stdout.fnmatch_lines(["*CheckItem speedup*", "*LOADED [[][]]*"])
