"""The Q/DQ pairs that cost the most accuracy, on real models and on one with a deliberately coarse pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph_text import saved
from sessions import Open
from written_cases import check_of, normal, written_case

from qdqspec import find_culprits
from qdqspec.app.evidence.parity import culprits_of
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.graph.model import load_model
from qdqspec.types import Case, Consumer, CulpritEvidence, PlacedPair, Site, TuneRules

DATA = Path(__file__).parents[2] / "data"
MODELS = Path(__file__).parents[3] / "specs" / "models"
CALIBRATION = MODELS.parent / "data" / "digits_calibration.npz"
TUNED = DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
TEXT = """chain (float[1,8,12,12] x) => (float[1,8,12,12] y) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)  [relu] b = Relu(a)  [second] c = Conv<pads = [1, 1, 1, 1]>(b, w2)
  [add] d = Add(b, c)  [third] y = Conv<pads = [1, 1, 1, 1]>(d, w) }"""


def placed(tensor: str, *readers: tuple[str, int], scale: float, weight: bool = False) -> PlacedPair:
    ends = tuple(Consumer(*reader) for reader in readers)
    site = Site(tensor=tensor, consumers=ends, format="int8" if weight else "uint8", weight=weight)
    return PlacedPair(site=site, scale=(scale,), zero_point=(0 if weight else 128,))


# Activations are between -4 and 4, weights below one: only the pair that `second` reads has a coarse step.
PAIRS = (
    placed("x", ("first", 0), scale=0.04),
    placed("w", ("first", 1), ("third", 1), scale=0.008, weight=True),
    placed("b", ("second", 0), scale=2.0),
    placed("b", ("add", 0), scale=0.04),
    placed("w2", ("second", 1), scale=0.008, weight=True),
    placed("d", ("third", 0), scale=0.08),
)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    weights = {name: normal(8, 8, 3, 3, deviation=0.08, seed=at) for at, name in enumerate(("w", "w2"))}
    return written_case(tmp_path, TEXT, {"x": normal(12, 8, 12, 12, seed=2)}, **weights)


@pytest.fixture
def session(open_session: Open) -> Session:
    return open_session()


@pytest.fixture
def bench(session: Session, case: Case) -> Prepared:
    return session.work(case).prepared


def test_the_coarsest_pair_is_first_and_the_sqnr_without_it_is_as_reported(bench: Prepared) -> None:
    found = culprits_of(bench, PAIRS)
    worst = found.pairs[0]
    assert (worst.site.tensor, worst.nodes) == ("b", ("second",))
    assert worst.share > 0.9
    assert (found.total, len(found.pairs), found.samples, found.data) == (6, 6, 8, "calibration")
    assert found.output == "y"
    others = culprits_of(bench, [pair for pair in PAIRS if pair.site.consumers[0].node != "second"])
    assert worst.without_db == pytest.approx(others.together_db)
    assert worst.without_db > found.together_db + 10


def test_shares_of_listed_pairs_and_the_rest_add_up_to_one(bench: Prepared) -> None:
    whole, some = culprits_of(bench, PAIRS, most=None), culprits_of(bench, PAIRS, most=2)
    assert sum(pair.share for pair in whole.pairs) == pytest.approx(1)
    assert whole.rest == pytest.approx(0, abs=1e-9)
    assert [pair.site for pair in some.pairs] == [pair.site for pair in whole.pairs[:2]]
    assert some.rest == pytest.approx(1 - sum(pair.share for pair in some.pairs))
    together = placed("b", ("second", 0), ("add", 0), scale=2.0)
    assert culprits_of(bench, [together, *PAIRS[:2]], most=1).pairs[0].nodes == ("add", "second")


def test_reasons_for_missing_pairs(bench: Prepared) -> None:
    assert culprits_of(bench, []) == CulpritEvidence(missing="nothing is quantized")
    late = culprits_of(bench, PAIRS, seconds=0.0)
    assert (len(late.pairs), late.missing) == (1, "the time was over")


def test_pairs_of_another_tool_are_ranked_with_the_names_of_the_float_model() -> None:
    digits = find_culprits(MODELS / "digits_resnet.onnx", TUNED, most=None, calibration=CALIBRATION)
    assert digits.total == len(digits.pairs) == 41  # 13 biases are no separate pairs
    names = set(load_model(MODELS / "digits_resnet.onnx").by_name)
    assert {node for pair in digits.pairs for node in pair.nodes} <= names
    total = sum(10 ** (-pair.alone_db / 10) for pair in digits.pairs)
    assert -10 * np.log10(total) == pytest.approx(digits.together_db, abs=2)
    first, second = digits.pairs[:2]
    assert first.makes_output  # this tool quantizes the logits
    assert first.nodes == ()
    assert "/fc/Gemm" in second.nodes
    assert 30 < digits.together_db < 60
    assert first.without_db is not None
    assert first.without_db > digits.together_db


def test_a_model_that_the_reference_runtime_cannot_compute_is_reported(tmp_path: Path) -> None:
    text = "f (float[1,4] x) => (float[1,4] y) { [relu] a = Relu(x)  [own] y = plugins.Op(a) }"
    with Session(root=tmp_path) as session:
        case = Case(id="default", model=saved(tmp_path / "own.onnx", text))
        found = culprits_of(session.work(case).prepared, [placed("x", ("relu", 0), scale=0.1)])
    assert found.pairs == ()
    assert found.missing.startswith("onnxruntime does not compute it: ")


def test_responsible_pairs_are_searched_only_if_a_parity_check_fails(session: Session, case: Case) -> None:
    asked = replace(case, tune=TuneRules(trials=3))
    loose, strict = (
        replace(asked, id=str(least), checks=(check_of("parity", min_sqnr_db=least),)) for least in (5, 90)
    )
    assert session.judge(loose, loose.checks[0]).verdict.outcome == "pass"
    assert session.evidence(loose, frozenset({"parity"})).culprits is None
    assert session.evidence(strict, frozenset({"parity"})).culprits is None, "the check is not judged yet"
    verdict = session.judge(strict, strict.checks[0]).verdict
    assert verdict.outcome == "fail"
    assert verdict.headline.endswith("by quantization")
    assert any(section.title.startswith("Noisiest of") for section in verdict.sections)
