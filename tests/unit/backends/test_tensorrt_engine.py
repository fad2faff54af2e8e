"""Builds and runs on a fake TensorRT: timing caches, build routes, options, times, notes and hashes.

What the parser and the compiler do is tested with TensorRT for RTX: see ``test_rtx_build.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import saved

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.device import GpuWatch
from qdqspec.backends.tensorrt.engine import TensorRt, TensorRtEngine, graph_hash
from qdqspec.backends.tensorrt.log import Log, refusals
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model
from qdqspec.types import InputShape, ShapeProfile

Fail = Callable[[str], None]


def refusal(model: Path, options: BuildOptions | None = None) -> BackendError:
    with pytest.raises(BackendError) as caught:
        TensorRt().build(model, options or BuildOptions())
    assert caught.value.where == str(model)
    assert "\n" not in caught.value.what
    return caught.value


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("out-of-memory", "could not build the model: out of memory: .*Cuda Runtime"),
        ("null-runtime", "could not load the engine it built: .*Serialization assertion failed"),
    ],
)
def test_a_failed_step_is_reported_with_the_log(
    model: Path, tensorrt_version: str, fail: Fail, fault: str, said: str
):
    fail(fault)
    error = refusal(model)
    assert re.search(said, error.what), error.what
    assert fault != "out-of-memory" or "tensorrt.workspace" in str(error.cure)
    fail("")
    model.write_bytes(b"garbage")
    said = "TensorRT could not read the model: TensorRT gave no reason"
    assert refusal(model).what == said, "the log of an earlier build is not quoted"


def test_an_exception_of_the_bindings_is_an_error_with_its_text(model: Path):
    """Without a GPU the constructor of a builder raises this (TensorRT 10.16, recorded), and may log nothing."""
    said = "pybind11::init(): factory function returned nullptr"
    with pytest.raises(BackendError) as caught, refusals(Log(), "TensorRT could not build it", model):
        raise TypeError(said)
    assert caught.value.what == f"TensorRT could not build it: {said}"


# ---- dynamic shapes -----------------------------------------------------------------------------


def spans(*batches: int) -> ShapeProfile:
    low, usual, high = ((batch, 3, 8) for batch in batches)
    return ShapeProfile(shapes={"x": InputShape(min=low, opt=usual, max=high)})


def test_each_shape_profile_runs_its_own_kernels(tmp_path: Path, tensorrt_version: str):
    """The first profile also accepts the shapes of the second, but its kernels were chosen for other shapes."""
    wide, narrow = spans(1, 1, 16), spans(8, 8, 8)
    path = saved(tmp_path / "m.onnx", "g (float[n,3,w] x) => (float[n,3,w] y) { [relu] y = Relu(x) }")
    engine = TensorRt().build(path, BuildOptions(profiles=(wide, narrow), state=tmp_path / "state"))
    one, eight = ({"x": np.full((batch, 3, 8), -1, np.float32)} for batch in (1, 8))
    engine.bind(one)
    engine.bind(eight, profile=1)
    assert [bound.context._profile for bound in engine._bound.values()] == [0, 1]
    first, second = engine.time(20), engine.time(20, profile=1)
    assert second.median_ms("wall") > 6 * first.median_ms("wall")
    assert {layer.name for layer in engine.layers()} == {"relu_kernel"}
    (layer,) = engine.layers(profile=1)
    assert (layer.name, layer.nodes) == ("relu_kernel [profile 1]", ("relu",))
    assert [r["profile"] for r in records(tmp_path / "state") if "cuda_graph" in r] == [0, 1]
    with pytest.raises(BackendError, match=r"the engine takes \[8, 3, 8\] to \[8, 3, 8\]\n"):
        engine.bind(one, profile=1)
    with pytest.raises(BackendError, match=r"takes \[1, 3, 8\] to \[16, 3, 8\] or \[8, 3, 8\] to \[8, 3"):
        engine.run({"x": np.zeros((17, 3, 8), np.float32)})
    with pytest.raises(BackendError, match="no inputs are bound"):
        engine.time(1, profile=2)
    engine.close()
    from fake_gpu import gpu

    assert not gpu.blocks


# ---- timing caches and state of a run -------------------------------------------------------------


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "builds.jsonl").read_text("utf-8").splitlines()]


def test_only_fresh_builds_differ_in_their_kernels(model: Path, tmp_path: Path, tensorrt_version: str):
    state = tmp_path / "state"

    def milliseconds(*, fresh: bool) -> float:
        with closing(TensorRt().build(model, BuildOptions(state=state, fresh=fresh))) as engine:
            return engine._native.engine._cost.milliseconds

    shared = {milliseconds(fresh=False) for _ in range(3)}
    (cache,) = state.glob("*.timing-cache")
    assert cache.name == f"nvidia-fake-100-sm90-tensorrt-{tensorrt_version}.timing-cache"
    before = cache.read_bytes()
    assert "conv_kernel" in json.loads(before[32:])  # behind its digest
    fresh = {milliseconds(fresh=True) for _ in range(3)}
    assert len(shared) == 1
    assert len(fresh) == 3
    assert not shared & fresh
    assert cache.read_bytes() == before, "a fresh build does not change the cache of the run"
    assert [record["timing_cache"] for record in records(state)] == ["shared"] * 3 + ["empty"] * 3


@pytest.mark.parametrize("spoil", ["a byte", "half", "empty"])
def test_a_timing_cache_with_a_wrong_digest_is_not_given_to_tensorrt(
    model: Path, tmp_path: Path, newest: None, spoil: str
):
    """A changed cache that TensorRT would still accept must not affect the choice of kernels."""
    state = tmp_path / "state"
    TensorRt().build(model, BuildOptions(state=state)).close()
    (cache,) = state.glob("*.timing-cache")
    whole = cache.read_bytes()
    spoilt = {"a byte": whole.replace(b"conv", b"conw"), "half": whole[: len(whole) // 2]}.get(spoil, b"0")
    cache.write_bytes(spoilt)
    TensorRt().build(model, BuildOptions(state=state)).close()
    assert any("begun anew" in warning for warning in records(state)[-1]["warnings"])
    assert "conw_kernel" not in json.loads(cache.read_bytes()[32:])
    TensorRt().build(model, BuildOptions(state=state)).close()
    assert records(state)[-1]["warnings"] == []


def test_a_timing_cache_of_the_user_is_used_by_later_runs_or_refused_unchanged(
    model: Path, tmp_path: Path, newest: None
):
    cache = tmp_path / "mine" / "gpu.cache"
    words = {"tensorrt.timing-cache": str(cache)}
    times = set()
    for run in ("first", "second"):
        options = BuildOptions(state=tmp_path / run, extra=words)
        with closing(TensorRt().build(model, options)) as engine:
            times.add(engine._native.engine._cost.milliseconds)
        assert records(tmp_path / run)[0]["timing_cache"] == "shared"
        assert not list((tmp_path / run).glob("*.timing-cache"))
    assert len(times) == 1, "the second run uses the kernels of the first"
    assert "conv_kernel" in json.loads(cache.read_bytes())
    cache.write_bytes(b"of another GPU")
    with pytest.raises(BackendError, match="TensorRT refuses the timing cache") as caught:
        TensorRt().build(model, BuildOptions(extra=words))
    assert caught.value.where == str(cache)
    assert cache.read_bytes() == b"of another GPU"


def test_parallel_builds_keep_all_entries_of_the_timing_cache(tmp_path: Path, newest: None):
    import tensorrt as trt

    def build(name: str) -> None:
        config, shared = trt.IBuilderConfig(), Shared(tmp_path, "key")
        cache = shared.attach(config)
        cache._known[name] = 1.0
        shared.keep(config)

    layers = [f"layer{index}" for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(build, layers))
    assert sorted(json.loads((tmp_path / "key.timing-cache").read_bytes()[32:])) == layers
    assert not list(tmp_path.glob(".key*"))


def test_a_build_route_is_applied_and_recorded(model: Path, tmp_path: Path, tensorrt_version: str):
    state = tmp_path / "state"
    route = "-conv_use_long_w=off -kgen:codegen:cuda_tile=2"
    ours = BuildOptions(state=state, extra={"tensorrt.build-route": route})
    if tensorrt_version.startswith("10"):
        with pytest.raises(BackendError, match="this version of TensorRT has no build_route"):
            TensorRt().build(model, ours)
        TensorRt().build(model, BuildOptions(state=state)).close()
        assert records(state)[0]["build_route"] is None
        return
    TensorRt().build(model, ours).close()
    TensorRt().build(model, BuildOptions(state=state)).close()
    assert [r["build_route"] for r in records(state)] == [route, ""], "no route is set without the option"


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ("-conv_use_long_v=off", r"it has no '-conv_use_long_v' \(did you mean '-conv_use_long_w'\?\)"),
        ("-conv_use_long_w=of", r"'-conv_use_long_w=of' is none of -conv_use_long_w=\[on\|off\]"),
        ("knob_a=7", "it has no 'knob_a'"),
    ],
)
def test_a_build_route_that_tensorrt_rejects_is_an_error(model: Path, newest: None, route: str, said: str):
    """The setter of the bindings discards the result of the C++ setter, so that TensorRT alone would ignore a
    mistyped route."""
    error = refusal(model, BuildOptions(extra={"tensorrt.build-route": route}))
    assert error.what.startswith(f"TensorRT does not take the build route '{route}': ")
    assert re.search(said, error.what), error.what
    assert "-name=value" in str(error.cure)


def test_options_are_passed_to_the_builder(model: Path, newest: None, monkeypatch: pytest.MonkeyPatch):
    import tensorrt as trt

    seen, build = [], trt.Builder.build_serialized_network
    told = lambda self, network, config: seen.append(config) or build(self, network, config)  # noqa: E731
    monkeypatch.setattr(trt.Builder, "build_serialized_network", told)
    words = {
        "opt-level": "4", "workspace": "64", "avg-timing": "3", "max-tactics": "9", "tiling": "fast",
        "aux-streams": "2", "tf32": "off", "sparse": "on", "version-compatible": "on", "hardware": "ampere-plus",
    }  # fmt: skip
    for extra, is_compatible in (({f"tensorrt.{k}": v for k, v in words.items()}, True), ({}, False)):
        with closing(TensorRt().build(model, BuildOptions(extra=extra))) as engine:
            assert engine._native.runtime.engine_host_code_allowed == is_compatible
    config, _ = seen
    assert config.builder_optimization_level == 4
    assert config._pools == {trt.MemoryPoolType.WORKSPACE: 64 << 20}
    assert (config.avg_timing_iterations, config.max_num_tactics, config.max_aux_streams) == (3, 9, 2)
    assert config.tiling_optimization_level is trt.TilingOptimizationLevel.FAST
    assert config.hardware_compatibility_level is trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert config._flags == {trt.BuilderFlag.SPARSE_WEIGHTS, trt.BuilderFlag.VERSION_COMPATIBLE}


# ---- runs --------------------------------------------------------------------------------------------


FEEDS = {"x": np.random.default_rng(1).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}
Open = Callable[..., TensorRtEngine]


@pytest.fixture
def opened(install_tensorrt: Callable[[str], None], tmp_path: Path) -> Iterator[Open]:
    """Builds the small model with TensorRT 10.16 and binds its input, or builds a given one; at the end everything must
    be freed."""
    install_tensorrt("10.16.1.11")
    engines = []

    def build(model: onnx.ModelProto | None = None, **extra: str) -> TensorRtEngine:
        path = tmp_path / "model.onnx"
        onnx.save(model or small_model(), path)
        words = {f"tensorrt.{name.replace('_', '-')}": text for name, text in extra.items()}
        engine = TensorRt().build(path, BuildOptions(extra=words, state=tmp_path / "state"))
        engines.append(engine)
        if model is None:
            engine.bind(FEEDS)
        return engine

    yield build
    from fake_gpu import gpu

    for engine in engines:
        engine.close()
    assert not gpu.blocks, "device or host memory was not freed"
    assert not gpu.streams, "a stream was not freed"


@pytest.mark.parametrize(
    ("fault", "switch", "why_not"),
    [
        ("", "on", ""),
        ("no-graph-at-first", "on", ""),  # it is recorded again
        ("no-graph", "on", "cudaStreamEndCapture failed: cudaErrorStreamCaptureInvalidated"),
        ("", "off", "switched off by tensorrt.cuda-graph"),
    ],
)
def test_a_run_is_recorded_as_a_cuda_graph_or_the_reason_is_stated(
    opened: Open, tmp_path: Path, fail: Fail, fault: str, switch: str, why_not: str
):
    fail(fault)
    engine = opened(cuda_graph=switch)
    assert (engine._bound[0].graph is not None) == (not why_not)
    told = records(tmp_path / "state")[-1]
    assert (told["model"], told["profile"], told["cuda_graph"]) == ("model.onnx", 0, not why_not)
    assert why_not in told["why_not"]
    samples = engine.time(5, warmup=2)
    assert len(samples.wall_ms) == 5
    is_noted = any(note.startswith("not recorded as a CUDA graph: ") for note in samples.notes)
    assert is_noted == (fault == "no-graph")


def test_times_are_measured_on_the_gpu_and_a_run_shorter_than_its_launch_is_noted(opened: Open, fail: Fail):
    engine = opened()
    cost = engine._native.engine._cost.milliseconds
    samples = engine.time(200, warmup=3)
    assert (samples.cpu_ms, len(samples.wall_ms)) == ((), 200)
    assert math.isclose(samples.median_ms("wall"), cost, rel_tol=0.05)
    assert len(set(samples.wall_ms)) > 100
    engine = opened()
    fail("slow-launch")  # 2 ms, and a run takes a few microseconds
    assert not [note for note in engine.time(2).notes if "enqueue-bound" in note], "too few samples to decide"
    (note,) = [note for note in engine.time(8).notes if "enqueue-bound" in note]
    assert all(note in engine.time(8).notes for _ in range(3)), "one note for all measurements"


def test_throttling_and_changed_clock_rates_are_noted(
    opened: Open, put_nvidia_smi: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GpuWatch.__init__, "__defaults__", (0.0, 1.03))  # reads at each call
    put_nvidia_smi(**{"clocks.sm": "1980", "clocks_event_reasons.active": "0x0000000000000001"})
    engine = opened()
    assert not [note for note in engine.time(1).notes if "GPU" in note]
    put_nvidia_smi(**{"clocks.sm": "1410", "clocks_throttle_reasons.active": "0x0000000000000024"})
    throttled, moved = [note for note in engine.time(1).notes if "GPU" in note]
    assert throttled == "the GPU was throttled while it was timed: power cap, software thermal slowdown"
    assert moved.startswith("the GPU's clock moved between 1410 and 1980 MHz")


def test_outputs_whose_shape_depends_on_data_are_read(opened: Open, tmp_path: Path):
    text = "data (float[4] x) => (int64[1,n] y) { y = NonZero(x) }"
    engine = opened(onnx.load(saved(tmp_path / "data.onnx", text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_TRT", "shapes-from-data")
        for values, places in (([0, 1, 0, 2], [1, 3]), ([1, 1, 1, 1], [0, 1, 2, 3]), ([0, 0, 0, 0], [])):
            (found,) = engine.run({"x": np.array(values, np.float32)}).values()
            assert found.tolist() == [places]
        engine.bind({"x": np.ones(4, np.float32)})
        assert len(engine.time(3).wall_ms) == 3
    assert "the shape of output y depends on data" in str(records(tmp_path / "state")[-1]["why_not"])


def test_strided_inputs_are_copied_and_wrong_inputs_are_refused(opened: Open):
    engine = opened()
    first = engine.run(FEEDS)["y"]
    strided = np.ascontiguousarray(FEEDS["x"].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert np.array_equal(engine.run({"x": strided})["y"], first)
    shapes = r"input 'x' has shape \[2, 3, 8, 8\], and the engine takes \[1, 3, 8, 8\]"
    for feeds, said in (
        ({"x": FEEDS["x"].astype(np.float64)}, "input 'x' takes float32 of rank 4, not float64 of rank 4"),
        ({"x": np.zeros((2, 3, 8, 8), np.float32)}, shapes),
    ):
        with pytest.raises(BackendError, match=said):
            engine.run(feeds)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("failed-run", "could not be run: .*Cask convolution execution"),
        ("null-context", "could not prepare the engine to run: out of memory"),
        ("no-device-memory", "cudaMalloc failed: cudaErrorMemoryAllocation"),
        ("illegal-address", "cudaStreamSynchronize failed: cudaErrorIllegalAddress"),
    ],
)
def test_a_failure_while_running_is_reported(opened: Open, fail: Fail, fault: str, said: str):
    engine = opened()
    fail(fault)
    with pytest.raises(BackendError, match=said):
        engine.run(FEEDS)
    with pytest.raises(BackendError, match=said):
        engine.bind(FEEDS)


# ---- hash ---------------------------------------------------------------------------------------


def information(name: str, tactic: str = "i8i8") -> str:
    return json.dumps({"Layers": [{"Name": name, "TacticName": tactic}]})


OPAQUE = information("{ForeignNode[a...b]}_myl0")


@pytest.mark.parametrize(
    ("text", "other", "files", "is_equal"),
    [
        (information("__myl_MulSum_myl4_1"), information("__myl_MulSum_myl12_3"), "ab", True),
        (information("a"), information("a", "f16f16"), "aa", False),
        (information("layer1_1"), information("layer1_2"), "aa", False),
        ("no json at all", "another", "aa", False),
        (OPAQUE, information("{ForeignNode[a...b]}_myl3"), "aa", True),
        (OPAQUE, OPAQUE, "ab", False),  # a layer that may contain anything: the model is hashed
    ],
    ids=range(6),
)
def test_the_hash_ignores_what_differs_between_builds_of_one_model(
    tmp_path: Path, text: str, other: str, files: str, is_equal: bool
):
    for name in "ab":
        (tmp_path / name).write_text(name)
    one, two = (tmp_path / name for name in files)
    assert (graph_hash(text, one) == graph_hash(other, two)) == is_equal
