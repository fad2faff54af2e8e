"""The output of trtexec: every recorded log and message is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qdqspec.backends.trtexec.log import cause_of, find_all, read_log

SAMPLES = Path(__file__).parents[2] / "data" / "tensorrt" / "samples"
MESSAGES = [json.loads(line) for line in (SAMPLES / "trtexec-messages.jsonl").read_text().splitlines()]
NOTES = {"no_implementation_retry", "out_of_memory_tactic", "hardware_hint", "unstable_timing", "aux_streams"}


def read(name):
    return read_log((SAMPLES / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("message", MESSAGES, ids=[f"{m['class']}-{m['tensorrt']}" for m in MESSAGES])
def test_every_recorded_message_has_its_class(message):
    findings = find_all("\n".join(message["lines"]))
    cause = cause_of(findings)
    if message["class"] in NOTES:
        assert cause is None, "a build with this message may pass"
        assert {finding.rule.kind for finding in findings} == {message["class"]}
    else:
        assert cause is not None
        assert cause.rule.kind == message["class"]
        assert "\n" not in cause.text
        assert not cause.text.startswith("[")


@pytest.mark.parametrize(
    ("name", "verdict", "version", "median", "profile"),
    [
        ("trt10.16-mnist-onnx-build-and-run.log", "PASSED", (10, 16, 1), 0.0361328, 0),
        ("trt10.16-mnist-loadEngine-cudagraph-verbose.log", "PASSED", (10, 16, 1), 0.0388184, 0),
        ("trt10.16-mnist-dumpProfile.log", "PASSED", (10, 16, 1), None, 15),  # a profile without a summary
        ("trt10.16-mnist-dumpLayerInfo.log", "PASSED", (10, 16, 1), None, 0),
        ("trt11.0-mnist-dumpProfile.excerpt.log", "PASSED", (11, 0, 0), 0.0587769, 12),  # both
        ("trt11.0-removed-flags.excerpt.log", "", None, None, 0),
        ("trt10.16-python-api-errors.log", "", None, None, 0),
        ("trt10-timing-cache-build-times.log", "", None, None, 0),
    ],
)
def test_every_recorded_log_is_read(name, verdict, version, median, profile):
    report = read(name)
    assert (report.verdict, report.version, report.median_ms) == (verdict, version, median)
    assert len(report.profile) == profile


@pytest.mark.parametrize(
    "line",
    [
        "[W] Dynamic dimensions required for input: x, but no shapes were provided. Automatically overriding",
        "[W] Shape missing for input with dynamic shape: xAutomatically setting shape to: 1x1x28x28",
    ],
)
def test_shapes_assumed_by_trtexec_are_an_error_even_if_it_passes(line):
    report = read_log(f"{line}\n&&&& PASSED TensorRT.trtexec # trtexec")
    cause = cause_of(report.findings)
    assert report.verdict == "PASSED"
    assert cause is not None
    assert cause.rule.kind == "shapes_assumed"
    assert "inputs.shapes" in cause.rule.cure


@pytest.mark.parametrize(
    ("log", "version", "verdict"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8510] # trtexec", (8, 5, 1), ""),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec", (10, 16, 1), ""),
        ("&&&& FAILED TensorRT.trtexec [TensorRT v110000] [b114] # trtexec --help", (11, 0, 0), "FAILED"),
        ("&&&& PASSED TensorRT.trtexec # trtexec", None, "PASSED"),
        ("[E] Error Code 2: OutOfMemory (no)\n&&&& PASSED TensorRT.trtexec [TensorRT v8601]", (8, 6, 1), "PASSED"),
    ],
)  # fmt: skip
def test_version_and_verdict_are_read_from_the_banner(log, version, verdict):
    report = read_log(log)
    assert (report.version, report.verdict) == (version, verdict)


COMPUTE = (
    "GPU Compute Time: min = 3.1e-02 ms, max = 1 ms, mean = 0.5 ms, median = {} ms, percentile(99%) = 1 ms"
)


@pytest.mark.parametrize(
    ("log", "median"),
    [
        (COMPUTE.format("4.5e-02"), 0.045),
        ("[07/07/2026-02:10:58] [I] GPU Compute Time: min = 0.03 ms, median = 0.045 ms", 0.045),
        (f"[I] {COMPUTE.format(0.5)}\n[I] {COMPUTE.format(1).replace('GPU Compute Time', 'Latency')}", 0.5),
        ("[I] Latency: min = 1 ms, median = 1 ms\n[I] Enqueue Time: median = 1 ms", None),
        (COMPUTE.format("nan"), None),
        (COMPUTE.format("-1"), None),
        (COMPUTE.format("fast"), None),
        (COMPUTE.format("1e999"), None),
    ],
)
def test_the_median_is_that_of_compute_times(log, median):
    assert read_log(log).median_ms == median


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            "* Throughput may be bound by Enqueue Time rather than GPU Compute and the GPU may be",
            "enqueue_bound",
        ),
        (
            "* Throughput may be bound by host-to-device transfers for the inputs rather than",
            "transfer_bound",
        ),
        ("The specified --useCudaGraph flag has been ignored. The inference will be", "no_cuda_graph"),
    ],
)
def test_warnings_in_the_source_of_trtexec_are_notes(line, kind):
    (finding,) = find_all(f"[W] {line}")
    assert (finding.rule.kind, finding.rule.weight) == (kind, "note")


def test_weak_typing_is_a_note():
    weak = "Weakly-typed networks have been deprecated in TensorRT 10.12."
    assert read_log(f"[07/07/2026-02:10:54] [W] {weak}").notes == (weak,)
