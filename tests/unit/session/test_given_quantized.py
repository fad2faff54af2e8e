"""Models that are given quantized, and scales taken from the quantized models that a search starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_text import model_of, saved
from onnxruntime.quantization import QuantType, quantize_dynamic
from random_models import ranges_for
from written_cases import digits_case

from qdqspec.app.preparation.correcting import without_overflows
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.start import kept_scales
from qdqspec.app.session import Session
from qdqspec.graph.definition import is_quantized
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer, weight_key
from qdqspec.qdq.scheme_file import apply_scheme, read_scheme
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Case, Consumer, PatternRules, Placement, QuantizeRules, Site, TuneRules

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
def given_case(models: Path, tmp_path: Path) -> Case:
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


def test_the_search_starts_from_placement_and_scales_of_the_given_model(
    session: Session, given_case: Case
) -> None:
    plain = session.work(given_case).prepared
    float_model = session.work(given_case).prepared.given.path
    assert float_model is not None
    asked = session.work(
        replace(given_case, model=float_model, tune=TuneRules(start_from=(STATIC,)))
    ).prepared
    everything = plain.space.resolve(plain.space.everything())
    assert plain.start_scales.ranges == asked.start_scales.ranges
    assert len(plain.start_scales.ranges) > 10
    for site in everything.ordered:
        np.testing.assert_array_equal(plain.numbers.params(site).scale, asked.numbers.params(site).scale)


def test_the_model_as_given_is_built_after_the_reference(simulated: Session, given_case: Case) -> None:
    result = simulated.tune(replace(given_case, tune=TuneRules(trials=3)))
    given = [trial for trial in result.trials if trial.phase == "given"]
    assert [trial.number for trial in given] == [1]
    assert given[0].ok
    assert given[0].placement.given
    assert given[0].race is not None
    assert sum("the given model's own placement takes" in text for text in result.evidence.warnings) == 1
    assert "given" in result.latency.ratios or result.search.winner.given


def test_the_model_as_given_may_be_selected_and_is_written_unchanged(
    simulated: Session, given_case: Case
) -> None:
    """The budget ends before the search has other candidates."""
    only_given = replace(given_case, tune=TuneRules(trials=1))
    result = simulated.tune(only_given)
    assert result.search.winner.given
    assert not result.search.unchanged
    assert "the given model's own placement" in result.search.reason
    assert onnx.load(result.model) == onnx.load(STATIC)
    scheme = result.evidence.output / "scheme.json"
    assert read_scheme(scheme).placement.sites == result.search.winner.sites
    again = apply_scheme(load_model(result.evidence.output / "reference.onnx"), scheme)
    assert is_quantized(Model(again.proto))


def test_its_accuracy_is_measured_and_limits_apply_to_it(session: Session, given_case: Case) -> None:
    result = session.tune(replace(given_case, tune=TuneRules(trials=2, min_sqnr_db=200.0)))
    (given,) = (trial for trial in result.trials if trial.placement.given)
    assert given.ok
    assert given.sqnr_db is not None
    assert 10 < given.sqnr_db < 100
    assert result.search.unchanged
    assert any("which misses the limits" in text for text in result.evidence.warnings)


def test_a_given_model_with_excluded_pairs_is_no_candidate(simulated: Session, given_case: Case) -> None:
    denied = replace(given_case, tune=TuneRules(trials=2), patterns=PatternRules(deny=("Conv",)))
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


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    rules = QuantizeRules(corrections="none", calibration="entropy")
    return digits_case(models, tmp_path, 4, quantize=rules)


@pytest.fixture
def trained(session: Session, case: Case, tmp_path: Path) -> tuple[Prepared, Placement, Path]:
    """The model quantized with other ranges than those of the case."""
    own = session.work(replace(case, quantize=QuantizeRules(corrections="none"))).prepared
    placement = own.space.resolve(own.space.everything())
    path = tmp_path / "trained.onnx"
    save_model(insert_qdq(own.model, placement, own.numbers).proto, path)
    return own, placement, path


def started(session: Session, case: Case, path: Path) -> Prepared:
    return session.work(replace(case, tune=TuneRules(start_from=(path,)))).prepared


def test_scales_of_a_quantized_model_are_kept_unless_recalibrated(
    session: Session, case: Case, trained: tuple[Prepared, Placement, Path]
) -> None:
    own, placement, path = trained
    plain, kept = session.work(case).prepared, started(session, case, path)
    again = started(session, replace(case, quantize=replace(case.quantize, scales="recalibrate")), path)
    for site in placement.ordered:
        params = [each.numbers.params(site) for each in (own, kept, plain, again)]
        np.testing.assert_allclose(params[1].scale, params[0].scale, rtol=1e-6)
        assert (params[1].zero_point == params[0].zero_point).all()
        np.testing.assert_array_equal(params[3].scale, params[2].scale)
    activations = [site for site in placement.ordered if not site.weight]
    assert any((plain.numbers.params(s).scale != own.numbers.params(s).scale).any() for s in activations)
    assert any("scales of" in note and "are kept" in note for note in kept.warnings)
    assert not any("scales of" in note for note in started(session, case, case.model).warnings)


def test_overflowing_weights_are_not_kept(trained: tuple[Prepared, Placement, Path], tmp_path: Path) -> None:
    own, placement, _ = trained
    numbers = Quantizer(own.model, ranges_for(own.model), biases=own.space.bias_sources)  # 8 bits
    save_model(insert_qdq(own.model, placement, numbers).proto, tmp_path / "q.onnx")
    notes: list[str] = []
    paths = [tmp_path / "q.onnx", tmp_path / "cache.yaml"]
    kept = kept_scales(own.model, paths, notes.append)
    weights = {weight_key(s) for s in placement.ordered if s.weight and s.format == "int8"}
    assert weights == kept.weights.keys()
    assert not any("overflow" in note for note in notes)
    saturating = Quantizer(own.model, ranges_for(own.model), reduce_range=True)
    fewer = without_overflows(kept.weights, saturating, notes.append)
    assert len(fewer) < len(kept.weights)
    assert any((each > kept.weights[key]).any() for key, each in fewer.items()), "of channels"
    assert any("would overflow" in note for note in notes)


def test_scales_of_a_weight_with_other_values_are_not_kept(tmp_path: Path) -> None:
    """quantize_static quantizes the weight of a Conv before BatchNormalization is folded into it."""
    model = model_of(
        """(float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y)
        <float[4] ones = {1, 1, 1, 1}, float[4] variance = {9, 9, 9, 9}> {
            c = Conv (x, w)
            y = BatchNormalization (c, ones, ones, ones, variance)
        }""",
        w=(4, 4, 1, 1),
    )
    site = Site(tensor="w", consumers=(Consumer("c", 1),), format="int8", axis=0, weight=True)
    placement = Placement(sites=frozenset({site}))
    path, notes = tmp_path / "q.onnx", list[str]()
    save_model(insert_qdq(model, placement, Quantizer(model, {})).proto, path)
    kept = kept_scales(model, [path], notes.append)
    assert kept.weights.keys() == {weight_key(site)}
    assert not kept_scales(fold_weights(model).model, [path], notes.append).weights
    assert "q.onnx: the scales of 1 weight are not kept: they are for other values" in notes[-1]


def test_scales_of_a_weight_with_another_zero_point_are_not_kept(tmp_path: Path) -> None:
    """quantize_static gives a constant of Add uint8 and zero point 0; with 128 the same scale would clip it."""
    quantized = model_of(
        """(float[1, 4] x) => (float[1, 4] y) <float s = {0.02}, uint8 z = {0}, float k = {3.0}> {
            q = QuantizeLinear (k, s, z)
            d = DequantizeLinear (q, s, z)
            y = Add (x, d)
        }"""
    )
    path = tmp_path / "q.onnx"
    onnx.save(quantized.proto, path)
    model = Model(strip_qdq(quantized).proto)
    assert not kept_scales(model, [path], [].append).weights
