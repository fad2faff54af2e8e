"""Renews tests/data/tensorrt/api: the names of TensorRT's Python API that qdqspec and its stand-in for TensorRT use.

``python tools/tensorrt_api.py`` reads them from NVIDIA's bindings, after a change of the backend that uses a new name,
or for a new version of TensorRT. It needs an index and a C compiler.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from tensorrt_surface import Surface, bindings, read_surface  # noqa: E402 - beside this file
from trt_surface import API, VERSIONS, source_nodes  # noqa: E402 - found there

FAKE = SUPPORT / "fake_trt" / "tensorrt" / "__init__.py"


def used_names() -> set[str]:
    """Every attribute, keyword and literal name in the source of the backend, which may be names of TensorRT."""
    found: set[str] = set()
    for node in source_nodes():
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def fake_names() -> set[str]:
    """The classes and enums of the fake."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FAKE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_enum":
            found.add(ast.literal_eval(node.args[0]).partition(".")[0])
    return found


def trimmed(surface: Surface, names: set[str]) -> Surface:
    """The part of an API with these names, or that the fake has: classes, enums and functions, with named members.

    An enum is kept completely, for its values.
    """
    wanted = names | fake_names()
    classes = {
        name: {
            "methods": {m: s for m, s in entry["methods"].items() if m in names or m == "__init__"},
            "properties": {p: t for p, t in entry["properties"].items() if p in names},
        }
        for name, entry in surface["classes"].items()
        if name in wanted
    }
    enums = {name: e for name, e in surface["enums"].items() if name.split(".")[0] in wanted}
    functions = {name: f for name, f in surface["functions"].items() if name in names}
    return {"version": surface["version"], "classes": classes, "enums": enums, "functions": functions}


if __name__ == "__main__":
    API.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            surface = trimmed(read_surface(bindings(version, Path(folder))), used_names())
        text = json.dumps(surface, indent=1, sort_keys=True)
        (API / f"{version}.json").write_text(text + "\n", encoding="utf-8")
