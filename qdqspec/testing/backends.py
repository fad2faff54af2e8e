"""The contract suite for backends: inherit `BackendContract` and override its fixture ``backend``::

    class TestMine(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend()

It builds one small model (Conv, Relu, pooling, Gemm) without and with Q/DQ pairs, and calls each hook that the
backend's package declares (`qdqspec._core.hooks`); no test depends on timing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from qdqspec._core import hooks, registry
from qdqspec._core.arrays import Array
from qdqspec._core.options import ARGUMENTS, LIBRARIES, PATH
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec.backends import Backend, BuildOptions, Capabilities, Engine
from qdqspec.errors import BackendError, BackendUnavailableError, ConfigError, ModelError, QdqspecError
from qdqspec.graph import Model, load_model
from qdqspec.qdq import FORMATS, SchemeSpace
from qdqspec.qdq.lint import lint_model, rules_for
from qdqspec.types import LABELS

Build: TypeAlias = Callable[[onnx.ModelProto], Engine]
MakeModel: TypeAlias = Callable[[bool], onnx.ModelProto]  # with pairs, or without

NODES = ("conv", "relu", "pool", "flatten", "gemm")
_INPUT = (1, 3, 8, 8)
# GPUs compute float32 convolutions and products in TF32 by default: 10 bits of each factor, which causes
# errors up to 1.3e-3 on the small model.
FLOAT_TOLERANCE = 5e-3


def small_model(
    *, quantized: bool = False, activations: Literal["uint8", "int8"] = "uint8"
) -> onnx.ModelProto:
    """Conv, Relu, GlobalAveragePool, Flatten, Gemm; float32 ``x`` of shape (1, 3, 8, 8) to ``y`` of (1, 5).

    ``quantized`` inserts Q/DQ pairs around the convolution: int8 weights per channel within 7 bits, so that
    no processor's products saturate, and activations as uint8 with any zero point or as int8 with none, as
    the runtime requires.
    """
    pairs, read = {"before": "", "after": ""}, ("x", "w", "r")
    random = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "fc": (4, 5), "fc_b": (5,)}
    values: dict[str, Array] = {
        name: random.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()
    }
    if quantized:
        pairs = {"before": _pair("x") + _pair("w", "<axis = 0>"), "after": _pair("r")}
        read = "x_dq", "w_dq", "r_dq"
        signed = activations == "int8"
        values |= {
            "x_scale": np.array(2 / 255, np.float32),
            "x_zero": np.array(0, np.int8) if signed else np.array(128, np.uint8),
            "w_scale": np.full(4, 1 / 63, np.float32),
            "w_zero": np.zeros(4, np.int8),
            "r_scale": np.array(8 / 127 if signed else 8 / 255, np.float32),
            "r_zero": np.array(0, np.int8 if signed else np.uint8),
        }
    model: onnx.ModelProto = onnx.parser.parse_model(_MODEL.format(*read, **pairs))
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


_MODEL = """<ir_version: 9, opset_import: ["": 19]>
small (float[1,3,8,8] x) => (float[1,5] y) {{
    {before}
    [conv] c = Conv<pads = [1, 1, 1, 1]>({0}, {1}, b)
    [relu] r = Relu(c)
    {after}
    [pool] p = GlobalAveragePool({2})
    [flatten] f = Flatten(p)
    [gemm] y = Gemm(f, fc, fc_b)
}}"""


def _pair(tensor: str, axis: str = "") -> str:
    numbers = f"{tensor}_scale, {tensor}_zero"
    return (
        f"[{tensor}_quantize] {tensor}_q = QuantizeLinear{axis}({tensor}, {numbers})\n"
        f"[{tensor}_dequantize] {tensor}_dq = DequantizeLinear{axis}({tensor}_q, {numbers})\n"
    )


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
    def capabilities(self, backend: Backend, options: BuildOptions) -> Capabilities:
        """What the backend can do on this machine."""
        return backend.capabilities(options)

    @pytest.fixture
    def model(self, capabilities: Capabilities) -> MakeModel:
        """The small model, with pairs or without, its activations in the type that the backend uses."""
        signed = capabilities.activations.get("int8") == "int8"
        return lambda quantized: small_model(quantized=quantized, activations="int8" if signed else "uint8")

    @pytest.fixture
    def feeds(self) -> dict[str, Array]:
        """One input of the small model, between -1 and 1."""
        return {"x": np.random.default_rng(1).uniform(-1, 1, _INPUT).astype(np.float32)}

    @pytest.fixture
    def usable(self, backend: Backend, options: BuildOptions) -> Backend:
        """The backend; skips a test of one that is not usable on this machine."""
        if not (found := backend.probe(options)).usable:
            pytest.skip(f"{backend.name}: {found.why}; {found.install}")
        return backend

    @pytest.fixture
    def running(self, backend: Backend, capabilities: Capabilities) -> None:
        """Skips a test of a backend that only builds on this machine."""
        if not capabilities.runs:
            pytest.skip(f"{backend.name} only builds on this machine")

    @pytest.fixture
    def build(self, usable: Backend, options: BuildOptions, tmp_path: Path) -> Iterator[Build]:
        """Builds models from files, and closes their engines.

        The builds share a state folder, as the builds of a search do: without it, compilers that choose kernels by
        timing may choose differently each time.
        """
        engines: list[Engine] = []
        shared = options if options.state else replace(options, state=tmp_path / "state")

        def build(model: onnx.ModelProto) -> Engine:
            path = tmp_path / f"model-{len(engines)}.onnx"
            onnx.save(model, path)
            engines.append(usable.build(path, shared))
            return engines[-1]

        yield build
        # The last first: a runtime may install an alternate signal stack with an engine, and restore the one before it
        # when the engine is freed. In another order that one is freed already, and the next signal ends the process.
        for engine in reversed(engines):
            engine.close()
            engine.close()  # which has no effect

    def test_names_itself(self, backend: Backend) -> None:
        """The target is the name, or begins with it and a hyphen."""
        assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", backend.name)
        assert backend.target == backend.name or backend.target.startswith(f"{backend.name}-")

    def test_reports_what_is_missing(self, backend: Backend, options: BuildOptions) -> None:
        """An unusable backend reports why, and how to install it."""
        availability = backend.probe(options)
        assert availability.usable or (availability.why and availability.install)

    def test_declares_its_options(self, backend: Backend) -> None:
        """Words are unique and explained; undeclared words are rejected; files cannot name files or native code."""
        declared = backend.options
        words = [option.name for option in declared.options]
        assert declared.backend == backend.name
        assert len(set(words)) == len(words)
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", word) for word in words)
        assert all(option.help.endswith(".") for option in declared.options)
        named = (PATH, LIBRARIES, ARGUMENTS)
        assert not any(option.in_files for option in declared.options if option.type in named)
        with pytest.raises(ConfigError, match="no-such-word"):
            declared.read({f"{backend.name}.no-such-word": "1"})

    def test_device_key_is_a_stable_file_name(self, usable: Backend, options: BuildOptions) -> None:
        """The key is usable as a file name: baselines are named after it."""
        key = usable.device(options).key
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", key)
        assert usable.device(options).key == key

    def test_capabilities_use_known_words(self, capabilities: Capabilities) -> None:
        """Formats have stored types; labels are labels of the search, with ``fp`` implied."""
        assert capabilities.formats
        assert set(capabilities.weights) >= set(capabilities.formats)
        assert {f for f in capabilities.formats if not FORMATS[f].block} <= set(capabilities.activations)
        for stored in (capabilities.activations, capabilities.weights):
            assert set(stored.values()) <= set(FORMATS)
        for labels in capabilities.labels.values():
            assert labels
            assert set(labels) <= set(LABELS) - {"fp"}

    @pytest.mark.usefixtures("running")
    @pytest.mark.parametrize("quantized", [False, True])
    def test_computes_as_onnx_defines(
        self, build: Build, model: MakeModel, feeds: dict[str, Array], quantized: bool
    ) -> None:
        """Outputs equal the reference implementation's within a step of 8 bits, in float within TF32's error."""
        from onnx.reference import ReferenceEvaluator

        (value,) = ReferenceEvaluator(model(quantized)).run(None, dict(feeds))
        expected = np.asarray(value, np.float32)
        outputs = build(model(quantized)).run(feeds)
        assert list(outputs) == ["y"]
        difference = np.abs(np.asarray(outputs["y"], np.float32) - expected).max()
        assert difference <= (8 / 255 if quantized else FLOAT_TOLERANCE)

    @pytest.mark.usefixtures("running")
    def test_each_run_computes_its_own_input(
        self, build: Build, model: MakeModel, feeds: dict[str, Array]
    ) -> None:
        """Outputs follow the inputs of their run, not those of an earlier run or bound ones, and stay as they are."""
        engine = build(model(False))
        first = engine.run(feeds)["y"]
        kept = np.array(first, np.float32)
        engine.bind(feeds)
        doubled = {name: np.asarray(value * 2, value.dtype) for name, value in feeds.items()}
        other = np.asarray(engine.run(doubled)["y"], np.float32)
        assert np.abs(other - kept).max() > 10 * FLOAT_TOLERANCE
        assert np.array_equal(np.asarray(first, np.float32), kept)
        again = np.asarray(engine.run(feeds)["y"], np.float32)
        assert np.abs(again - kept).max() <= FLOAT_TOLERANCE

    def test_times_as_often_as_requested(
        self, capabilities: Capabilities, build: Build, feeds: dict[str, Array]
    ) -> None:
        """One positive sample per run; warm-up runs are not included."""
        if not capabilities.has_clock:
            pytest.skip("the backend has no clock on this machine")
        engine = build(small_model())
        engine.bind(feeds)
        samples = engine.time(7, warmup=2)
        assert len(samples.wall_ms) == 7
        assert len(samples.cpu_ms) in (0, 7)
        assert all(sample > 0 for sample in samples.wall_ms)

    @pytest.mark.usefixtures("running")
    def test_refuses_missing_inputs(self, build: Build) -> None:
        """A run without an input raises a `BackendError`, not a library's error; `time` and `layers` need `bind`."""
        engine = build(small_model())
        for call in (lambda: engine.run({}), lambda: engine.time(1), lambda: engine.layers(1)):
            with pytest.raises(BackendError):
                call()

    @pytest.mark.parametrize("quantized", [False, True])
    def test_layers_name_nodes_of_the_model_without_pairs(
        self,
        capabilities: Capabilities,
        build: Build,
        model: MakeModel,
        feeds: dict[str, Array],
        quantized: bool,
    ) -> None:
        """Each kernel names nodes of the float model, or the tensors it converts; all heavy nodes are included."""
        engine = build(model(quantized))
        engine.bind(feeds)
        layers = engine.layers(3)
        if not capabilities.per_layer_profile and not layers:
            pytest.skip("the backend has no profile per layer")
        named = {node for layer in layers for node in layer.nodes}
        assert {"conv", "gemm"} <= named <= set(NODES)
        assert all(layer.milliseconds >= 0 for layer in layers)
        assert all(layer.nodes or (layer.boundary and layer.tensors) for layer in layers)

    def test_equal_models_have_equal_graphs(self, build: Build, model: MakeModel) -> None:
        """The hash of the optimized graph is the same for each build of a model."""
        float_hash = build(model(False)).graph_hash
        assert float_hash
        assert build(model(False)).graph_hash == float_hash
        assert build(model(True)).graph_hash != float_hash

    def test_names_a_file_it_cannot_read(
        self, usable: Backend, options: BuildOptions, tmp_path: Path
    ) -> None:
        """Garbage and missing files raise an error of one line that names the file."""
        garbage = tmp_path / "garbage.onnx"
        garbage.write_bytes(b"not a model")
        for path in (garbage, tmp_path / "missing.onnx"):
            with pytest.raises((BackendError, ModelError)) as caught:
                usable.build(path, options)
            assert caught.value.where == str(path)
            assert "\n" not in caught.value.what

    # ---- the declaration ------------------------------------------------------------------------------

    @pytest.fixture
    def declared(self, backend: Backend) -> hooks.Declaration:
        """The declaration of the backend in its package; skips if it is not registered."""
        if backend.name not in registry.names("backend"):
            pytest.skip(f"{backend.name} is not registered: nothing can find what it declares")
        return hooks.declaration_of(backend.name)

    def test_declares_names_of_its_own(self, backend: Backend, declared: hooks.Declaration) -> None:
        """Each declared name leads to this backend, once; its target is declared if it declares any."""
        for names in (declared.targets, declared.lint_targets, tuple(declared.optimizers)):
            assert len(set(names)) == len(names)
            assert {hooks.owner_of(name) for name in names} <= {backend.name}
        assert not declared.targets or backend.target in (backend.name, *declared.targets)

    def test_declares_without_loading_a_runtime(self, backend: Backend, declared: hooks.Declaration) -> None:
        """Specs are validated against the declaration when pytest collects: it loads neither numpy nor onnx."""
        program = (
            "import sys; from qdqspec._core import hooks; "
            f"hooks.declaration_of({backend.name!r}); "
            "print(*({'numpy', 'onnx'} & set(sys.modules)))"
        )
        same_packages = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        found = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=same_packages
        )
        assert found.stdout.split() == []
        assert hooks.declaration_of(backend.name) == declared

    def test_hooks_exist(self, declared: hooks.Declaration) -> None:
        """Each hook is a function that can be imported. Exported files have the command that exports them."""
        single = (getattr(declared, one.name) for one in fields(declared) if one.type == "Hook")
        for hook in (*declared.optimizers.values(), *filter(None, single)):
            assert callable(hooks.load(hook))
        assert bool(declared.exported) == bool(declared.exported_by)
        assert all(option.startswith("--") and text for option, text in declared.equivalents.items())
        assert declared.lint_targets or not declared.lint_package

    @pytest.mark.usefixtures("usable")
    def test_a_program_runs_the_model(
        self, options: BuildOptions, declared: hooks.Declaration, feeds: dict[str, Array], tmp_path: Path
    ) -> None:
        """Without qdqspec, the rest of a program builds the file ``MODEL`` and runs it on ``FEEDS``."""
        rest: str = _hook(declared, "program")(options)
        onnx.save(small_model(), tmp_path / "model.onnx")
        np.savez(tmp_path / "feeds.npz", **feeds)  # type: ignore[arg-type]  # numpy's stub has another keyword
        head = "import numpy\nMODEL, FEEDS = 'model.onnx', dict(numpy.load('feeds.npz'))\n"
        assert "qdqspec" not in rest
        done = subprocess.run(
            [sys.executable, "-c", head + rest], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def test_a_replay_command_names_the_file(
        self, options: BuildOptions, declared: hooks.Declaration, tmp_path: Path
    ) -> None:
        """The shell command that builds and times a candidate contains the name of its file."""
        onnx.save(small_model(), tmp_path / "model.onnx")
        command = _hook(declared, "replay")(load_model(tmp_path / "model.onnx"), "candidate.onnx", options)
        assert any("candidate.onnx" in word for word in shlex.split(command))

    def test_data_that_are_no_calibration_cache_are_not_read(self, declared: hooks.Declaration) -> None:
        """No ranges are read from data in another format: another backend may read them."""
        assert _hook(declared, "ranges")(b'{"tensor": 6.0}') is None

    def test_placement_rules_take_the_units_of_a_model(self, capabilities: Capabilities) -> None:
        """Each returns units of the model: it may move or remove pairs, and adds no unit."""
        model = Model(small_model())
        for name, hook in capabilities.rules.items():
            assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name)
            spaces = (SchemeSpace(model, replace(capabilities, rules=one)) for one in ({}, {name: hook}))
            before, after = ({unit.id for unit in space.units} for space in spaces)
            assert after <= before

    def test_lint_targets_have_rules(self, declared: hooks.Declaration) -> None:
        """Each target has rules with ids of three capital letters and three digits, and a model is judged."""
        assert bool(declared.lint_rules) == bool(declared.lint_targets)
        for target in declared.lint_targets:
            rules = {rule.id for rule in rules_for(target)}
            assert rules
            assert all(re.fullmatch(r"[A-Z]{3}\d{3}", name) for name in rules)
            assert {finding.id for finding in lint_model(Model(small_model(quantized=True)), target)} <= rules

    def test_optimizers_write_a_model(self, declared: hooks.Declaration, tmp_path: Path) -> None:
        """Each writes a model with the same outputs; kernels are mapped back to nodes of the model without pairs.

        A file that is no model raises a `BackendError` of one line.
        """
        path, garbage = tmp_path / "model.onnx", tmp_path / "garbage.onnx"
        onnx.save(small_model(quantized=True), path)
        garbage.write_bytes(b"not a model")
        for name, hook in declared.optimizers.items():
            folder = tmp_path / name
            folder.mkdir()
            with pytest.raises(BackendError) as caught:
                hooks.load(hook)(garbage, folder)
            assert "\n" not in caught.value.what
            try:
                written = hooks.load(hook)(path, folder)
            except BackendUnavailableError:
                continue
            assert written.parent == folder
            optimized = Model(onnx.load(str(written)), path=written)
            assert [output.name for output in optimized.proto.graph.output] == ["y"]
            if declared.kernel_origins:
                origins = hooks.load(declared.kernel_origins)(optimized.proto.graph, load_model(path))
                assert len(origins) == len(optimized.proto.graph.node)
                assert {node for origin in origins for node in origin.nodes} <= set(NODES)

    def test_converts_to_float16(self, declared: hooks.Declaration, tmp_path: Path) -> None:
        """No weight stays float32; nodes keep their names; inputs and outputs keep their types if asked."""
        path = tmp_path / "model.onnx"
        onnx.save(small_model(), path)
        convert, model = _hook(declared, "float16"), load_model(path)
        for keep_io, elem_type in ((False, TensorProto.FLOAT16), (True, TensorProto.FLOAT)):
            half = convert(model, path, keep_io=keep_io)
            assert TensorProto.FLOAT not in {tensor.data_type for tensor in half.graph.initializer}
            assert set(NODES) <= {node.name for node in half.graph.node}
            assert half.graph.input[0].type.tensor_type.elem_type == elem_type

    def test_options_of_the_reference_are_declared(
        self, backend: Backend, declared: hooks.Declaration
    ) -> None:
        """`as_defined` and `optimized` are valid options; the default backend has both."""
        for extra in (declared.as_defined, declared.optimized):
            assert len(backend.options.read(extra)) == len(extra)
            assert extra or backend.name != DEFAULT_BACKEND

    def test_exported_engines_are_read_or_refused(self, declared: hooks.Declaration, tmp_path: Path) -> None:
        """A missing file and one in another format raise a `QdqspecError` that names it."""
        read, garbage = _hook(declared, "exported"), tmp_path / "engine.json"
        garbage.write_text("{")
        for path in (garbage, tmp_path / "missing.json"):
            with pytest.raises(QdqspecError) as caught:
                read([path], None)
            assert caught.value.where == str(path)


def _hook(declared: hooks.Declaration, name: str) -> Any:
    """The function that a backend declares under a name; skips if there is none."""
    hook = getattr(declared, name)
    if not hook:
        pytest.skip(f"no hook '{name}' is declared")
    return hooks.load(hook)
