"""What the source must not have, beyond what ruff, mypy and import-linter check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "qdqspec"
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full names that a file imports, also in functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_private_modules_are_imported_in_their_package_only() -> None:
    for path in FILES:
        package = ("qdqspec", *path.relative_to(PACKAGE).parts[:-1])
        for name in imports(path):
            parts = tuple(name.split("."))
            for end, part in enumerate(parts):
                if part.startswith("_") and (PACKAGE.parent.joinpath(*parts[:end], f"{part}.py")).exists():
                    assert package[:end] == parts[:end], f"{path}: {name}"


def test_the_plugin_uses_pytest_internals_in_one_file_only() -> None:
    users = {path.name for path in FILES if any(name.startswith("_pytest") for name in imports(path))}
    assert users <= {"_compat.py"}


def test_no_object_is_created_without_its_constructor() -> None:
    """State set by ``__new__`` or ``__dict__`` is not visible in the code of the class."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            hidden = isinstance(node, ast.Attribute) and node.attr in ("__new__", "__dict__")
            assert not hidden, f"{path}:{node.lineno}"
