"""Every CUDA name that is used exists in NVIDIA's bindings for CUDA 12 and 13, and the fake has no others.

The bindings can be imported without a driver. They are downloaded here, or the tests skip with the reason.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from trt_surface import ROOT

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
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    dumped = subprocess.run(
        [sys.executable, "-c", _DUMP], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(dumped.stdout)
    return found


def used() -> set[str]:
    tree = ast.parse((ROOT / "qdqspec/backends/_nvidia/cuda.py").read_text(encoding="utf-8"))
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
