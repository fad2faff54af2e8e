"""Operations that are forbidden in the source: executing the content of a file, and talking to other machines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "qdqspec"
FILES = sorted(PACKAGE.rglob("*.py"))

# These modules execute read data or send requests.
NEVER_IMPORTED = re.compile(
    r"(_?pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|copyreg|runpy"
    r"|urllib\.request|http|requests|ftplib|smtplib|xmlrpc|telnetlib|webbrowser)(\..*)?"
)
NEVER_CALLED = re.compile(
    r"eval|exec|compile|__import__|os\.(system|popen)|(np|numpy|torch)\.load|yaml\.(unsafe_)?load"
    r"|np\.fromregex|pd\.read_pickle"
)
TALKS_TO_CHILDREN = {
    "backends/onnxruntime_web/engine.py",
    "backends/isolation/launch.py",
    "_core/arrays.py",
    "backends/isolation/worker.py",
}  # over private sockets


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_executes_read_data() -> None:
    for path in FILES:
        for module in imported(path):
            assert not NEVER_IMPORTED.fullmatch(module), f"{path}: {module}"
            assert module != "socket" or name_of(path) in TALKS_TO_CHILDREN
        for called, call in calls(path):
            assert not NEVER_CALLED.fullmatch(called), f"{path}: {called}"
            for keyword in call.keywords:
                if keyword.arg in ("allow_pickle", "shell"):
                    assert ast.unparse(keyword.value) == "False", f"{path}: {called}({keyword.arg}=...)"
