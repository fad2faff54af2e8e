"""Limits of a selected model by default, and results of searches: reasons, kernels of candidates, errors of blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from searches import kernel
from written_cases import normal, written_case

from qdqspec.accuracy.evaluator import SAMPLES
from qdqspec.app.evidence.builds import quantized_work, rejected_candidates
from qdqspec.app.report.facts import errors_table
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.session import Session
from qdqspec.app.session.result import Result
from qdqspec.app.session.tuning import Tuning, cut_short_text
from qdqspec.checks.rejected import kernel_lines
from qdqspec.search.confirmation import Confirmed
from qdqspec.search.limits import Limits
from qdqspec.search.select import Selection
from qdqspec.types import (
    NO_PAIRS,
    Case,
    Consumer,
    Evidence,
    Inputs,
    Interval,
    LatencyEvidence,
    LayerTime,
    PlacedPair,
    Placement,
    RejectedCandidate,
    RunRecord,
    SearchResult,
    Site,
    Trial,
    TuneRules,
)

QUIET = ("fake.run_noise=0.002", "fake.wall_noise=0.002", "fake.build_noise=0.001")


@pytest.fixture
def case(case: Case, project: Path) -> Case:
    images = arrays_of(project / "data.npz")["x"]
    np.savez(project / "small.npz", x=images / 1000)  # below half a quantization step of the calibrated range
    usual = np.concatenate([images] * 2)[:SAMPLES]
    np.savez(project / "late.npz", x=np.concatenate([usual, 100 * images]))  # beyond the calibrated ranges
    data = project / "data.npz"
    inputs = Inputs(calibration=data, evaluation=data)
    return replace(case, inputs=inputs, tune=TuneRules(trials=4))


def on_small_data(case: Case, name: str = "small", **tune: Any) -> Case:
    """The case with evaluation data on which candidates are inaccurate; with ``late``, only after the first samples."""
    inputs = replace(case.inputs, evaluation=case.model.parent / f"{name}.npz")
    return replace(case, inputs=inputs, tune=replace(case.tune, **tune))


def tuned(case: Case, *, integer: float = 0.8, **words: Any) -> tuple[RunRecord, Evidence]:
    """The record and evidence of tuning the case, where integer kernels take ``integer`` of the float time."""
    words = {"root": case.model.parent, "output": Path("out"), **words}
    with Session(backend="fake", backend_option=(*QUIET, f"fake.integer={integer}"), **words) as session:
        record = session.tune(case).record
    return record, record.cases[0].evidence


def test_a_candidate_accurate_only_on_the_first_samples_is_not_selected(case: Case) -> None:
    record, found = tuned(on_small_data(case, "late"))
    assert found.status == "unchanged"
    assert "the SQNR limit of 20 dB (the default)" in found.reason
    assert f"default unchanged: {found.reason}" in summary_table(record)
    data = json.loads(json.dumps(record_to_json(record), allow_nan=False))["cases"][0]
    assert (data["status"], data["reason"]) == ("unchanged", found.reason)
    assert data["parity"] == {**data["parity"], "sqnr_db": 200.0, "cosine": 1.0, "max_abs": 0.0}


def test_min_sqnr_db_none_removes_the_limit_and_the_table_marks_the_model(case: Case) -> None:
    record, found = tuned(on_small_data(case, min_sqnr_db="none"))
    assert found.status == "tuned"
    assert found.parity.sqnr_db < 20
    table = summary_table(record)
    assert f"{found.parity.sqnr_db:.1f} < 20" in table
    assert "SQNR limit: none (min_sqnr_db: none)" in table
    assert f"its SQNR of {found.parity.sqnr_db:.1f} dB is below 20 dB" in table


@pytest.mark.parametrize("min_sqnr_db", [30.0, "none"])
def test_the_point_selected_from_a_front_meets_the_limit(case: Case, min_sqnr_db: Any) -> None:
    rules = replace(case.tune, trials=8, objective="pareto", min_sqnr_db=min_sqnr_db)
    _, found = tuned(replace(case, tune=rules))
    members = {point.placement: point for point in found.search.front}
    selected = members[found.search.winner.digest]
    assert selected.sqnr_db == pytest.approx(found.parity.sqnr_db, abs=0.01)
    assert selected.sqnr_db >= (found.search.limits.min_sqnr_db or 0)
    assert [point.sqnr_db for point in found.search.front][-1] == 200.0


# ---- a budget for the reference only: full quantization is confirmed beside it ---------------------


@pytest.fixture
def short(case: Case) -> Case:
    return replace(case, tune=TuneRules(trials=1))


def searched(case: Case, **words: Any) -> tuple[SearchResult, dict[str, dict[str, Any]]]:
    """The search, and the journal entries of its confirmation by role."""
    _, found = tuned(case, **words)
    text = (found.output / "trials.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return found.search, {line["role"]: line for line in lines if line["phase"] == "confirm"}


def test_full_quantization_selected_without_a_trial_is_cached_and_reusable(short: Case) -> None:
    """It is read from the cache, selected by its digest, and a seed of the next search by ``patterns.yaml``."""
    first, confirmed = searched(short)
    assert [trial.placement.sites for trial in first.trials if trial.phase != "confirm"] == [frozenset()]
    assert confirmed.keys() == {"reference", "winner", "everything"}
    assert first.winner.digest == confirmed["everything"]["placement"]
    assert first.total == 1, "its profile is no candidate of the search"
    output = short.model.parent / "out" / "chain" / "default"
    _, *rows = (output / "layers.csv").read_text().splitlines()
    assert {row.partition(",")[0] for row in rows} == {"reference", "tuned"}
    again, _ = searched(short)
    assert again.provenance.source == "cached"
    assert again.winner == first.winner
    assert again.winner.labels == first.winner.labels
    named, _ = searched(short, scheme=first.winner.digest[:8])
    assert named.winner == first.winner
    rules = TuneRules(trials=2, start_from=(output / "patterns.yaml",))
    sister, _ = searched(replace(short, tune=rules))
    assert first.winner in [trial.placement for trial in sister.trials]


@pytest.mark.parametrize(("least", "unchanged"), [(5.0, False), (90.0, True)])
def test_the_sqnr_of_full_quantization_without_a_trial_is_measured_before_selection(
    short: Case, least: float, unchanged: bool
) -> None:
    result, confirmed = searched(replace(short, tune=replace(short.tune, min_sqnr_db=least)))
    assert confirmed["everything"]["ratio"] < 0.95
    assert result.unchanged == unchanged
    assert "; the search ended at its limit of 1 build, before it was done" in result.reason
    missed = result.reason.startswith("1 faster candidate misses the SQNR limit of 90 dB by ")
    assert missed == unchanged


# ---- results of searches: the reasons of one that selected the reference --------------------------

TEXT = """net (float[1,8,24,24] x) => (float[1,8,24,24] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = HardSwish(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)
  s = Shape(x)  y = Reshape(c, s) }"""


@pytest.fixture
def mixed(tmp_path: Path) -> Case:
    """Two convolutions with an activation function between, and operators that move data."""
    weight = normal(8, 8, 3, 3, deviation=0.2)
    found = written_case(tmp_path, TEXT, {"x": normal(3, 8, 24, 24, seed=1)}, TuneRules(trials=12), w=weight)
    return replace(found, inputs=replace(found.inputs, evaluation=found.inputs.calibration))


def test_the_reason_is_that_every_candidate_is_slower_with_its_kernels(mixed: Case) -> None:
    record, found = tuned(mixed, integer=3.0)
    search = found.search
    assert found.status == "unchanged"
    which = r"all \d+ quantized candidates within the limits are|the only quantized candidate within the limits is"
    assert re.match(rf"({which}) slower: ", found.reason)
    assert "in the profile of the fastest candidate" in found.reason
    assert "ms more" in found.reason
    assert found.reason in summary_table(record).replace("\n  ", " ")
    slowest = search.rejected[-1]
    assert slowest.role.endswith(("everything quantized", "(everything quantized)"))
    assert (slowest.reason, slowest.is_confirmed) == ("slower", True)
    assert slowest.kernels.integer >= 2
    assert slowest.kernels.tuned_ms > slowest.kernels.reference_ms
    assert slowest.kernels.left_in_float == {"HardSwish": 1}
    floats = "1 kernel with quantized inputs runs in float (HardSwish): no integer kernel for these types."
    assert kernel_lines(search)[-1].endswith(floats)
    (read,) = record_from_json(record_to_json(record)).cases
    assert read.evidence.search.rejected == search.rejected


def test_the_reason_is_that_no_candidate_is_within_the_limits_or_faster(mixed: Case) -> None:
    _, found = tuned(replace(mixed, tune=TuneRules(trials=3, min_sqnr_db=100.0)), integer=3.0)
    said = "no quantized candidate is within the limits, and none is faster: the fastest takes "
    assert found.reason.startswith(said)


# ---- a search that a limit ended -------------------------------------------------------------------


def test_a_search_that_a_limit_ended_names_the_option_to_raise(mixed: Case) -> None:
    _, found = tuned(replace(mixed, tune=TuneRules(trials=1, preset="extensive")), integer=0.5)
    search = found.search
    assert found.status == "tuned"
    assert search.cut_short.startswith("the search ended at its limit of 1 build, before it was done: ")
    assert search.cut_short.endswith("--trials 2 (tune.trials)")
    assert search.cut_short in found.reason


def site(node: str, tensor: str = "x") -> Site:
    return Site(tensor=tensor, consumers=(Consumer(node, 0),), format="uint8")


def trial(number: int, phase: str = "pure", **more: Any) -> Trial:
    sites = frozenset({site("conv", f"x{number}")} if number else ())
    return Trial(number=number, phase=phase, placement=Placement(sites=sites), **more)


def cut_short(ended_by: str, *trials: Trial) -> str:
    return cut_short_text(ended_by, trials, TuneRules(minutes=0.5), usual=40)


@pytest.mark.parametrize(("built", "minutes"), [(0, "5"), (14, "1.5"), (39, "1")])
def test_a_search_that_a_limit_ended_tells_the_time_that_it_needs(built: int, minutes: str) -> None:
    found = cut_short("its limit of 30 s", *(trial(number) for number in range(built + 1)))
    ended = f"ended at its limit of 30 s, before it was done: {built} of about 40 candidates built, "
    assert found == f"the search {ended}give it more with --minutes {minutes} (tune.minutes)"


def test_other_reasons_of_a_search_that_was_cut_short() -> None:
    assert cut_short("", trial(0)) == ""
    assert cut_short("the time limit of the run", trial(0)).endswith("give it more with --qdq-time-limit")


# ---- kernels ---------------------------------------------------------------------------------------

OPS = {"conv": "Conv", "swish": "HardSwish", "shape": "Shape", "reshape": "Reshape", "gemm": "Gemm"}
PAIRS = tuple(PlacedPair(site=site(node, node), scale=(0.1,), zero_point=(0,)) for node in OPS)


def test_only_operators_in_narrow_kernels_are_quantized_work() -> None:
    layers = (kernel("conv", integer=True), kernel("swish"), kernel("reshape", integer=True), kernel("gemm"))
    found = quantized_work(PAIRS, OPS, layers)
    assert (found.runs, found.nodes) == (True, ("conv",))
    fused = quantized_work(PAIRS, OPS, (kernel("conv", "swish", integer=True),))
    assert fused.nodes == ("conv", "swish")
    unknown = quantized_work(PAIRS, OPS, ())
    assert (unknown.runs, unknown.nodes) == (False, ("conv", "gemm"))


def candidate(number: int, ratio: float, db: float, layers: tuple[LayerTime, ...] = ()) -> Trial:
    return replace(trial(number), ratio=ratio, sqnr_db=db, layers=layers)


def rejected(known: list[Trial], before: tuple[LayerTime, ...] = ()) -> Sequence[RejectedCandidate]:
    """Those that are compared with the reference within the default limits; number 9 is everything quantized."""
    limits = Limits()
    for one in known:
        limits.learn(one)
    lines = [("everything", one) for one in known if one.number == 9]
    ratios = {role: Interval(median=one.ratio, low=one.ratio, high=one.ratio) for role, one in lines}
    one = Interval(median=1, low=1, high=1)
    confirmed = Confirmed(
        choice=Selection(role="reference", placement=NO_PAIRS, reason=""),
        raw_winner=NO_PAIRS,
        latency=LatencyEvidence(clock="cpu", samples={}, ratios={}, tested={}, speedup=one, builds=3),
        front=(),
        lines=tuple(lines),
        ratios=ratios,
        trials=(Trial(number=0, phase="own", placement=NO_PAIRS, layers=before), *known),
    )
    return rejected_candidates(confirmed, limits, OPS)


def test_candidates_on_both_sides_of_the_limit_are_compared() -> None:
    figures = [(1, 0.4, 12.0), (2, 0.7, 18.5), (9, 0.8, 15.0), (3, 1.1, 25.0)]
    known = [candidate(*each) for each in figures]
    found = rejected(known)
    assert [(one.role, one.ratio.median, one.reason) for one in found] == [
        ("fastest candidate", 0.4, "8.0 dB below the SQNR limit of 20 dB (the default)"),
        ("fastest candidate within the limits", 1.1, "slower"),
        ("most accurate faster candidate", 0.7, "1.5 dB below the SQNR limit of 20 dB (the default)"),
        ("everything quantized", 0.8, "5.0 dB below the SQNR limit of 20 dB (the default)"),
    ]


def test_the_time_of_a_candidate_is_divided_into_conversions_and_kernels() -> None:
    before = (kernel("conv", ms=2.0), kernel("swish", ms=1.0), kernel("gemm", ms=1.0))
    quantize = LayerTime(name="q", op_type="QuantizeLinear", milliseconds=0.5, tensors=("x1",), boundary=True)
    after = (quantize, kernel("conv", ms=2.5), kernel("swish", ms=1.0), kernel("gemm", ms=0.25, integer=True))
    (found,) = rejected([candidate(1, 1.1, 30.0, after)], before)
    kernels = found.kernels
    assert (kernels.kernels, kernels.integer, kernels.unfused) == (3, 1, 1)
    assert kernels.left_in_float == {"Conv": 1}
    assert (kernels.conversions_ms, kernels.slower_ms, kernels.faster_ms) == (0.5, 0.5, -0.75)
    assert [place.place for place in kernels.slower] == ["conv"]
    assert [place.place for place in kernels.faster] == ["gemm"]


def digits(
    models: Path, share: float, monkeypatch: pytest.MonkeyPatch, session: Session, **asked: Any
) -> Result:
    """The result of a search in which the errors of single blocks may take this share of the time."""
    monkeypatch.setattr(Tuning, "_result", partialmethod(Tuning._result, errors_share=share))
    data = models.parent / "data" / "digits_calibration.npz"
    return session.tune(models / "digits_resnet.onnx", calibration=data, corrections="none", **asked)


@pytest.mark.usefixtures("fast_integers")
def test_a_search_with_a_limit_has_the_error_of_each_block(
    models: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = digits(models, 1e3, monkeypatch, session, min_sqnr_db=45, trials=4)
    units = {unit.id for unit in session.work(result.evidence.case).prepared.space.units}
    errors = result.search.errors
    assert errors
    assert {error.block for error in errors} <= units
    assert [error.sqnr_db for error in errors] == sorted(error.sqnr_db for error in errors)


@pytest.mark.usefixtures("fast_integers")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"min_sqnr_db": "none"}, "neither an accuracy constraint"),
        ({"min_sqnr_db": 1, "exclude": ["*"]}, "no block can be quantized"),
        ({"min_sqnr_db": 1, "backend": "fake"}, "simulated"),
        ({"min_sqnr_db": 1}, "the search's time was over"),
    ],
)
def test_errors_of_blocks_are_missing_with_a_reason(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], why: str
) -> None:
    backend = {"backend": more.pop("backend")} if "backend" in more else {}
    with Session(root=tmp_path, **backend) as session:
        found = digits(models, 0.0, monkeypatch, session, trials=2, **more)
    assert why in str(errors_table(found.search).rows)
