"""Running, timing and profiling on the fake TensorRT."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_text import saved

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.engine import TensorRt, TensorRtEngine, graph_hash
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model

FEEDS = {"x": np.random.default_rng(1).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}
Fail = Callable[[str], None]
Open = Callable[..., TensorRtEngine]


@pytest.fixture
def opened(install_tensorrt: Callable[[str], None], tmp_path: Path) -> Iterator[Open]:
    """Builds the small model, or a given one, with TensorRT 10.16; checks at the end that everything was freed."""
    install_tensorrt("10.16.1.11")
    engines = []

    def build(model: onnx.ModelProto | None = None, **extra: str) -> TensorRtEngine:
        path = tmp_path / "model.onnx"
        onnx.save(model or small_model(), path)
        words = {f"tensorrt.{name.replace('_', '-')}": text for name, text in extra.items()}
        engines.append(TensorRt().build(path, BuildOptions(extra=words, state=tmp_path / "state")))
        return engines[-1]

    yield build
    from fake_gpu import gpu

    for engine in engines:
        engine.close()
    assert not gpu.blocks, "device or host memory was not freed"
    assert not gpu.streams, "a stream was not freed"


def records(tmp_path: Path) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in (tmp_path / "state" / "builds.jsonl").read_text("utf-8").splitlines()
    ]


def test_a_run_is_recorded_as_a_cuda_graph_and_timed_on_the_gpu(opened: Open, tmp_path: Path):
    engine = opened()
    engine.bind(FEEDS)
    cost = engine._native.engine._cost.milliseconds
    assert records(tmp_path)[-1] == {"model": "model.onnx", "profile": 0, "cuda_graph": True, "why_not": ""}
    samples = engine.time(200, warmup=3)
    assert samples.cpu_ms == ()
    assert len(samples.wall_ms) == 200
    assert math.isclose(samples.median_ms("wall"), cost, rel_tol=0.05)
    assert len(set(samples.wall_ms)) > 100
    assert samples.median_ms("cpu") == samples.median_ms("wall")


def test_a_cuda_graph_whose_recording_failed_is_recorded_again(opened: Open, tmp_path: Path, fail: Fail):
    engine = opened()
    fail("no-graph-at-first")
    engine.bind(FEEDS)
    assert engine._bound[0].graph is not None
    assert not [note for note in engine.time(1).notes if "CUDA graph" in note]


def test_skipped_kernels_and_warnings_of_the_build_are_noted_on_the_samples(opened: Open, fail: Fail):
    fail("short-of-memory,slow-fp4")
    engine = opened()
    engine.bind(FEEDS)
    notes = "\n".join(engine.time(1).notes)
    assert "short of GPU memory: the builder skipped kernels" in notes
    assert "TensorRT warns: The network has FP4 Q/DQ layers but the hardware does not accelerate FP4" in notes


def test_a_run_that_is_shorter_than_its_launch_is_noted(opened: Open, fail: Fail):
    engine = opened()
    engine.bind(FEEDS)
    fail("slow-launch")  # 2 ms, and a run takes a few microseconds
    assert not [note for note in engine.time(2).notes if "enqueue-bound" in note], "too few samples to decide"
    (note,) = [note for note in engine.time(8).notes if "enqueue-bound" in note]
    assert "to launch a run as the GPU to compute it" in note
    assert all(note in engine.time(8).notes for _ in range(3)), "one note for all measurements"


def test_throttling_and_changed_clock_rates_are_noted(
    opened: Open, tmp_path: Path, put_nvidia_smi: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    from qdqspec.backends._nvidia import smi as gpu_state

    monkeypatch.setattr(gpu_state, "_EVERY", 0.0)
    state = {"clocks.sm": "1980", "clocks.mem": "2619", "temperature.gpu": "45", "power.draw": "[N/A]"}
    put_nvidia_smi(**state, **{"clocks_event_reasons.active": "0x0000000000000001"})
    engine = opened()
    engine.bind(FEEDS)
    assert not [note for note in engine.time(1).notes if "GPU" in note]
    slower = {"clocks.sm": "1410", "clocks_throttle_reasons.active": "0x0000000000000024"}
    put_nvidia_smi(**state | slower)
    throttled, moved = [note for note in engine.time(1).notes if "GPU" in note]
    assert throttled == "the GPU was throttled while it was timed: power cap, software thermal slowdown"
    assert moved.startswith("the GPU's clock moved between 1410 and 1980 MHz")
    engine.close()
    first, second = records(tmp_path)[-1]["gpu"]
    assert (first["sm_mhz"], first["celsius"], first["watts"]) == (1980, 45, None)
    assert second["throttled"] == ["power cap", "software thermal slowdown"]


def test_an_engine_without_a_cuda_graph_runs_and_states_the_reason(opened: Open, tmp_path: Path, fail: Fail):
    off = opened(cuda_graph="off")
    off.bind(FEEDS)
    assert off._bound[0].graph is None
    assert records(tmp_path)[-1]["why_not"] == "switched off by tensorrt.cuda-graph"
    fail("no-graph")
    engine = opened()
    engine.bind(FEEDS)
    assert any(note.startswith("not recorded as a CUDA graph: cuda") for note in engine.time(1).notes)
    assert engine._bound[0].graph is None
    told = records(tmp_path)[-1]
    assert told["cuda_graph"] is False
    assert "cudaStreamEndCapture failed: cudaErrorStreamCaptureInvalidated" in str(told["why_not"])
    assert len(engine.time(5, warmup=2).wall_ms) == 5


def test_only_an_idle_gpu_is_warmed_up(opened: Open):
    engine = opened(warmup_ms="40")
    engine.bind(FEEDS)
    assert engine._warmup_ms() == 40
    engine.time(1)
    assert engine._warmup_ms() == 0


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
    assert "the shape of output y depends on data" in str(records(tmp_path)[-1]["why_not"])


def test_outputs_follow_input_values_and_wrong_inputs_are_refused(opened: Open):
    engine = opened()
    first = engine.run(FEEDS)["y"]
    second = engine.run({"x": FEEDS["x"] * 2})["y"]
    assert not np.array_equal(first, second)
    assert np.array_equal(engine.run(FEEDS)["y"], first)
    strided = np.ascontiguousarray(FEEDS["x"].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert np.array_equal(engine.run({"x": strided})["y"], first)
    shapes = r"input 'x' has shape \[2, 3, 8, 8\], and the engine takes \[1, 3, 8, 8\]"
    for feeds, said in (
        ({"x": FEEDS["x"].astype(np.float64)}, "input 'x' takes float32 of rank 4, not float64 of rank 4"),
        ({"x": np.zeros((2, 3, 8, 8), np.float32)}, shapes),
        ({}, "no value is given for input 'x'"),
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


def information(*names: str, tactic: str = "i8i8") -> str:
    return json.dumps({"Layers": [{"Name": name, "TacticName": tactic} for name in names]})


def test_the_hash_ignores_numbers_that_differ_between_builds(tmp_path: Path):
    hashed = lambda text: graph_hash(text, tmp_path / "not read.onnx")  # noqa: E731
    assert hashed(information("__myl_MulSum_myl4_1")) == hashed(information("__myl_MulSum_myl12_3"))
    assert hashed(information("a")) != hashed(information("a", tactic="f16f16"))
    assert hashed(information("layer1_1")) != hashed(information("layer1_2"))
    assert hashed("no json at all") != hashed("another")


def test_the_hash_of_an_opaque_layer_includes_the_model(tmp_path: Path):
    first, second = tmp_path / "a.onnx", tmp_path / "b.onnx"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    opaque = information("{ForeignNode[a...b]}_myl0"), information("{ForeignNode[a...b]}_myl3")
    assert graph_hash(opaque[0], first) == graph_hash(opaque[1], first)
    assert graph_hash(opaque[0], first) != graph_hash(opaque[0], second)
