"""The fakes of TensorRT and CUDA, on which the backend is tested, have only names of the real bindings.

These can be imported without a driver. They are downloaded here, or the tests skip with the reason.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import trt_surface
from trt_surface import ROOT, VERSIONS, Surface

sys.path.insert(0, str(ROOT / "tools"))
import tensorrt_surface


def test_each_optional_name_exists_in_some_version():
    everywhere = {name for version in VERSIONS for name in members(trt_surface.load(version))}
    asked = trt_surface.optional_names()
    assert "all_build_routes" in asked
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
            assert parameters(value) == [p[0] for p in surface["functions"][name][0]]
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
            assert any(agrees(taken, told) for told in overloads), f"{name}.{member}"
    if made is not None:
        stored = set(re.findall(r"self\.([a-zA-Z]\w*) = ", inspect.getsource(made)))
        assert stored <= known, name


def agrees(taken: list[str], real: list[list[object]]) -> bool:
    """Whether these are the real parameters; optional ones at the end may be missing."""
    names, rest = [p[0] for p in real[: len(taken)]], real[len(taken) :]
    return taken == names and all(may_be_left_out for _, may_be_left_out in rest)


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
        return request.param, tensorrt_surface.bindings(request.param, tmp_path_factory.mktemp("bindings"))
    except tensorrt_surface.MissingError as error:
        pytest.skip(str(error))


def test_the_recorded_surface_is_that_of_the_bindings(bindings: tuple[str, Path]):
    version, site = bindings
    real, recorded = tensorrt_surface.read_surface(site), trt_surface.load(version)
    assert real["version"] == version
    cure = "run tools/tensorrt_api.py and read what changed"
    for part in ("enums", "functions"):
        assert recorded[part].items() <= real[part].items(), cure
    for name, entry in recorded["classes"].items():
        for part in ("methods", "properties"):
            assert entry[part].items() <= real["classes"][name][part].items(), f"{name}: {cure}"


SUBCLASSES = """
import tensorrt as trt
from qdqspec.backends.tensorrt import device as trt_device
from qdqspec.backends.tensorrt import log as trt_log
from qdqspec.backends.tensorrt import run as trt_run
trt_device.TENSORRT.require()
log = trt_log.open_log()
log.logger.log(trt.ILogger.Severity.WARNING, "a line")
assert log.warnings == ("a line",)
trt.init_libnvinfer_plugins(log.logger, "")
profiler = trt_run._profiler_type()()
profiler.runs.append([])
profiler.report_layer_time("conv", 0.5)
assert profiler.runs == [[("conv", 0.5)]]
allocator = trt_run._allocator_type()()
allocator.notify_shape("y", trt.Dims([2, 3]))
assert allocator.shape == (2, 3)
profile_shape = trt.Dims([1, 3])
assert tuple(profile_shape) == (1, 3)
print("1 <<", int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
for name in ("reallocate_output_async", "notify_shape"):
    if name in trt.IOutputAllocator.__doc__:
        print(name)
"""


def test_the_real_classes_can_be_subclassed(bindings: tuple[str, Path]):
    """The methods of these subclasses are described in TensorRT's prose documentation only."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(bindings[1]), str(ROOT)])}
    command = [sys.executable, "-c", SUBCLASSES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "1 << 0" in said or "1 << 1" in said
    assert {"reallocate_output_async", "notify_shape"} <= {*said}
    assert "[TRT] [W] a line" in done.stderr


# ---- CUDA --------------------------------------------------------------------------------------------


_DUMP = """
import json, re
from cuda.bindings import runtime
told = {}
for name, value in vars(runtime).items():
    if hasattr(value, "__members__"):
        told[name] = {member: int(number) for member, number in value.__members__.items()}
    elif callable(value) and not isinstance(value, type):
        first = (value.__doc__ or "").partition("\\n")[0]
        inside = re.search(r"\\((.*)\\)", first)
        told[name] = len([p for p in inside[1].split(",") if p.strip()]) if inside else None
    elif isinstance(value, int):
        told[name] = "number"
print(json.dumps(told))
"""


@pytest.fixture(scope="module", params=["12.8.*", "12.*", "13.*"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("cuda")
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", str(folder)]
    command.append(f"cuda-bindings=={request.param}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"cuda-bindings {request.param} cannot be downloaded: {done.stderr.strip()[-200:]}")
    command, environment = [sys.executable, "-c", _DUMP], {**os.environ, "PYTHONPATH": str(folder)}
    dumped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(dumped.stdout)
    return found


def used() -> set[str]:
    tree = ast.parse((ROOT / "qdqspec/backends/tensorrt/cuda.py").read_text(encoding="utf-8"))
    words = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {word for word in words if re.fullmatch(r"cuda[A-Z]\w+|cudaError_t", word)}


def test_each_used_name_exists_in_the_bindings(real: dict[str, object]):
    members = {member for value in real.values() if isinstance(value, dict) for member in value}
    assert len(used()) > 20
    assert used() <= set(real) | members


def test_functions_of_the_fake_have_the_parameters_of_the_bindings(real: dict[str, object]):
    tree = ast.parse((ROOT / "tests/support/fake_trt/cuda/bindings/runtime.py").read_text(encoding="utf-8"))
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    assert {f.name: len(f.args.args) for f in functions} == {f.name: real[f.name] for f in functions}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            numbers = {ast.unparse(line.targets[0]): line.value.value for line in node.body}
            assert numbers.items() <= real[node.name].items(), node.name
