"""Counts the size of the package: code lines, files, functions, private functions used once, repeated type names.

    python benchmarks/figures_of_code.py            # the working tree
    python benchmarks/figures_of_code.py 7a38d58 HEAD

Code lines are lines with a token that is neither a comment nor a docstring. A private function is used once if its name
occurs once besides its definition, in its file. A public type name is that of a class or alias without underscore at
module level; it is repeated if several modules define it. Lines that name a runtime are counted in code, comments and
docstrings outside ``backends/`` and ``lint/``.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "qdqspec"
SHORT = 7  # lines of a short function
RUNTIME = re.compile(r"onnxruntime|tensorrt|openvino|trtexec", re.IGNORECASE)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """The number of lines with code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len(lines - docstrings)


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def used_once(text: str, tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Private functions whose name occurs once besides their definition."""
    for function in functions_in(tree):
        name = function.name
        if name.startswith("_") and not name.startswith("__") and len(re.findall(rf"\b{name}\b", text)) == 2:
            yield function


def public_types(tree: ast.Module) -> Iterator[str]:
    """Names of classes and type aliases of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and ast.unparse(node.annotation).endswith("TypeAlias")
        ):
            yield node.target.id


def figures(package: Path) -> dict[str, float]:
    """The figures of a package in a folder."""
    count: Counter[str] = Counter()
    types: dict[str, set[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        single = list(used_once(text, tree))
        count["files"] += 1
        count["code lines"] += code_lines(text)
        count["functions"] += sum(1 for _ in functions_in(tree))
        count["private functions used once"] += len(single)
        count[f"of these with at most {SHORT} lines"] += sum(
            (function.end_lineno or 0) - function.lineno < SHORT for function in single
        )
        for name in public_types(tree):
            if not name.startswith("_"):
                types.setdefault(name, set()).add(path)
        if not {"backends", "lint"} & set(path.relative_to(package).parts):
            named = sum(RUNTIME.search(line) is not None for line in text.splitlines())
            count["lines outside backends that name a runtime"] += named
            count["files with such lines"] += named > 0
    count["public type names of several modules"] = sum(len(paths) > 1 for paths in types.values())
    return {**count, "functions per 1,000 code lines": 1000 * count["functions"] / count["code lines"]}


def at_commit(commit: str) -> dict[str, float]:
    """The figures of the package at a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, PACKAGE]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return figures(Path(folder) / PACKAGE)


def main() -> None:
    """Print a row for each figure, a column for each commit."""
    commits = sys.argv[1:]
    columns = [at_commit(commit) for commit in commits] or [figures(ROOT / PACKAGE)]
    sys.stdout.write(f"| figure | {' | '.join(commits or ['working tree'])} |\n")
    sys.stdout.write(f"|---|{'---|' * len(columns)}\n")
    for name in columns[0]:
        sys.stdout.write(f"| {name} | {' | '.join(f'{column.get(name, 0):,.0f}' for column in columns)} |\n")


if __name__ == "__main__":
    main()
