"""Uses of the public names for a type checker. Not run: `test_public.py` compares the types revealed by mypy."""

from __future__ import annotations

from typing import reveal_type

from qdqspec import (
    Session,
    Study,
    compare,
    find_culprits,
    find_regions,
    load_spec,
    measure,
    render,
    tune,
    verify,
)

result = tune("net.onnx", trials=30, quant="int8", calibration="data.npz", backend="onnxruntime")
reveal_type(result)  # qdqspec.app.session.result.Result
reveal_type(result.speedup.low)  # float
reveal_type(result.model)  # pathlib.Path
reveal_type(result.scheme)  # qdqspec.types.case.Placement
reveal_type(result.trials)  # tuple[qdqspec.types.search.Trial, ...]
reveal_type(result.unchanged)  # bool
reveal_type(result.front)  # tuple[qdqspec.types.search.FrontPoint, ...]
reveal_type(result.save("folder"))  # pathlib.Path

reveal_type(measure("net.onnx", "tuned.onnx"))  # qdqspec.types.evidence.LatencyEvidence
reveal_type(verify("net.onnx", "tuned.onnx"))  # qdqspec.types.measurement.ParityEvidence
reveal_type(verify("net.qdq.yaml::default"))  # qdqspec.types.evidence.RunRecord
reveal_type(compare("a.json", result.record))  # qdqspec.app.report.compare.Comparison
reveal_type(render(result.record, "run.html"))  # pathlib.Path
reveal_type(find_culprits("net.onnx", "tuned.onnx").pairs)  # tuple[qdqspec.types.measurement.Culprit, ...]
reveal_type(find_regions("net.onnx"))  # tuple[qdqspec.types.case.Region, ...]

with Session(backend="onnxruntime") as session, session.study("net.onnx", trials=3) as study:
    reveal_type(study)  # qdqspec.app.session.study.Study
    for trial in study:
        reveal_type(trial)  # qdqspec.types.search.Trial
    reveal_type(study.ask(2))  # typing.Sequence[qdqspec.search.base.Proposal]
    reveal_type(study.best)  # qdqspec.types.search.Trial | None
    reveal_type(study.evaluate({"conv": "in+out"}))  # qdqspec.types.search.Trial
    reveal_type(study.rehearse({"conv": "in+out"}))  # qdqspec.types.search.Rehearsed
    reveal_type(study.rehearse({"conv": "in+out"}).guiding_db)  # float
    reveal_type(study.build(study.ask()[0]))  # qdqspec.search.loop.Built
reveal_type(Study.load("folder"))  # qdqspec.app.session.study.Study
reveal_type([case.name for case in load_spec(result.model).cases()])  # list[str]

tune("net.onnx", trails=30)  # error: Unexpected keyword argument "trails"
tune("net.onnx", trials="many")  # error: Argument "trials" to "tune" has incompatible type "str"
tune("net.onnx", weights="per-chanel")  # error: Argument "weights" to "tune" has incompatible type
study.evaluate({"conv": 8})  # error: Dict entry 0 has incompatible type
