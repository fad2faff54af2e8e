"""The fake TensorRT, on which the backend is tested, has only names of the real one, as recorded for each version."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import trt_surface
from trt_surface import VERSIONS, Surface

# Classes of which the backend has subclasses; their methods are described in TensorRT's prose documentation only.
CALLBACKS = {"reallocate_output_async", "notify_shape"}


def test_each_optional_name_exists_in_some_version():
    everywhere = {name for version in VERSIONS for name in members(trt_surface.load(version))}
    asked = trt_surface.optional_names()
    assert "STRONGLY_TYPED" in asked
    assert asked <= everywhere


def members(surface: Surface) -> set[str]:
    classes = surface["classes"].values()
    own = {name for entry in classes for part in ("methods", "properties") for name in entry[part]}
    return own | {name for enum in surface["enums"].values() for name in enum} | set(surface["classes"])


# ---- the fake -----------------------------------------------------------------------------------


def test_each_name_of_the_fake_exists_in_the_recorded_surface(tensorrt_version: str):
    import tensorrt as fake

    surface = trt_surface.load(tensorrt_version)
    assert fake.__version__ == tensorrt_version
    for name, value in public(fake):
        if name in surface["enums"]:
            assert {m: int(v) for m, v in value.__members__.items()} == surface["enums"][name]
        elif name in surface["functions"]:
            assert parameters(value) == [p[0] for p in surface["functions"][name][0]["parameters"]]
        else:
            check_class(name, value, surface["classes"][name])


def check_class(name: str, value: type, entry: Surface) -> None:
    made = value.__dict__.get("__init__")
    known = {*entry["methods"], *entry["properties"], "Severity"}
    for member in (m for m in vars(value) if not m.startswith("_")):
        assert member in known, f"{name}.{member}"
        overloads = entry["methods"].get(member, [])
        if overloads:
            taken = parameters(getattr(value, member))[1:]
            assert any(agrees(taken, told["parameters"]) for told in overloads), f"{name}.{member}"
    if made is not None:
        stored = set(re.findall(r"self\.([a-zA-Z]\w*) = ", inspect.getsource(made)))
        assert stored <= known, name


def agrees(taken: list[str], real: list[list[object]]) -> bool:
    """Whether these are the real parameters; optional ones at the end may be missing."""
    names, rest = [p[0] for p in real[: len(taken)]], real[len(taken) :]
    return taken == names and all(may_be_left_out for _, _, may_be_left_out in rest)


def public(module: ModuleType) -> list[tuple[str, type]]:
    own = [(n, v) for n, v in vars(module).items() if isinstance(v, type) or inspect.isfunction(v)]
    foreign = ("fake_gpu", "qdqspec", "pathlib", "typing", "onnx")
    return [(n, v) for n, v in own if not n.startswith("_") and v.__module__.split(".")[0] not in foreign]


def parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


# ---- the real bindings --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """NVIDIA's bindings without the TensorRT libraries: downloaded, never committed."""
    try:
        return request.param, trt_surface.bindings(request.param, tmp_path_factory.mktemp("bindings"))
    except trt_surface.MissingError as error:
        pytest.skip(str(error))


def test_the_recorded_surface_is_that_of_the_bindings(bindings: tuple[str, Path]):
    version, site = bindings
    real, recorded = trt_surface.read_surface(site), trt_surface.load(version)
    assert real["version"] == version
    cure = "run tests/support/trt_surface.py and read what changed"
    for part in ("enums", "functions"):
        assert recorded[part].items() <= real[part].items(), cure
    for name, entry in recorded["classes"].items():
        for part in ("methods", "properties"):
            assert entry[part].items() <= real["classes"][name][part].items(), f"{name}: {cure}"


def test_the_real_classes_can_be_subclassed(bindings: tuple[str, Path]):
    _, site = bindings
    done = trt_surface.try_subclasses(site)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "1 << 0" in said or "1 << 1" in said
    assert set(said) >= CALLBACKS
    assert "[TRT] [W] a line" in done.stderr
