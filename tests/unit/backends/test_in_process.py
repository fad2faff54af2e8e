"""The engines of ONNX Runtime, of its Web build and of OpenVINO: output, errors, copies of inputs, clocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from installed import require
from onnx.reference import ReferenceEvaluator
from operator_models import Graph

from qdqspec.backends.base import BuildOptions, backend_named
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.testing.backends import small_model

FEEDS = {"x": np.ones((1, 3, 8, 8), np.float32)}
Build = Callable[..., Any]


@pytest.fixture(params=["onnxruntime", "openvino"])
def name(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.fixture
def build(name: str, tmp_path: Path) -> Build:
    """``build(model, threads=1, ...)`` builds a model from the file ``m.onnx``."""

    def make(model: onnx.ModelProto, **options: Any) -> Any:
        onnx.save(model, tmp_path / "m.onnx")
        return backend_named(name).build(tmp_path / "m.onnx", BuildOptions(**options))

    return make


@pytest.mark.parametrize(("backend", "install"), [("onnxruntime", "onnxruntime"), ("openvino", "[openvino]")])
def test_the_probe_reports_how_to_install_a_missing_library(
    backend: str, install: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backend, None)
    availability = backend_named(backend).probe()
    assert not availability.usable
    assert f"{backend} cannot be imported" in availability.why
    assert install in availability.install
    assert availability.facts["cpu"]
    with pytest.raises(BackendUnavailableError, match=backend):
        backend_named(backend).build(model, BuildOptions())


def test_nothing_is_printed(
    name: str, build: Build, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # ONNX Runtime warns of ultraface's unused initializers, and logs wrong shapes as errors.
    backend = backend_named(name)
    backend.build(models / "ultraface_rfb320.onnx", BuildOptions()).close()
    with pytest.raises(BackendError):
        build(small_model()).run({"x": np.ones((2, 3), np.float32)})
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07broken")
    with pytest.raises(BackendError):
        backend.build(tmp_path / "broken.onnx", BuildOptions())
    assert capfd.readouterr() == ("", "")


EVERY = pytest.mark.parametrize("name", ["onnxruntime", "openvino", "onnxruntime-web"], indirect=True)


@EVERY
def test_the_error_of_a_refused_model_is_one_line_with_reason_file_and_cure(
    build: Build, tmp_path: Path
) -> None:
    model = small_model()
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(BackendError, match="NoSuchOperator") as caught:
        build(model)
    assert caught.value.where == str(tmp_path / "m.onnx")
    assert "\n" not in caught.value.what
    assert "src/" not in caught.value.what
    assert "--plugin" in str(caught.value.cure)


def test_bound_inputs_are_copies(build: Build) -> None:
    """A later change of the caller's array has no effect: a run with it would be an error."""
    engine = build(small_model())
    mine = {"x": FEEDS["x"].copy()}
    engine.bind(mine)
    mine["x"][:] = np.nan
    bound = engine._bound[0]
    held = bound["x"] if isinstance(bound, dict) else bound[0].get_input_tensor(0).data
    np.testing.assert_array_equal(held, FEEDS["x"])


@pytest.mark.parametrize(("threads", "samples"), [(1, 3), (2, 0)])
def test_the_time_of_the_thread_is_recorded_with_one_thread_only(
    build: Build, threads: int, samples: int
) -> None:
    engine = build(small_model(), threads=threads)
    engine.bind(FEEDS)
    assert len(engine.time(3).cpu_ms) == samples


def test_a_library_that_cannot_be_loaded_is_named(name: str, build: Build, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"no library")
    with pytest.raises(BackendError, match="could not be loaded") as caught:
        build(small_model(), extra={f"{name}.plugins": str(library)})
    assert caught.value.where == str(library)


@EVERY
@pytest.mark.parametrize("zero", [0, 128])
@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
def test_products_are_exact_with_the_weights_that_are_offered(
    name: str, build: Build, op: str, zero: int
) -> None:
    """With the largest activations, and 7-bit weights where the processor needs them: no sum saturates."""
    bound = 63 if backend_named(name).capabilities().reduce_range else 127
    g = Graph()
    shape, kernel = ((1, 64, 4, 4), (8, 64, 3, 3)) if op == "Conv" else ((4, 256), (256, 16))
    weight = g.full(*kernel, axis=0 if op == "Conv" else 1, value=bound)
    product = g.node(op, g.input(shape, zero=zero), weight)
    model = g.model(g.pair(product, zero=0, scale=300.0) if op == "Conv" else product, opset=19)
    feeds = {"x0": np.full(shape, 9, np.float32)}
    (result,) = build(model).run(feeds).values()
    (expected,) = ReferenceEvaluator(model).run(None, dict(feeds))
    np.testing.assert_allclose(result, expected, rtol=1e-4)
