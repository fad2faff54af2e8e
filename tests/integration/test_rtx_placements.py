"""Placements of all formats on nine models build with the compiler of TensorRT for RTX."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import onnx
import pytest
from architectures import architectures

from qdqspec._core.config import Settings
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt_rtx.compiler import compute_capability
from qdqspec.backends.tensorrt_rtx.ops import FORMATS
from qdqspec.errors import BackendError
from qdqspec.graph.given import given_model
from qdqspec.graph.model import load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Case, Inputs, InputShape, Label, QuantizeRules, ShapeProfile

pytestmark = pytest.mark.integration

CAPABILITIES = ("SM86", "SM89", "SM120")
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


def options_for(capabilities: tuple[str, ...], profiles: tuple[ShapeProfile, ...]) -> BuildOptions:
    return BuildOptions(extra={"tensorrt-rtx.for": ",".join(capabilities)}, profiles=profiles)


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
def test_placements_build_for_each_gpu_that_has_the_formats(
    path: Path, formats: tuple[str, ...], compiler: Isolated, tmp_path: Path
) -> None:
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
