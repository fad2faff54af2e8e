"""Comparisons of two run records, and of runtimes, in the terminal, pages and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from qdqspec._core.node_digests import NodeDigest, pack
from qdqspec.app.report.compare import ComparedCase, compare_runs, comparison_text, conclusions, runtimes_text
from qdqspec.app.report.write import write_results
from qdqspec.errors import StateError
from qdqspec.testing.records import alone_case, cached_case, faster_case, sample_run
from qdqspec.types import (
    CaseRecord,
    DeviceKey,
    InputShape,
    Interval,
    RunRecord,
    RuntimeComparison,
    RuntimeModel,
    Samples,
    ShapeProfile,
)


def run_of(*cases: CaseRecord) -> RunRecord:
    return RunRecord(version="1", started="2026-01-01T00:00:00Z", seconds=1.0, cases=cases)


def scaled(record: CaseRecord, factor: float, *roles: str, seed: int = 0) -> CaseRecord:
    """The case with new noise in its samples and the times of some roles multiplied by ``factor``."""
    latency = record.evidence.latency
    random = np.random.default_rng(seed)

    def again(samples: Samples, times: float) -> Samples:
        noise = times * np.exp(0.003 * random.standard_normal(len(samples.wall_ms)))
        return Samples(
            wall_ms=tuple(np.asarray(samples.wall_ms) * noise),
            cpu_ms=tuple(np.asarray(samples.cpu_ms) * noise),
        )

    samples = {
        role: again(taken, factor if role in roles else 1.0) for role, taken in latency.samples.items()
    }
    return changed(record, latency=replace(latency, samples=samples))


def changed(record: CaseRecord, **fields: object) -> CaseRecord:
    return replace(record, evidence=replace(record.evidence, **fields))


def compare_one(before: CaseRecord, after: CaseRecord) -> ComparedCase:
    (case,) = compare_runs(run_of(before), run_of(after)).cases
    return case


@pytest.mark.parametrize(("factor", "word"), [(1.0, "same"), (1.2, "slower"), (0.8, "faster")])
def test_the_verdict_is_on_the_selected_model(factor: float, word: str) -> None:
    found = compare_one(faster_case(), scaled(faster_case(), factor, "tuned"))
    assert found.word == word
    assert found.change.builds.median == pytest.approx(factor, rel=0.02)
    assert [found.is_slower_beyond(allowed) for allowed in (0.1, 0.3)] == [word == "slower", False]


def test_an_equal_slowdown_of_all_models_is_no_change() -> None:
    """All models including the reference have become slower by the same factor."""
    found = compare_one(faster_case(), scaled(faster_case(), 1.1, *faster_case().evidence.latency.samples))
    assert found.word == "same"
    assert any("the reference's time changed by +10" in note for note in found.notes)


def test_a_case_without_times_is_reported_as_not_timed() -> None:
    found = compare_one(faster_case(), changed(faster_case(), latency=None))
    assert (found.word, found.change) == ("not timed", None)
    assert "not timed in B" in found.notes
    latency = faster_case().evidence.latency
    untuned = replace(latency, samples={"reference": latency.samples["reference"]})
    other = compare_one(changed(faster_case(), latency=untuned, skipped="no GPU"), faster_case())
    assert (other.word, "not timed in A: no GPU" in other.notes) == ("not timed", True)


def profile_of(batch: int) -> ShapeProfile:
    return ShapeProfile(shapes={"x": InputShape.of((batch, 16))})


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (changed(faster_case(), device=DeviceKey(key="another")), "device of squeezenet::default"),
        (changed(faster_case(), target="tensorrt-10"), "backend of squeezenet::default"),
        (changed(faster_case(), latency=replace(faster_case().evidence.latency, clock="wall")), "two clocks"),
        (
            changed(faster_case(), profiles=(profile_of(8),)),
            "shapes of squeezenet::default is x 4x16 in A and x 8x16",
        ),
        (alone_case(), "no case in common"),
    ],
)
def test_runs_of_other_settings_or_cases_are_refused(after: CaseRecord, words: str) -> None:
    before = changed(faster_case(), profiles=(profile_of(4),))
    with pytest.raises(StateError, match=words):
        compare_runs(run_of(before), run_of(after))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_invalid_times_are_refused(value: float) -> None:
    latency = faster_case().evidence.latency
    broken = {**latency.samples, "tuned": Samples(cpu_ms=(value,), wall_ms=(1.0,))}
    with pytest.raises(StateError, match="no usable times"):
        compare_one(changed(faster_case(), latency=replace(latency, samples=broken)), faster_case())


def test_another_placement_and_the_changed_nodes_of_another_model_are_named() -> None:
    def row(attributes: str) -> str:
        return pack([NodeDigest("layer1/conv", "Conv", attributes, ("=0a0b0c",))])

    search = alone_case().evidence.search
    after = changed(faster_case(), model_sha256="0" * 64, model_nodes=row("02"), search=search)
    assert compare_one(changed(faster_case(), model_nodes=row("01")), after).notes[:2] == (
        "the model is another one: 1 node changed: Conv 'layer1/conv' (attributes)",
        "the placement is another one",
    )


def runs() -> tuple[RunRecord, RunRecord]:
    before = sample_run()
    device = replace(faster_case().evidence.device, details={"onnxruntime": "1.31.2", "threads": "1"})
    after = run_of(
        changed(scaled(faster_case(), 0.9, "tuned"), device=device),
        scaled(cached_case(), 1.15, "tuned"),
        changed(alone_case(), case=replace(alone_case().evidence.case, id="b8")),
    )
    return before, after


def test_the_text_of_a_comparison(golden) -> None:
    golden("report/compare.txt", comparison_text(compare_runs(*runs())) + "\n")


# ---- runtimes ------------------------------------------------------------------------------------


def runtime_model(
    backend: str, kind: str, ratio: tuple[float, float, float] | None, **fields
) -> RuntimeModel:
    if ratio is not None:
        median, low, high = ratio
        fields |= {"median_ms": 8.0 * median, "ratio": Interval(median=median, low=low, high=high)}
        fields["to_winner"] = Interval(median=median / 0.6, low=low / 0.6, high=high / 0.6)
    names = {"case": f"net::{backend}", "backend": backend, "target": f"{backend}-cpu", "model": kind}
    return RuntimeModel(**names, samples=Samples(wall_ms=(1.0, 2.0), cpu_ms=(1.0, 2.0)), **fields)


FLOATS = (
    runtime_model("onnxruntime", "float", (1.0, 1.0, 1.0)),
    runtime_model("openvino", "float", (1.1, 1.08, 1.12)),
)
TUNED = (
    runtime_model("onnxruntime", "tuned", (0.61, 0.58, 0.65), pairs=12, scheme="ab", sqnr_db=31.2),
    runtime_model("openvino", "tuned", (0.6, 0.57, 0.63), pairs=10, scheme="cd", sqnr_db=28.4),
)
FOUND = RuntimeComparison(
    name="net",
    clock="cpu",
    builds=3,
    models=(FLOATS[0], TUNED[0], FLOATS[1], TUNED[1]),
    reference="onnxruntime float",
    winner="openvino tuned",
)


def test_the_text_of_a_comparison_of_runtimes(golden):
    failed = runtime_model("other", "float", None, failure="it crashed")
    slow = runtime_model("other", "tuned", (1.3, 1.25, 1.35), pairs=3, sqnr_db=12.0, limit_db=20.0)
    found = replace(FOUND, models=(*FOUND.models, failed, slow))
    golden("report/runtimes.txt", runtimes_text([found]) + "\n")


def test_models_as_fast_as_the_winner_and_faster_float_models_are_reported():
    """By the bounds of the intervals."""

    def lines(first: RuntimeModel, second: RuntimeModel, winner: RuntimeModel) -> str:
        found = replace(FOUND, models=(*FLOATS, first, second), winner=winner.label)
        return "\n".join(conclusions(found))

    tied = "not proved slower than it: the model tuned for onnxruntime-cpu"
    apart = replace(TUNED[0], to_winner=Interval(median=1.02, low=1.01, high=1.03))
    assert tied in lines(*TUNED, TUNED[1])
    assert "not proved slower" not in lines(apart, TUNED[1], TUNED[1])
    slower = replace(TUNED[1], ratio=Interval(median=1.05, low=1.02, high=1.08))
    close = replace(slower, ratio=Interval(median=1.05, low=0.99, high=1.08))
    faster = "float on onnxruntime-cpu is faster than the model tuned for openvino-cpu"
    assert faster in lines(TUNED[0], slower, TUNED[0])
    assert "is faster than" not in lines(TUNED[0], close, TUNED[0])


def test_tune_json_names_the_winner_and_its_file(tmp_path, golden):
    run = sample_run()
    case = run.cases[0]
    evidence = replace(case.evidence, output=tmp_path / "openvino")
    winner = replace(TUNED[1], case=evidence.case.name)
    found = replace(FOUND, models=(*FLOATS, TUNED[0], winner))
    write_results(replace(run, cases=(replace(case, evidence=evidence),), runtimes=(found,)))
    text = (tmp_path / "tune.json").read_text()
    golden("report/tune.json", text)
    assert json.loads(text)["winners"] == {"net": "openvino/tuned.onnx"}
