"""Results of searches: reasons of a search that selected the reference, kernels of candidates, and errors of blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from written_cases import normal, written_case

from qdqspec.app.evidence.builds import quantized_work, rejected_candidates
from qdqspec.app.report.facts import errors_table
from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.session import Session, pipeline
from qdqspec.app.session.pipeline import cut_short_text
from qdqspec.checks.rejected import kernel_lines
from qdqspec.search.limits import Limits
from qdqspec.types import (
    Case,
    Consumer,
    Evidence,
    Interval,
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

TEXT = """net (float[1,8,24,24] x) => (float[1,8,24,24] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = HardSwish(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)
  s = Shape(x)  y = Reshape(c, s) }"""
QUIET = ("fake.run_noise=0.002", "fake.wall_noise=0.002", "fake.build_noise=0.001")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Two convolutions with an activation function between, and operators that move data."""
    weight = normal(8, 8, 3, 3, deviation=0.2)
    case = written_case(tmp_path, TEXT, {"x": normal(3, 8, 24, 24, seed=1)}, TuneRules(trials=12), w=weight)
    return replace(case, inputs=replace(case.inputs, evaluation=case.inputs.calibration))


def tuned(case: Case, *, integer: float, **words: Any) -> tuple[RunRecord, Evidence, SearchResult]:
    """The record of tuning the case on a device whose integer kernels take ``integer`` of the float time."""
    options = (*QUIET, f"fake.integer={integer}")
    with Session(backend="fake", root=case.model.parent, backend_option=options, **words) as session:
        record = session.tune(case).record
    found = record.cases[0].evidence
    assert found.search is not None
    return record, found, found.search


# ---- the reasons ---------------------------------------------------------------------------------


def test_the_reason_is_that_every_candidate_is_slower_with_its_kernels(case: Case) -> None:
    record, found, search = tuned(case, integer=3.0)
    assert found.status == "unchanged"
    assert re.match(
        r"(all \d+ quantized candidates within the limits are|the only quantized candidate within the limits is) "
        r"slower: ",
        found.reason,
    )
    assert "in the profile of the fastest candidate" in found.reason
    assert "ms more" in found.reason
    assert found.reason in summary_table(record).replace("\n  ", " ")
    slowest = search.rejected[-1]
    assert slowest.role.endswith(("everything quantized", "(everything quantized)"))
    assert slowest.reason == "slower"
    assert slowest.is_confirmed
    assert slowest.kernels.integer >= 2
    assert slowest.kernels.tuned_ms > slowest.kernels.reference_ms
    assert slowest.kernels.conversions_ms > 0
    assert slowest.kernels.left_in_float == {"HardSwish": 1}
    floats = "1 kernel with quantized inputs runs in float (HardSwish): no integer kernel for these types."
    assert kernel_lines(search)[-1].endswith(floats)
    (read,) = record_from_json(record_to_json(record)).cases
    assert read.evidence.search.rejected == search.rejected


def test_the_reason_is_that_no_candidate_is_within_the_limits_or_faster(case: Case) -> None:
    _, found, _ = tuned(replace(case, tune=TuneRules(trials=3, min_sqnr_db=100.0)), integer=3.0)
    said = "no quantized candidate is within the limits, and none is faster: the fastest takes "
    assert found.reason.startswith(said)


# ---- a search that a limit ended -------------------------------------------------------------------


def test_a_search_that_a_limit_ended_names_what_it_did_not_reach(case: Case) -> None:
    _, found, search = tuned(replace(case, tune=TuneRules(trials=1, preset="extensive")), integer=0.5)
    assert found.status == "tuned"
    assert search.cut_short.startswith("the search ended at its limit of 1 build, before it was done: ")
    assert "not reached: " in search.cut_short
    assert search.cut_short.endswith("--trials 2 (tune.trials)")
    assert search.cut_short in found.reason


def site(node: str, tensor: str = "x") -> Site:
    return Site(tensor=tensor, consumers=(Consumer(node, 0),), format="uint8")


def trial(number: int, phase: str = "pure", **more: Any) -> Trial:
    sites = frozenset({site("conv", f"x{number}")} if number else ())
    return Trial(number=number, phase=phase, placement=Placement(sites=sites), **more)


STEPS = {"pure": "uniform placements", "compose": "compositions", "refine": "changes of single blocks"}


def cut_short(
    ended_by: str, *trials: Trial, minutes: float | None = 0.5, untried: tuple[str, ...] = ()
) -> str:
    rules = TuneRules(minutes=minutes)
    return cut_short_text(ended_by, trials, rules, usual=40, steps=STEPS, untried=untried)


@pytest.mark.parametrize(
    ("built", "missed", "minutes"),
    [
        (0, "uniform placements, compositions, changes of single blocks", "5"),
        (14, "compositions, changes of single blocks", "1.5"),
        (39, "compositions, changes of single blocks", "1"),
    ],
)
def test_steps_not_reached_are_named_with_the_time_for_them(built: int, missed: str, minutes: str) -> None:
    found = cut_short("its limit of 30 s", *(trial(number) for number in range(built + 1)))
    reached = f"{built} of about 40 candidates built, not reached: {missed}, "
    assert found.startswith(f"the search ended at its limit of 30 s, before it was done: {reached}")
    assert found.endswith(f"give it more with --minutes {minutes} (tune.minutes)")


def test_other_reasons_of_a_search_that_was_cut_short() -> None:
    assert cut_short("", trial(0)) == ""
    assert "corrections (bias, rounding)" in cut_short("its limit of 30 s", untried=("bias", "rounding"))
    assert cut_short("the time limit of the run", trial(0)).endswith("give it more with --qdq-time-limit")


# ---- kernels ---------------------------------------------------------------------------------------

OPS = {"conv": "Conv", "swish": "HardSwish", "shape": "Shape", "reshape": "Reshape", "gemm": "Gemm"}
PAIRS = tuple(PlacedPair(site=site(node, node), scale=(0.1,), zero_point=(0,)) for node in OPS)


def kernel(*nodes: str, ms: float = 1.0, integer: bool = False) -> LayerTime:
    return LayerTime(name="+".join(nodes), op_type="K", milliseconds=ms, nodes=nodes, integer=integer)


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
    return rejected_candidates(known, lines, ratios, before, limits, OPS)


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


@pytest.fixture
def time_for_errors(fast_integers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that build the same placements, and have time for the error of each block, on any machine."""
    monkeypatch.setattr(pipeline, "_result", partial(pipeline._result, errors_share=1e3))


def limited(models: Path, **more: object) -> dict[str, object]:
    data = models.parent / "data" / "digits_calibration.npz"
    return {"calibration": data, "corrections": "none", **more}


@pytest.mark.usefixtures("time_for_errors")
def test_a_search_with_a_limit_has_the_error_of_each_block(models: Path, tmp_path: Path) -> None:
    words = limited(models, min_sqnr_db=45, trials=4)
    with Session(output=tmp_path / "out", no_cache=True) as session:
        result = session.tune(models / "digits_resnet.onnx", **words)
        units = {unit.id for unit in session.work(result.evidence.case).prepared.space.units}
    errors = result.search.errors
    assert errors
    assert {error.block for error in errors} <= units
    assert [error.sqnr_db for error in errors] == sorted(error.sqnr_db for error in errors)


@pytest.mark.usefixtures("time_for_errors")
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
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], why: str
) -> None:
    monkeypatch.setattr(pipeline, "_result", partial(pipeline._result, errors_share=0.0))
    backend = {"backend": more.pop("backend")} if "backend" in more else {}
    with Session(output=tmp_path / "out", no_cache=True, **backend) as session:
        found = session.tune(models / "digits_resnet.onnx", **limited(models, trials=2, **more)).search
    assert why in str(errors_table(found).rows)
