"""Every name that the backend uses exists in each supported TensorRT, and the fake has no others.

A type checker reads the backend against stubs made of the recorded surface of each version: attributes, keywords,
enum members, with the result types of methods. The names come from the source of the backend, not from a list.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import trt_surface
from trt_surface import RTX_SOURCES, SOURCES, VERSIONS, Surface

from qdqspec.backends.tensorrt.api import parts
from qdqspec.backends.tensorrt_rtx.compiler import CURRENT
from qdqspec.backends.tensorrt_rtx.library import RTX
from qdqspec.backends.tensorrt_rtx.options import CAPABILITIES

# Classes of which the backend has subclasses; their methods are described in TensorRT's prose documentation only.
CALLBACKS = {"reallocate_output_async", "notify_shape"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's cache of the standard library, which is most of what it reads."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_backend_uses_only_names_of_the_recorded_surface(version: str, tmp_path: Path, cache: Path):
    assert trt_surface.complaints(trt_surface.load(version), tmp_path, cache) == []


def test_a_missing_keyword_or_name_at_the_end_of_a_chain_is_found(tmp_path: Path, cache: Path):
    surface = trt_surface.load("11.4.0.106")
    del surface["classes"]["EngineInspector"]["methods"]["get_engine_information"]
    for told in surface["classes"]["IBuilderConfig"]["methods"]["set_timing_cache"]:
        told["parameters"][1][0] = "renamed"
    said = trt_surface.complaints(surface, tmp_path, cache)
    assert any('"ignore_mismatch"' in line for line in said)
    assert any('"get_engine_information"' in line for line in said)


def test_each_optional_name_exists_in_some_version():
    everywhere = {name for version in VERSIONS for name in members(trt_surface.load(version))}
    asked = trt_surface.optional_names()
    assert "STRONGLY_TYPED" in asked
    assert asked <= everywhere


def test_the_checked_sources_are_all_that_import_tensorrt():
    folder = trt_surface.ROOT / "qdqspec"
    importing = {
        path for path in folder.rglob("*.py") if re.search(r"import tensorrt\b", path.read_text("utf-8"))
    }
    assert importing <= set(RTX_SOURCES)
    assert {path for path in importing if "tensorrt" in path.parts} <= set(SOURCES)


@pytest.fixture(scope="module")
def rtx(tmp_path_factory: pytest.TempPathFactory) -> Surface:
    """The names of the installed TensorRT for RTX that its backend may use."""
    try:
        site = trt_surface.installed_rtx(tmp_path_factory.mktemp("rtx"))
    except trt_surface.MissingError as error:
        pytest.skip(str(error))
    surface = trt_surface.read_surface(site)
    assert parts(surface["version"]) == RTX.newest
    return trt_surface.trimmed(surface, trt_surface.used_names(RTX_SOURCES))


def test_the_backend_of_tensorrt_for_rtx_uses_only_names_of_the_installed_one(
    rtx: Surface, tmp_path: Path, cache: Path
):
    assert trt_surface.complaints(rtx, tmp_path, cache, RTX_SOURCES) == []


def test_capabilities_have_the_names_of_the_installed_tensorrt_for_rtx(rtx: Surface):
    assert {*CAPABILITIES, CURRENT} <= set(rtx["enums"]["ComputeCapability"])


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
