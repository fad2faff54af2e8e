"""The sessions of noxfile.py cover the versions that pyproject.toml declares."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constant(name: str) -> tuple[str, ...]:
    """A constant of noxfile.py, which is read and not imported: nox need not be installed."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return tuple(ast.literal_eval(value))


def test_the_oldest_versions_of_all_extras_of_users_are_tested() -> None:
    extras = {name for name in PROJECT["optional-dependencies"] if not name.startswith("tensorrt")}
    assert set(constant("EXTRAS")) == extras - {"dev", "docs"}


def test_each_dependency_states_its_oldest_version() -> None:
    extras = PROJECT["optional-dependencies"]
    stated = [*PROJECT["dependencies"], *(one for name in constant("EXTRAS") for one in extras[name])]
    assert [one for one in stated if one.count(">=") != 1 or "," in one] == []
