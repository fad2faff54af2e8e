"""The compiler of TensorRT for RTX, where it is installed: lint against it, and placements that it builds.

``tests/data/tensorrt/rtx-differences.json`` lists the reviewed differences of lint on the models of the corpus, with a
reason each; the page ``docs/reference/lint-and-compiler.md`` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path

import numpy as np
import onnx
import pytest
from architectures import architectures
from installed import require_rtx
from trt_corpus import CASES, IMPORTED, NEAR_MISSES, NEWER, RTX_CASES, parse

from qdqspec._core.config import Settings
from qdqspec.app.evidence.builds import lint_and_load
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt_rtx.compiler import compute_capability
from qdqspec.backends.tensorrt_rtx.ops import FORMATS
from qdqspec.errors import BackendError
from qdqspec.graph.given import given_model
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Case, Inputs, InputShape, Label, QuantizeRules, ShapeProfile

pytestmark = pytest.mark.integration

TARGET = "tensorrt-rtx-1"
CAPABILITIES = ("SM86", "SM89", "SM120")
REVIEWED = Path(__file__).parents[1] / "data" / "tensorrt" / "rtx-differences.json"
DIFFERENCES = json.loads(REVIEWED.read_text(encoding="utf-8"))["differences"]


def models() -> Iterator[tuple[str, Model]]:
    """The models of the corpus by name."""
    for prefix, cases in (("", CASES), ("RTX-", RTX_CASES)):
        for rule, pair in cases.items():
            for kind, (inputs, nodes, constants) in zip(("bad", "good"), pair, strict=True):
                yield f"{prefix}{rule}-{kind}", parse(inputs, "y", nodes, NEWER.get(rule, 21), **constants)
    for op, (_, (inputs, nodes, constants)) in IMPORTED.items():
        yield f"microsoft-{op}", parse(inputs, "y", nodes, **constants)
    for number, (rule, broken, (inputs, nodes, constants)) in enumerate(NEAR_MISSES):
        opset = NEWER.get(rule, 20 if "Gelu" in nodes else 21)
        yield (
            f"near{number}-{rule}-{'bad' if broken else 'good'}",
            parse(inputs, "y", nodes, opset, **constants),
        )


MODELS = dict(models())


@pytest.fixture(scope="module")
def compiler() -> Iterator[Isolated]:
    require_rtx()
    with closing(Isolated("tensorrt-rtx")) as backend:
        yield backend


def options_for(capabilities: tuple[str, ...], profiles: tuple[ShapeProfile, ...] = ()) -> BuildOptions:
    return BuildOptions(extra={"tensorrt-rtx.for": ",".join(capabilities)}, profiles=profiles)


def is_built(compiler: Isolated, path: Path, *capabilities: str) -> bool:
    try:
        compiler.build(path, options_for(capabilities)).close()
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
def test_lint_and_the_compiler_differ_only_where_that_was_reviewed(name, compiler, tmp_path) -> None:
    onnx.save(MODELS[name].proto, tmp_path / "model.onnx")
    by_compiler, by_lint = refusing(compiler, tmp_path / "model.onnx"), linted(MODELS[name])
    found = {"lint": sorted(by_lint - by_compiler), "compiler": sorted(by_compiler - by_lint)}
    reviewed = DIFFERENCES.get(name, {})
    assert found == {side: sorted(reviewed.get(side, [])) for side in found}


def test_a_model_whose_values_the_compiler_would_clip_is_refused(compiler, tmp_path) -> None:
    onnx.save(MODELS["TRT006-bad"].proto, tmp_path / "model.onnx")
    with pytest.raises(BackendError, match="uint8 as int8: values above 127 are clipped"):
        compiler.build(tmp_path / "model.onnx", options_for(("SM120",)))


def test_lint_builds_for_the_gpu_that_it_is_told() -> None:
    require_rtx()
    model = MODELS["TRT005-good"]  # in fp8
    assert lint_and_load(model, TARGET, compute_capability=(12, 0)).loaded
    assert not lint_and_load(model, TARGET, compute_capability=(8, 6)).loaded
    none = lint_and_load(model, TARGET, compute_capability=(9, 0))
    assert none.missing.endswith("does not build for compute capability 9.0")


def test_each_reviewed_difference_is_that_of_a_model() -> None:
    assert set(DIFFERENCES) <= set(MODELS)
    assert all(entry["reason"] for entry in DIFFERENCES.values())


FAMILIES = dict(architectures())
REAL = ("digits_resnet", "squeezenet10", "ultraface_rfb320")
MIXES = tuple(combinations(FORMATS, 2))


@pytest.fixture(params=(*FAMILIES, *REAL))
def path(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Path:
    if request.param in REAL:
        return models / f"{request.param}.onnx"
    onnx.save(FAMILIES[request.param], tmp_path / f"{request.param}.onnx")
    return tmp_path / f"{request.param}.onnx"


def having(*formats: str) -> tuple[str, ...]:
    """The compute capabilities with kernels of all these formats."""
    return tuple(
        name for name in CAPABILITIES if all(compute_capability(name) >= FORMATS[fmt] for fmt in formats)
    )


def profiles_of(path: Path) -> tuple[ShapeProfile, ...]:
    """A shape for the batch of the model whose batch is dynamic."""
    if path.stem != "digits_resnet":
        return ()
    return (ShapeProfile(shapes={"input": InputShape.of((1, 1, 16, 16))}),)


def labellings(space: SchemeSpace, formats: tuple[str, ...]) -> Iterator[dict[str, Label]]:
    """Everything in the first format, everything in each, and random labels."""
    names = [choice.name for choice in space.choices]
    yield from (space.everything(name) for name in names)
    random = np.random.default_rng(len(formats))
    for _ in range(2):
        yield {unit.id: str(random.choice(("fp", *unit.labels))) for unit in space.units}


@pytest.mark.parametrize("formats", [(fmt,) for fmt in FORMATS] + list(MIXES), ids="-".join)
def test_placements_build_for_each_gpu_that_has_the_formats(path, formats, compiler, tmp_path) -> None:
    capabilities, profiles = having(*formats), profiles_of(path)
    options = options_for(capabilities, profiles)
    rules = QuantizeRules(format="+".join(formats), corrections="none")
    case = Case(
        id="default", model=path, inputs=Inputs(profiles=profiles) if profiles else Inputs(), quantize=rules
    )
    resources = Resources(backend=compiler, options=options, settings=Settings(seed=0))
    prepared = Prepared(case, given_model(path, {}), resources)
    space = prepared.calibrated[0]
    inserter = Inserter(prepared.folded, prepared.calibrated[1])
    placements = {(found := space.resolve(labels)).digest: found for labels in labellings(space, formats)}
    refused = []
    for digest, placement in placements.items():
        if not placement.sites:
            continue
        file = tmp_path / f"{digest}.onnx"
        save_model(inserter.insert(placement).proto, file, base=path.parent)
        assert not [f for f in lint_model(load_model(file), "tensorrt-rtx-1") if f.severity == "refused"]
        try:
            compiler.build(file, options).close()
        except BackendError as error:
            refused.append(error.what)
    assert not refused
