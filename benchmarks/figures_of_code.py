"""Counts the size of the package: code lines, files, functions, private functions used once, repeated type names.

    python benchmarks/figures_of_code.py            # the working tree
    python benchmarks/figures_of_code.py 7a38d58 HEAD
    python benchmarks/figures_of_code.py --imports 7a38d58 HEAD    # which package imports which

Code lines are lines with a token that is neither a comment nor a docstring. A private function is used once if its name
occurs once besides its definition, in its file. A public type name is that of a class or alias without underscore at
module level; it is repeated if several modules define it. Lines that name a runtime are counted in code, comments and
docstrings outside ``backends/`` and ``lint/``. A module with one importer is named by one other module, in an import
statement or as the location of a function (``module:function``). A pass-through function is undecorated, and its body
is one call with all its parameters, unchanged, in their order. Imports between packages are pairs of a module and
another package or top module that it imports something from, also in ``TYPE_CHECKING``; names that
``qdqspec/__init__.py`` imports lazily are not counted.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
PACKAGE = "qdqspec"
Result = TypeVar("Result")
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
    """All functions and methods, including nested ones."""
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


def is_pass_through(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the body is only one call with all parameters."""
    body = [node for node in function.body if not isinstance(getattr(node, "value", None), ast.Constant)]
    call = getattr(body[0], "value", None) if len(body) == 1 else None
    if function.decorator_list or not isinstance(call, ast.Call) or isinstance(body[0], ast.Assign):
        return False
    taken = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    taken = [name for name in taken if name not in ("self", "cls")]
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return bool(taken) and [getattr(node, "id", None) for node in given] == taken


PLACE = re.compile(rf"({PACKAGE}(?:\.\w+)+):\w+")


def imports(package: Path) -> dict[str, set[str]]:
    """For each module, the modules of the package named in its imports and locations of functions."""
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for path in package.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = [f"{node.module}.{alias.name}" for alias in node.names]
                named.update(part if part in paths else node.module for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.update(match[1] for match in PLACE.finditer(node.value))
        found[name] = (named & paths.keys()) - {name}
    return found


def between_packages(found: dict[str, set[str]]) -> Counter[tuple[str, str]]:
    """For each package or top module and each one that it imports, the number of importing modules."""
    tops = {name: name.split(".")[1] for name in found if name != PACKAGE}
    pairs = (
        (tops[name], {tops[n] for n in named if n in tops}) for name, named in found.items() if name in tops
    )
    return Counter((top, other) for top, others in pairs for other in others - {top})


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
        count["pass-through functions"] += sum(map(is_pass_through, functions_in(tree)))
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
    named = imports(package)
    importers = Counter(other for others in named.values() for other in others)
    modules = {name for name in named if f"{name}." not in " ".join(named)}
    count["modules with one importer"] = sum(importers[name] == 1 for name in modules)
    count["packages and top modules"] = len({name.split(".")[1] for name in named if name != PACKAGE})
    edges = between_packages(named)
    count["edges between packages"], count["imports between packages"] = len(edges), edges.total()
    private = {n for n, others in named.items() if any(".backends._" in other for other in others)}
    count["modules outside that import a private module of backends"] = sum(
        ".backends" not in n for n in private
    )
    return {**count, "functions per 1,000 code lines": 1000 * count["functions"] / count["code lines"]}


def import_table(package: Path) -> str:
    """One line for each package and top module: its imports with the number of importing modules."""
    edges = between_packages(imports(package))
    lines = []
    for top in sorted({top for top, _ in edges}):
        named = sorted((other, number) for (own, other), number in edges.items() if own == top)
        lines.append(f"| `{top}` | {', '.join(f'{other} {number}' for other, number in named)} |\n")
    return "".join(["| package | imports |\n", "|---|---|\n", *lines])


def at_commit(commit: str, read: Callable[[Path], Result]) -> Result:
    """The result of ``read`` for the package at a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, PACKAGE]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return read(Path(folder) / PACKAGE)


def main() -> None:
    """Print a row for each figure, a column for each commit; or the imports between packages."""
    commits = [word for word in sys.argv[1:] if word != "--imports"]
    if "--imports" in sys.argv:
        tables = [at_commit(commit, import_table) for commit in commits] or [import_table(ROOT / PACKAGE)]
        sys.stdout.write("\n".join(tables))
        return
    columns = [at_commit(commit, figures) for commit in commits] or [figures(ROOT / PACKAGE)]
    sys.stdout.write(f"| figure | {' | '.join(commits or ['working tree'])} |\n")
    sys.stdout.write(f"|---|{'---|' * len(columns)}\n")
    for name in columns[0]:
        sys.stdout.write(f"| {name} | {' | '.join(f'{column.get(name, 0):,.0f}' for column in columns)} |\n")


if __name__ == "__main__":
    main()
