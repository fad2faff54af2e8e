"""Lint for TensorRT for RTX against its compiler: each model of the lint corpus, on three compute capabilities.

``tests/data/tensorrt/rtx-differences.json`` lists the reviewed differences, with a reason each; the page
``docs/reference/lint-and-compiler.md`` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from trt_corpus import CASES, IMPORTED, NEAR_MISSES, NEWER, RTX_CASES, parse

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt_rtx.compiler import compute_capability
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model

pytestmark = pytest.mark.integration

TARGET = "tensorrt-rtx-1"
CAPABILITIES = ("SM86", "SM89", "SM120")
REVIEWED = Path(__file__).parents[1] / "data" / "tensorrt" / "rtx-differences.json"


def models() -> Iterator[tuple[str, Model]]:
    """The models of the corpus by name."""
    for prefix, cases in (("", CASES), ("RTX-", RTX_CASES)):
        for rule, pair in cases.items():
            for kind, (inputs, nodes, constants) in zip(("bad", "good"), pair, strict=True):
                yield f"{prefix}{rule}-{kind}", parse(inputs, "y", nodes, NEWER.get(rule, 21), **constants)
    for op, (_, (inputs, nodes, constants)) in IMPORTED.items():
        yield f"microsoft-{op}", parse(inputs, "y", nodes, **constants)
    for number, (rule, broken, (inputs, nodes, constants)) in enumerate(NEAR_MISSES):
        opset = 20 if "Gelu" in nodes else 21
        yield (
            f"near{number}-{rule}-{'bad' if broken else 'good'}",
            parse(inputs, "y", nodes, opset, **constants),
        )


MODELS = dict(models())


def is_built(compiler: Isolated, path: Path, *capabilities: str) -> bool:
    options = BuildOptions(extra={"tensorrt-rtx.for": ",".join(capabilities)})
    try:
        compiler.build(path, options).close()
    except BackendError:
        return False
    return True


def refusing(compiler: Isolated, path: Path) -> set[str]:
    """The compute capabilities for which the compiler refuses a model."""
    if is_built(compiler, path, *CAPABILITIES):
        return set()
    return {name for name in CAPABILITIES if not is_built(compiler, path, name)}


def linted(model: Model) -> set[str]:
    """The compute capabilities for which lint reports a refusal."""
    return {
        name
        for name in CAPABILITIES
        for finding in lint_model(model, TARGET, compute_capability=compute_capability(name))
        if finding.severity == "refused"
    }


@pytest.mark.parametrize("name", MODELS)
def test_lint_and_the_compiler_differ_only_where_that_was_reviewed(
    name: str, compiler: Isolated, tmp_path: Path
) -> None:
    onnx.save(MODELS[name].proto, tmp_path / "model.onnx")
    by_compiler, by_lint = refusing(compiler, tmp_path / "model.onnx"), linted(MODELS[name])
    found = {"lint": sorted(by_lint - by_compiler), "compiler": sorted(by_compiler - by_lint)}
    reviewed = json.loads(REVIEWED.read_text(encoding="utf-8"))["differences"].get(name, {})
    assert found == {side: sorted(reviewed.get(side, [])) for side in found}


def test_each_reviewed_difference_is_that_of_a_model() -> None:
    reviewed = json.loads(REVIEWED.read_text(encoding="utf-8"))["differences"]
    assert set(reviewed) <= set(MODELS)
    assert all(entry["reason"] for entry in reviewed.values())
