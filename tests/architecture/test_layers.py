"""Lower layers never import higher ones, and some packages never import some others, according to the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "qdqspec"

LAYERS = {
    "errors": 0, "types": 0, "units": 0, "deadline": 0, "registry": 0, "config": 0, "codec": 0, "arrays": 0,
    "collector": 0, "files": 0, "closing": 0, "plain_json": 0, "temporary": 0, "wire": 0,
    "programs": 0, "node_digests": 0,
    "spec": 1, "graph": 1,
    "regions": 2, "quantize": 2, "backends": 2, "baseline": 2,
    "placement": 3, "lint": 3, "measurement": 3, "parity": 3,
    "rehearsal": 4, "search": 4,
    "checks": 5, "corrections": 5,
    "preparation": 6,
    "accuracy": 7,
    "cases": 8, "progress": 8, "session": 8,
    "report": 9, "cluster": 9, "upgrade": 9,
    "plugin": 10, "cli": 10, "api": 10, "testing": 10, "__main__": 10,
}  # fmt: skip

# The parts of `placement`; each of them imports earlier ones only.
PARTS = ("space", "edit", "scheme", "read")

# Within the layers: (package, what it must not import, why).
BANS = [
    ("spec", {"onnx", "numpy", "onnxruntime", "qdqspec.graph"}, "collection opens YAML only"),
    (
        "checks",
        {"qdqspec.measurement", "qdqspec.backends", "qdqspec.search", "qdqspec.graph"},
        "checks never measure",
    ),
    (
        "search",
        {"qdqspec.measurement", "qdqspec.backends", "onnxruntime"},
        "strategies only propose; the loop measures",
    ),
    (
        "report",
        {"qdqspec.session", "qdqspec.graph", "onnx", "onnxruntime"},
        "it renders a record",
    ),
    (
        "lint",
        {
            "onnxruntime",
            "tensorrt",
            "qdqspec.measurement",
        },
        "it analyses a model without the runtime",
    ),
    ("graph", {"onnxruntime", "qdqspec.spec"}, "it depends on ONNX only"),
    ("regions", {"onnxruntime", "qdqspec.backends"}, "it depends on ONNX only"),
]
STANDARD_LIBRARY_ONLY = [
    "errors",
    "types",
    "units",
    "registry",
    "config",
    "files",
    "plain_json",
    "node_digests",
    "cases",
    "progress",
]
DRIVERS = {"search/loop.py"}  # runs a strategy on the bench
LAZY = {"rich"}  # loaded by `progress` for drawing


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return package_in(path.relative_to(PACKAGE).with_suffix("").parts)


def package_in(parts: Sequence[str]) -> str:
    """The package of a module; some packages in the folder of a backend have separate layers."""
    inside = parts[2:3] if parts[0] == "backends" else ()
    return inside[0] if inside in (("lint",), ("placement",)) else parts[0]


def imports(path: Path, *, type_checking: bool = True) -> set[str]:
    """Full names of the modules that a file imports, including imports in functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if not type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                skipped.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports relatively; write the full name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_package_has_a_layer():
    packages = {package_of(path) for path in files()} - {"__init__"}
    assert packages <= set(LAYERS), "give the new package a layer, here and in docs/architecture.md"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_lower_layers_never_import_higher_ones(path):
    package = package_of(path)
    if package == "__init__":  # the facade resolves these names lazily
        return
    for name in imports(path):
        parts = tuple(name.split("."))
        if parts[0] == "qdqspec" and len(parts) > 1 and parts[1] in LAYERS:
            imported = LAYERS[package_in(parts[1:])]
            assert imported <= LAYERS[package], f"layer {LAYERS[package]} imports {name}"


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_placement_import_earlier_parts_only(part):
    earlier = PARTS[: PARTS.index(part)]
    for path in (PACKAGE / "placement" / part).glob("*.py"):
        for name in imports(path):
            if name.startswith("qdqspec.placement."):
                assert name.split(".")[2] in (*earlier, part), f"{path}: {name}"
    text = ast.get_docstring(ast.parse((PACKAGE / "placement" / part / "__init__.py").read_text("utf-8")))
    assert tuple(re.findall(r"`(\w+)`", text or "")) == earlier, "its first line lists what it imports"


def test_each_module_of_placement_is_in_a_part():
    assert {path.name for path in (PACKAGE / "placement").iterdir()} - {"__pycache__"} == {
        "__init__.py",
        *PARTS,
    }


def test_only_backends_import_modules_of_a_backend():
    """Other modules use backends through the registry and declarations, which include installed packages."""
    folders = [f"qdqspec.backends.{path.parent.name}" for path in PACKAGE.glob("backends/[!_]*/__init__.py")]
    folders.remove("qdqspec.backends.isolation")  # of every backend
    assert len(folders) >= 4
    for path in files():
        if path.relative_to(PACKAGE).parts[0] != "backends":
            for name in imports(path):
                assert not any(name == one or name.startswith(f"{one}.") for one in folders), (
                    f"{path}: {name}; declare a hook (config/hooks.py)"
                )


@pytest.mark.parametrize(("package", "banned", "why"), BANS, ids=[ban[0] for ban in BANS])
def test_imports_that_are_forbidden_for_a_package(package, banned, why):
    for path in files():
        if package_of(path) != package or path.relative_to(PACKAGE).as_posix() in DRIVERS:
            continue
        for name in imports(path, type_checking=False):
            assert not any(name == one or name.startswith(f"{one}.") for one in banned), (
                f"{path}: {name}; {why}"
            )


@pytest.mark.parametrize("package", STANDARD_LIBRARY_ONLY)
def test_packages_that_import_the_standard_library_only(package):
    import sys

    for path in files():
        if package_of(path) == package:
            tops = {name.split(".")[0] for name in imports(path)}
            assert tops <= {*sys.stdlib_module_names, "qdqspec", *LAZY}, path


def test_the_plugin_uses_pytest_internals_in_one_file_only():
    guilty = [
        path.name
        for path in files()
        if any(name.split(".")[0] == "_pytest" for name in imports(path)) and path.name != "_compat.py"
    ]
    assert guilty == []


def test_there_are_files_to_check():
    assert len(files()) > 30
    assert package_of(PACKAGE / "backends" / "tensorrt" / "lint" / "numbers.py") == "lint"
    assert package_of(PACKAGE / "backends" / "tensorrt" / "layers.py") == "backends"
    assert "qdqspec.config.Settings" in imports(PACKAGE / "cases.py")
    assert "qdqspec.session.Session" in imports(PACKAGE / "plugin" / "run.py")
    assert "qdqspec.session.Session" not in imports(PACKAGE / "plugin" / "run.py", type_checking=False)


def test_the_documentation_lists_the_layers():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE)
    listed = {name: int(number) for number, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert listed == LAYERS


def test_private_modules_are_imported_in_their_package_only():
    """A module with a leading underscore belongs to the package that it is in."""
    for path in files():
        package = ("qdqspec", *path.relative_to(PACKAGE).parts[:-1])
        for name in imports(path):
            parts = tuple(name.split("."))
            for end, part in enumerate(parts):
                if part.startswith("_") and (PACKAGE.parent.joinpath(*parts[:end], f"{part}.py")).exists():
                    assert package[:end] == parts[:end], f"{path}: {name}"


def test_no_object_is_created_without_its_constructor():
    """State set by ``__new__`` or ``__dict__`` is not visible in the code of the class."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            hidden = isinstance(node, ast.Attribute) and node.attr in ("__new__", "__dict__")
            assert not hidden, f"{path}:{node.lineno}"
