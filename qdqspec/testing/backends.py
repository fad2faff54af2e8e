"""The contract suite for backends: inherit `BackendContract` and override its fixture ``backend``::

    class TestMine(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend()

It builds one small model (Conv, Relu, pooling, Gemm) without and with Q/DQ pairs; no test depends on timing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec.backends.base import Array, Backend, BuildOptions, Engine
from qdqspec.config.declared import ARGUMENTS, LIBRARIES, PATH
from qdqspec.errors import BackendError, ConfigError, ModelError
from qdqspec.quantize.formats import FORMATS
from qdqspec.types import LABELS

NODES = ("conv", "relu", "pool", "flatten", "gemm")
_INPUT = (1, 3, 8, 8)
# GPUs compute float32 convolutions and products in TF32 by default: 10 bits of each factor, which causes
# errors up to 1.3e-3 on the small model.
FLOAT_TOLERANCE = 5e-3


def small_model(
    *, quantized: bool = False, seed: int = 0, activations: Literal["uint8", "int8"] = "uint8"
) -> onnx.ModelProto:
    """Conv, Relu, GlobalAveragePool, Flatten, Gemm; float32 ``x`` of shape (1, 3, 8, 8) to ``y`` of (1, 5).

    ``quantized`` inserts Q/DQ pairs around the convolution: int8 weights per channel within 7 bits, so that
    no processor's products saturate, and activations as uint8 with any zero point or as int8 with none, as
    the runtime requires.
    """
    random = np.random.default_rng(seed)
    weights = {
        "w": random.uniform(-1, 1, (4, 3, 3, 3)),
        "b": random.uniform(-1, 1, 4),
        "fc": random.uniform(-1, 1, (4, 5)),
        "fc_b": random.uniform(-1, 1, 5),
    }
    constants = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()]
    pairs: list[onnx.NodeProto] = []
    x, w, r = "x", "w", "r"
    if quantized:
        constants.extend(_quantization_constants(activations))
        pairs = [*_pair("x", "act"), *_pair("w", "weight", axis=0)]
        x, w, r = "x_dq", "w_dq", "r_dq"
    nodes = [
        *pairs,
        helper.make_node("Conv", [x, w, "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        *(_pair("r", "relu") if quantized else []),
        helper.make_node("GlobalAveragePool", [r], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc", "fc_b"], ["y"], "gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, _INPUT)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 5))],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _pair(tensor: str, kind: str, axis: int | None = None) -> list[onnx.NodeProto]:
    scale = [f"{kind}_scale", f"{kind}_zero"]
    return [
        helper.make_node(
            "QuantizeLinear", [tensor, *scale], [f"{tensor}_q"], f"{tensor}_quantize", axis=axis
        ),
        helper.make_node(
            "DequantizeLinear",
            [f"{tensor}_q", *scale],
            [f"{tensor}_dq"],
            f"{tensor}_dequantize",
            axis=axis,
        ),
    ]


def _quantization_constants(activations: Literal["uint8", "int8"]) -> list[onnx.TensorProto]:
    signed = activations == "int8"
    values: dict[str, Array] = {
        "act_scale": np.array(2 / 255, np.float32),
        "act_zero": np.array(0, np.int8) if signed else np.array(128, np.uint8),
        "weight_scale": np.full(4, 1 / 63, np.float32),
        "weight_zero": np.zeros(4, np.int8),
        "relu_scale": np.array(8 / 127 if signed else 8 / 255, np.float32),
        "relu_zero": np.array(0, np.int8 if signed else np.uint8),
    }
    return [numpy_helper.from_array(value, name) for name, value in values.items()]


class BackendContract:
    """The contract of `qdqspec.backends.base` for each backend. Override the fixture ``backend``."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        raise NotImplementedError("override the fixture 'backend' in your test class")

    @pytest.fixture
    def options(self) -> BuildOptions:
        """Build options; override to add backend-specific words."""
        return BuildOptions()

    @pytest.fixture
    def model(self, backend: Backend, options: BuildOptions) -> Callable[[bool], onnx.ModelProto]:
        """The small model, with pairs or without, its activations in the type that the backend uses."""
        taken: Literal["uint8", "int8"] = (
            "int8" if backend.capabilities(options).activations.get("int8") == "int8" else "uint8"
        )
        return lambda quantized: small_model(quantized=quantized, activations=taken)

    @pytest.fixture
    def feeds(self) -> dict[str, Array]:
        """One input of the small model, between -1 and 1."""
        return {"x": np.random.default_rng(1).uniform(-1, 1, _INPUT).astype(np.float32)}

    @pytest.fixture
    def build(
        self, backend: Backend, options: BuildOptions, tmp_path: Path
    ) -> Iterator[Callable[[onnx.ModelProto], Engine]]:
        """Builds models from files, and closes their engines. Skips if the backend is not usable.

        The builds share a state folder, as those of a search do: without it, compilers that choose kernels by
        timing may choose differently each time.
        """
        availability = backend.probe(options)
        if not availability.usable:
            pytest.skip(f"{backend.name}: {availability.why}; {availability.install}")
        engines: list[Engine] = []
        shared = options if options.state else replace(options, state=tmp_path / "state")

        def build(model: onnx.ModelProto) -> Engine:
            path = tmp_path / f"model-{len(engines)}.onnx"
            onnx.save(model, path)
            engines.append(backend.build(path, shared))
            return engines[-1]

        yield build
        for engine in engines:
            engine.close()

    def test_names_itself(self, backend: Backend) -> None:
        """The target is the name, or begins with it and a hyphen."""
        assert re.fullmatch(r"[a-z0-9_]+", backend.name)
        assert backend.target == backend.name or backend.target.startswith(f"{backend.name}-")

    def test_says_what_is_missing(self, backend: Backend, options: BuildOptions) -> None:
        """An unusable backend reports why, and how to install it."""
        availability = backend.probe(options)
        assert availability.usable or (availability.why and availability.install)

    def test_declares_its_options(self, backend: Backend) -> None:
        """Words are unique and explained; undeclared words are rejected; files cannot name files or native code."""
        declared = backend.options
        words = [option.word for option in declared.options]
        assert declared.backend == backend.name
        assert len(set(words)) == len(words)
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", word) for word in words)
        assert all(option.help.endswith(".") for option in declared.options)
        named = (PATH, LIBRARIES, ARGUMENTS)
        assert not any(option.in_files for option in declared.options if option.type in named)
        with pytest.raises(ConfigError, match="no-such-word"):
            declared.read({f"{backend.name}.no-such-word": "1"})

    def test_device_key_is_a_stable_file_name(self, backend: Backend, options: BuildOptions) -> None:
        """The key is usable as a file name: baselines are named after it."""
        key = backend.device(options).key
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", key)
        assert backend.device(options).key == key

    def test_capabilities_use_known_words(self, backend: Backend, options: BuildOptions) -> None:
        """Formats have stored types; labels are those of the search, with ``fp`` implied."""
        capabilities = backend.capabilities(options)
        assert capabilities.formats
        assert set(capabilities.weights) >= set(capabilities.formats)
        assert {f for f in capabilities.formats if not FORMATS[f].block} <= set(capabilities.activations)
        for stored in (capabilities.activations, capabilities.weights):
            assert set(stored.values()) <= set(FORMATS)
        for labels in capabilities.labels.values():
            assert labels
            assert set(labels) <= set(LABELS) - {"fp"}

    @pytest.mark.parametrize("quantized", [False, True])
    def test_computes_what_onnx_says(
        self,
        build: Callable[[onnx.ModelProto], Engine],
        model: Callable[[bool], onnx.ModelProto],
        feeds: dict[str, Array],
        quantized: bool,
    ) -> None:
        """Outputs equal the reference implementation's within a step of 8 bits, in float within TF32's error."""
        from onnx.reference import ReferenceEvaluator

        (value,) = ReferenceEvaluator(model(quantized)).run(None, dict(feeds))
        expected = np.asarray(value, np.float32)
        outputs = build(model(quantized)).run(feeds)
        assert list(outputs) == ["y"]
        difference = np.abs(np.asarray(outputs["y"], np.float32) - expected).max()
        assert difference <= (8 / 255 if quantized else FLOAT_TOLERANCE)

    def test_times_as_often_as_asked(
        self, build: Callable[[onnx.ModelProto], Engine], feeds: dict[str, Array]
    ) -> None:
        """One positive sample per run; warm-up runs are not included."""
        engine = build(small_model())
        engine.bind(feeds)
        samples = engine.time(7, warmup=2)
        assert len(samples.wall_ms) == 7
        assert len(samples.cpu_ms) in (0, 7)
        assert all(sample > 0 for sample in samples.wall_ms)

    def test_refuses_to_time_without_inputs(self, build: Callable[[onnx.ModelProto], Engine]) -> None:
        """`time` and `layers` need `bind` first."""
        engine = build(small_model())
        with pytest.raises(BackendError):
            engine.time(1)
        with pytest.raises(BackendError):
            engine.layers(1)

    def test_refuses_a_missing_input(self, build: Callable[[onnx.ModelProto], Engine]) -> None:
        """A run without an input raises a `BackendError`, not a library's error."""
        with pytest.raises(BackendError):
            build(small_model()).run({})

    @pytest.mark.parametrize("quantized", [False, True])
    def test_layers_speak_of_the_model_without_pairs(
        self,
        backend: Backend,
        options: BuildOptions,
        build: Callable[[onnx.ModelProto], Engine],
        model: Callable[[bool], onnx.ModelProto],
        feeds: dict[str, Array],
        quantized: bool,
    ) -> None:
        """Each kernel names nodes of the float model, or the tensors it converts; all heavy nodes are included."""
        engine = build(model(quantized))
        engine.bind(feeds)
        layers = engine.layers(3)
        if not backend.capabilities(options).per_layer_profile and not layers:
            pytest.skip(f"{backend.name} has no profile per layer")
        named = {node for layer in layers for node in layer.nodes}
        assert {"conv", "gemm"} <= named <= set(NODES)
        assert all(layer.milliseconds >= 0 for layer in layers)
        assert all(layer.nodes or (layer.boundary and layer.tensors) for layer in layers)

    def test_equal_models_have_equal_graphs(
        self, build: Callable[[onnx.ModelProto], Engine], model: Callable[[bool], onnx.ModelProto]
    ) -> None:
        """The hash of the optimized graph is the same for each build of a model."""
        float_hash = build(model(False)).graph_hash
        assert float_hash
        assert build(model(False)).graph_hash == float_hash
        assert build(model(True)).graph_hash != float_hash

    def test_names_a_file_it_cannot_read(
        self, backend: Backend, options: BuildOptions, tmp_path: Path
    ) -> None:
        """Garbage and missing files raise an error of one line that names the file."""
        if not backend.probe(options).usable:
            pytest.skip(f"{backend.name} is not usable here")
        garbage = tmp_path / "garbage.onnx"
        garbage.write_bytes(b"not a model")
        for path in (garbage, tmp_path / "missing.onnx"):
            with pytest.raises((BackendError, ModelError)) as caught:
                backend.build(path, options)
            assert caught.value.where == str(path)
            assert "\n" not in caught.value.what

    def test_closes_twice(self, build: Callable[[onnx.ModelProto], Engine]) -> None:
        """Closing again has no effect."""
        engine = build(small_model())
        engine.close()
        engine.close()
