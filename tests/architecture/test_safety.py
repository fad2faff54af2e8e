"""Operations that are forbidden in the source: executing the content of a file, and talking to other machines."""

from __future__ import annotations

import ast
import re
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
    "backends/isolation/isolated.py",
    "_core/arrays.py",
    "backends/isolation/worker.py",
}  # over private sockets


def test_no_module_executes_read_data() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                check_call(f"{path}: {ast.unparse(node)}", node)
            elif isinstance(node, ast.Import):
                check_modules(path, *(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                check_modules(path, node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def check_call(where: str, call: ast.Call) -> None:
    assert not NEVER_CALLED.fullmatch(ast.unparse(call.func)), where
    for keyword in call.keywords:
        assert keyword.arg not in ("allow_pickle", "shell") or ast.unparse(keyword.value) == "False", where


def check_modules(path: Path, *modules: str) -> None:
    for module in modules:
        assert not NEVER_IMPORTED.fullmatch(module), f"{path}: {module}"
        assert module != "socket" or path.relative_to(PACKAGE).as_posix() in TALKS_TO_CHILDREN, path
