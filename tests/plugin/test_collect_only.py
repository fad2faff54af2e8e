"""Collecting loads no runtime and no drawing library, and opens no model."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_plugin_itself_loads_pytest_and_the_standard_library_only():
    code = (
        "import sys, pytest; before = set(sys.modules); import qdqspec.app.plugin; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'qdqspec'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
