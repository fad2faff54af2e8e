"""A model that is given quantized: its float form is the reference, and the model as given is a candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_text import saved
from onnxruntime.quantization import QuantType, quantize_dynamic
from written_cases import digits_case

from qdqspec.app.session import Session
from qdqspec.graph.definition import is_quantized
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.scheme.scheme_file import apply_scheme, read_scheme
from qdqspec.types import Case, PatternRules, QuantizeRules, TuneRules

DATA = Path(__file__).parents[2] / "data"
STATIC = DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
FORMS = {
    "pairs": STATIC,
    "pairs with float weights": DATA / "digits_resnet_qat_qdq.onnx",
    "pairs of constants": DATA / "qdq_conv_polygraphy.onnx",
}
QUIET = ("fake.run_noise=0", "fake.wall_noise=0", "fake.build_noise=0")  # reproducible measurements


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Session]:
    with Session(backend="fake", root=tmp_path, backend_option=QUIET) as opened:
        yield opened


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    case = digits_case(models, tmp_path, 4, quantize=QuantizeRules(corrections="none"))
    return replace(case, model=STATIC)


@pytest.mark.parametrize("form", [*FORMS, "dynamic"])
def test_the_reference_is_the_float_form(session: Session, form: str, models: Path, tmp_path: Path) -> None:
    path = FORMS.get(form, tmp_path / "dynamic.onnx")
    if form == "dynamic":
        quantize_dynamic(models / "digits_resnet.onnx", path, weight_type=QuantType.QUInt8)
    work = session.work(Case(id="default", model=path))
    given = work.prepared.given
    assert not is_quantized(given)
    assert given.where == str(path)
    assert given.sha256 != load_model(path).sha256, "what is known of the model as given holds for another"
    assert given.proto.graph.node == strip_qdq(load_model(path)).proto.graph.node
    assert any("the model is given quantized" in note for note in work.prepared.warnings)


def test_the_search_starts_from_placement_and_scales_of_the_given_model(session: Session, case: Case) -> None:
    plain = session.work(case).prepared
    float_model = session.work(case).prepared.given.path
    assert float_model is not None
    asked = session.work(replace(case, model=float_model, tune=TuneRules(start_from=(STATIC,)))).prepared
    everything = plain.space.resolve(plain.space.everything())
    assert plain.start_scales.ranges == asked.start_scales.ranges
    assert len(plain.start_scales.ranges) > 10
    for site in everything.ordered:
        np.testing.assert_array_equal(plain.numbers.params(site).scale, asked.numbers.params(site).scale)


def test_the_model_as_given_is_built_after_the_reference(simulated: Session, case: Case) -> None:
    result = simulated.tune(replace(case, tune=TuneRules(trials=3)))
    given = [trial for trial in result.trials if trial.phase == "given"]
    assert [trial.number for trial in given] == [1]
    assert given[0].ok
    assert given[0].placement.given
    assert given[0].race is not None
    assert sum("the given model's own placement takes" in text for text in result.evidence.warnings) == 1
    assert "given" in result.latency.ratios or result.search.winner.given


def test_the_model_as_given_may_be_selected_and_is_written_unchanged(simulated: Session, case: Case) -> None:
    """The budget ends before the search has other candidates."""
    only_given = replace(case, tune=TuneRules(trials=1))
    result = simulated.tune(only_given)
    assert result.search.winner.given
    assert not result.search.unchanged
    assert "the given model's own placement" in result.search.reason
    assert onnx.load(result.model) == onnx.load(STATIC)
    scheme = result.evidence.output / "scheme.json"
    assert read_scheme(scheme).placement.sites == result.search.winner.sites
    again = apply_scheme(load_model(result.evidence.output / "reference.onnx"), scheme)
    assert is_quantized(Model(again.proto))


def test_its_accuracy_is_measured_and_limits_apply_to_it(session: Session, case: Case) -> None:
    result = session.tune(replace(case, tune=TuneRules(trials=2, min_sqnr_db=200.0)))
    (given,) = (trial for trial in result.trials if trial.placement.given)
    assert given.ok
    assert given.sqnr_db is not None
    assert 10 < given.sqnr_db < 100
    assert result.search.unchanged
    assert any("which misses the limits" in text for text in result.evidence.warnings)


def test_a_given_model_with_excluded_pairs_is_no_candidate(simulated: Session, case: Case) -> None:
    denied = replace(case, tune=TuneRules(trials=2), patterns=PatternRules(deny=("Conv",)))
    result = simulated.tune(denied)
    assert not any(trial.placement.given for trial in result.trials)
    assert any("the model as given is no candidate" in text for text in result.evidence.warnings)


def test_a_comparison_of_models_takes_the_quantized_one_as_it_is(session: Session, tmp_path: Path) -> None:
    """Without a product, of which 8-bit sums may saturate."""
    text = """g (float[4, 64] x) => (float[4, 64] y) <float s = {0.1}, uint8 z = {128}> {
        q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  y = Relu (d) }"""
    path = saved(tmp_path / "quantized.onnx", text, opset=17, ir_version=8)
    work = session.work(Case(id="default", model=path))
    float_form = work.prepared.given.path
    assert float_form is not None
    assert work.parity_with(path).sqnr_db > 100
    assert work.parity_with(float_form).sqnr_db < 60
