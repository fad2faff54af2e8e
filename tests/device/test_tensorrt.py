"""The backend contract on hardware, and assumptions of the backend about TensorRT, each of docs/tensorrt.md."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from onnx_text import saved

from qdqspec.app.session import Session
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError
from qdqspec.graph.model import load_model
from qdqspec.testing.backends import BackendContract, small_model
from qdqspec.types import Case, Inputs, InputShape, ShapeProfile, TuneRules

pytestmark = pytest.mark.gpu


class TestOnDevice(BackendContract):
    @pytest.fixture
    def backend(self, device: Isolated) -> Backend:
        return device

    @pytest.fixture
    def options(self, chosen: BuildOptions) -> BuildOptions:
        return chosen


FEEDS = {"x": np.random.default_rng(1).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}


@pytest.fixture
def squeezenet(models: Path) -> Path:
    return models / "squeezenet10.onnx"


@pytest.fixture
def image(squeezenet: Path) -> dict[str, np.ndarray]:
    model = load_model(squeezenet)
    (given,) = model.inputs
    shape = [size or 1 for size in model.shape(given)]
    return {given: np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)}


def quantized(path: Path, activations: Literal["int8", "uint8"]) -> Path:
    onnx.save(small_model(quantized=True, activations=activations), path)
    return path


@pytest.fixture
def fitting(image: dict[str, np.ndarray], state: Path, chosen: BuildOptions) -> BuildOptions:
    """Build options for models whose inputs have the shape of the image."""
    shapes = {n: InputShape(min=v.shape, opt=v.shape, max=v.shape) for n, v in image.items()}
    return replace(chosen, state=state, profiles=(ShapeProfile(shapes=shapes),))


def test_runs_are_recorded_as_cuda_graphs(tensorrt, fitting, squeezenet, image, state):
    with closing(tensorrt.build(squeezenet, fitting)) as engine:
        engine.bind(image)
        samples = engine.time(100, warmup=10)
    records = map(json.loads, (state / "builds.jsonl").read_text("utf-8").splitlines())
    (bound,) = [record for record in records if "cuda_graph" in record]
    assert bound["cuda_graph"] is True, bound
    assert len(samples.wall_ms) == 100
    assert all(0 < sample < 1e3 for sample in samples.wall_ms)


def test_a_second_build_uses_kernels_of_the_timing_cache(tensorrt, fitting, squeezenet, state):
    if tensorrt.name != "tensorrt":
        pytest.skip(f"{tensorrt.name} has no timing cache")
    hashes = []
    for _ in range(2):
        with closing(tensorrt.build(squeezenet, fitting)) as engine:
            hashes.append(engine.graph_hash)
    assert hashes[0] == hashes[1]
    assert len(list(state.glob("*.timing-cache"))) == 1


def test_a_quantized_convolution_runs_in_integers(tensorrt: Isolated, chosen: BuildOptions, tmp_path: Path):
    path = quantized(tmp_path / "q.onnx", "int8")
    with closing(tensorrt.build(path, chosen)) as engine:
        engine.bind(FEEDS)
        layers = engine.layers()
    assert any(layer.integer and "conv" in layer.nodes for layer in layers), layers


def test_asymmetric_quantization_is_refused_with_the_node(tensorrt, chosen, tmp_path):
    path = quantized(tmp_path / "u.onnx", "uint8")
    with pytest.raises(BackendError, match="x_quantize"):
        tensorrt.build(path, chosen)


def test_layers_contain_every_convolution(tensorrt: Isolated, fitting: BuildOptions, squeezenet: Path, image):
    with closing(tensorrt.build(squeezenet, fitting)) as engine:
        engine.bind(image)
        layers = engine.layers()
    named = {node for layer in layers for node in layer.nodes}
    heavy = {node.name for node in load_model(squeezenet).nodes if node.op_type == "Conv"}
    assert heavy <= named, heavy - named


def relu(path: Path) -> Path:
    return saved(path, "dynamic (float[n,3] x) => (float[n,3] y) { [relu] y = Relu(x) }")


def test_an_engine_with_several_shape_profiles(tensorrt: Isolated, chosen: BuildOptions, tmp_path: Path):
    spans = [[(1, 3), (1, 3), (2, 3)], [(4, 3), (8, 3), (16, 3)]]
    profiles = tuple(ShapeProfile(shapes={"x": InputShape(min=a, opt=b, max=c)}) for a, b, c in spans)
    with closing(tensorrt.build(relu(tmp_path / "r.onnx"), replace(chosen, profiles=profiles))) as engine:
        for batch in (1, 2, 8, 16):
            values = np.random.default_rng(batch).standard_normal((batch, 3)).astype(np.float32)
            assert np.array_equal(engine.run({"x": values})["y"], np.maximum(values, 0))


def test_a_dynamic_input_without_a_shape_is_refused(tensorrt: Isolated, chosen: BuildOptions, tmp_path: Path):
    with pytest.raises(BackendError, match="no shape is given"):
        tensorrt.build(relu(tmp_path / "r.onnx"), chosen)


def test_outputs_with_data_dependent_shapes(tensorrt: Isolated, chosen: BuildOptions, tmp_path: Path):
    model = saved(tmp_path / "n.onnx", "data (float[4] x) => (int64[1,n] y) { [nonzero] y = NonZero(x) }")
    with closing(tensorrt.build(model, chosen)) as engine:
        assert engine.run({"x": np.array([0, 1, 0, 2], np.float32)})["y"].tolist() == [[1, 3]]
        assert engine.run({"x": np.ones(4, np.float32)})["y"].tolist() == [[0, 1, 2, 3]]


@pytest.mark.slow
def test_a_search_selects_a_model_that_is_not_slower_than_the_reference(tensorrt, chosen, models, tmp_path):
    model = models / "digits_resnet.onnx"
    case = Case(id="default", model=model, inputs=Inputs(batch=32), tune=TuneRules(preset="quick"))
    here = {"output": tmp_path / "out", "cache_dir": tmp_path / "cache"}
    words = tuple(f"{word}={text}" for word, text in chosen.extra.items())
    with Session(backend=tensorrt.name, device=chosen.device, backend_option=words, **here) as session:
        work = session.work(case)
        assert work.search.trials[0].ok, work.search.trials[0].error
        assert work.latency is not None
        assert work.search.unchanged or work.latency.speedup.low > 1
