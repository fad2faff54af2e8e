"""The committed part of TensorRT's Python API: the names that qdqspec uses, written by ``tools/tensorrt_api.py``."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
API = ROOT / "tests" / "data" / "tensorrt" / "api"
VERSIONS = ("10.9.0.34", "10.16.1.11", "11.4.0.106")
_FILES = ("build", "cache", "device", "engine", "log", "run")
SOURCES = tuple(ROOT / "qdqspec" / "backends" / "tensorrt" / f"{name}.py" for name in _FILES)
Surface = dict[str, Any]


def source_nodes() -> Iterator[ast.AST]:
    for path in SOURCES:
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def optional_names() -> set[str]:
    """Names that are read by `optional`, `required` or a constant, because not every version has them."""
    found: set[str] = set()
    for node in source_nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            if node.func.id in ("optional", "required", "hasattr", "setattr"):
                found.update(word for word in words if isinstance(word, str))
    return found


def load(version: str) -> Surface:
    """The committed surface of one version."""
    found: Surface = json.loads((API / f"{version}.json").read_text(encoding="utf-8"))
    return found
