"""The comparison of runtimes in the terminal, pages and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from qdqspec.app.report.compare import conclusions, runtimes_text
from qdqspec.app.report.record import json_text, record_from_json, record_to_json
from qdqspec.app.report.write import format_named, write_results
from qdqspec.testing.records import sample_run
from qdqspec.types import Interval, RunRecord, RuntimeComparison, RuntimeModel, Samples


def model(backend: str, kind: str, ratio: tuple[float, float, float] | None, **fields) -> RuntimeModel:
    if ratio is not None:
        median, low, high = ratio
        fields |= {"median_ms": 8 * median, "ratio": Interval(median=median, low=low, high=high)}
        fields["to_winner"] = Interval(median=median / 0.6, low=low / 0.6, high=high / 0.6)
    names = {"case": f"net::{backend}", "backend": backend, "target": f"{backend}-cpu", "model": kind}
    return RuntimeModel(**names, samples=Samples(wall_ms=(1.0, 2.0), cpu_ms=(1.0, 2.0)), **fields)


FLOATS = (model("onnxruntime", "float", (1, 1, 1)), model("openvino", "float", (1.1, 1.08, 1.12)))
TUNED = (
    model("onnxruntime", "tuned", (0.61, 0.58, 0.65), pairs=12, scheme="ab", sqnr_db=31.2),
    model("openvino", "tuned", (0.6, 0.57, 0.63), pairs=10, scheme="cd", sqnr_db=28.4),
)
FOUND = RuntimeComparison(
    name="net",
    clock="cpu",
    builds=3,
    models=(FLOATS[0], TUNED[0], FLOATS[1], TUNED[1]),
    reference="onnxruntime float",
    winner="openvino tuned",
)


def run_with(found: RuntimeComparison) -> RunRecord:
    return replace(sample_run(), runtimes=(found,))


def test_the_text_of_a_comparison_of_runtimes(golden):
    failed = model("other", "float", None, failure="it crashed")
    slow = model("other", "tuned", (1.3, 1.25, 1.35), pairs=3, sqnr_db=12.0, limit_db=20.0)
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


def test_a_round_trip_through_json_keeps_the_comparison():
    data = record_to_json(run_with(FOUND))
    assert record_from_json(json.loads(json_text(data))).runtimes == (FOUND,)
    del data["runtimes"]  # records of earlier versions have no comparison
    assert record_from_json(data).runtimes == ()


def test_the_pages_show_table_and_winner():
    for name in ("markdown", "html"):
        page = format_named(name).render(run_with(FOUND))
        assert "Runtimes of net" in page
        assert "fastest that meets the accuracy limits: the model tuned for openvino-cpu" in page.replace(
            "\\", ""
        )
        assert "Runtimes of" not in format_named(name).render(sample_run())


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
