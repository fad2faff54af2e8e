"""What a search starts from: models that are given quantized and their scales, caches, schemes and journals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx_text import model_of, parsed, saved
from onnxruntime.quantization import QuantType, quantize_dynamic
from random_models import floating, ranges_for
from sessions import Open
from written_cases import digits_case

from qdqspec.accuracy.corrections.overflow import without_overflows
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.start import warm_starts as starts_of
from qdqspec.app.session import Session
from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import BackendError, ConfigError, ModelError, StateError
from qdqspec.graph.definition import is_quantized
from qdqspec.graph.fold import fold_batchnorm, fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.search import find_regions
from qdqspec.graph.storage import save_model
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.import_qdq import KeptScales
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer, activation_params, weight_key
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.region_schemes import PatternCache
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.strip import strip_qdq
from qdqspec.search.journal import Journal
from qdqspec.types import Case, Consumer, PatternRules, Placement, QuantizeRules, Site, Trial, TuneRules

DATA = Path(__file__).parents[2] / "data"
STATIC = DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
FORMS = {
    "pairs": STATIC,
    "pairs with float weights": DATA / "digits_resnet_qat_qdq.onnx",
    "pairs of constants": DATA / "qdq_conv_polygraphy.onnx",
}


@pytest.fixture
def given_case(models: Path, tmp_path: Path) -> Case:
    case = digits_case(models, tmp_path, 4, quantize=QuantizeRules(corrections="none"))
    return replace(case, model=STATIC)


def test_a_float_form_that_does_not_build_is_reported_by_the_name_of_the_given_model(
    session: Session, tmp_path: Path
) -> None:
    """The float form is a temporary file, which no longer exists when the message is read."""
    model = parsed(
        """g (float16[1, 4] x) => (float16[1, 2] y) {
            q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
            v = DequantizeLinear(w, t)  y = MatMul(d, v) }""",
        19, ir=9, s=np.float16(0.1), z=np.int8(0), w=np.ones((4, 2), np.int8), t=np.float32(0.1),
    )  # fmt: skip
    onnx.save(model.proto, tmp_path / "mixed.onnx")
    work = session.work(Case(id="default", model=tmp_path / "mixed.onnx"))
    with pytest.raises(BackendError) as caught:
        work.prepared.build_expected()
    assert str(caught.value.where) == str(tmp_path / "mixed.onnx")
    assert "qdqspec lint" in caught.value.cure


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
    asked = started(session, replace(given_case, model=plain.given.path), STATIC)
    everything = plain.space.resolve(plain.space.everything())
    assert plain.start_scales.ranges == asked.start_scales.ranges
    assert len(plain.start_scales.ranges) > 10
    for site in everything.ordered:
        np.testing.assert_array_equal(plain.numbers.params(site).scale, asked.numbers.params(site).scale)


def test_the_model_as_given_is_built_after_the_reference(open_session: Open, given_case: Case) -> None:
    result = open_session().tune(replace(given_case, tune=TuneRules(trials=3)))
    (given,) = (trial for trial in result.trials if trial.phase == "given")
    assert (given.number, given.ok, given.placement.given) == (1, True, True)
    assert given.race is not None
    assert sum("the given model's own placement takes" in text for text in result.evidence.warnings) == 1
    assert "given" in result.latency.ratios or result.search.winner.given


def test_the_model_as_given_may_be_selected_and_is_written_unchanged(
    open_session: Open, given_case: Case
) -> None:
    """The budget ends before the search has other candidates."""
    result = open_session().tune(replace(given_case, tune=TuneRules(trials=1)))
    assert result.search.winner.given
    assert not result.search.unchanged
    assert "the given model's own placement" in result.search.reason
    assert onnx.load(result.model) == onnx.load(STATIC)
    scheme = result.evidence.output / "scheme.json"
    assert SchemeFile.read(scheme).placement.sites == result.search.winner.sites
    again = SchemeFile.read(scheme).apply(load_model(result.evidence.output / "reference.onnx"))
    assert is_quantized(Model(again.proto))


def test_its_accuracy_is_measured_and_limits_apply_to_it(session: Session, given_case: Case) -> None:
    result = session.tune(replace(given_case, tune=TuneRules(trials=2, min_sqnr_db=200.0)))
    (given,) = (trial for trial in result.trials if trial.placement.given)
    assert 10 < given.sqnr_db < 100
    assert result.search.unchanged
    assert any("which misses the limits" in text for text in result.evidence.warnings)


def test_a_given_model_with_excluded_pairs_is_no_candidate(open_session: Open, given_case: Case) -> None:
    denied = PatternRules(deny=("Conv",))
    result = open_session().tune(replace(given_case, tune=TuneRules(trials=2), patterns=denied))
    assert not any(trial.placement.given for trial in result.trials)
    assert any("the model as given is no candidate" in text for text in result.evidence.warnings)


def test_a_comparison_of_models_takes_the_quantized_one_as_it_is(session: Session, tmp_path: Path) -> None:
    """Without a product, of which 8-bit sums may saturate."""
    text = """g (float[4, 64] x) => (float[4, 64] y) <float s = {0.1}, uint8 z = {128}> {
        q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  y = Relu (d) }"""
    path = saved(tmp_path / "quantized.onnx", text, opset=17, ir_version=8)
    work = session.work(Case(id="default", model=path))
    assert work.parity_with(path).sqnr_db > 100
    assert work.parity_with(work.prepared.given.path).sqnr_db < 60


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


def test_the_cached_winner_of_other_kept_scales_is_not_used(
    open_session: Open, case: Case, trained: tuple[Prepared, Placement, Path]
) -> None:
    """A model that is trained again is written to the same path."""
    own, placement, path = trained
    before = started(open_session(), case, path).key
    numbers = Quantizer(own.model, ranges_for(own.model), biases=own.space.bias_sources)
    save_model(insert_qdq(own.model, placement, numbers).proto, path)
    assert started(open_session(), case, path).key != before
    again = replace(case, quantize=replace(case.quantize, scales="recalibrate"))
    assert started(open_session(), again, path).key == started(open_session(), again, path).key


def test_overflowing_weights_are_not_kept(trained: tuple[Prepared, Placement, Path], tmp_path: Path) -> None:
    own, placement, _ = trained
    numbers = Quantizer(own.model, ranges_for(own.model), biases=own.space.bias_sources)  # 8 bits
    save_model(insert_qdq(own.model, placement, numbers).proto, tmp_path / "q.onnx")
    notes: list[str] = []
    paths = [tmp_path / "q.onnx", tmp_path / "cache.yaml"]
    kept = KeptScales.read(own.model, paths, notes.append)
    weights = {weight_key(s) for s in placement.ordered if s.weight and s.format == "int8"}
    assert weights == kept.weights.keys()
    assert not any("overflow" in note for note in notes)
    saturating = Quantizer(own.model, ranges_for(own.model), reduce_range=True)
    fewer = without_overflows(kept.weights, saturating, notes.append)
    assert len(fewer) < len(kept.weights)
    assert any((each > kept.weights[key]).any() for key, each in fewer.items()), "of channels"
    assert any("would overflow" in note for note in notes)


def test_scales_of_a_weight_with_other_values_or_another_zero_point_are_not_kept(tmp_path: Path) -> None:
    """quantize_static quantizes the weight of a Conv before BatchNormalization is folded into it.

    It gives a constant of Add uint8 and zero point 0; with 128 the same scale would clip it.
    """
    text = """(float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y)
        <float[4] ones = {1, 1, 1, 1}, float[4] variance = {9, 9, 9, 9}> {
            c = Conv (x, w)  y = BatchNormalization (c, ones, ones, ones, variance) }"""
    model = model_of(text, w=(4, 4, 1, 1))
    site = Site(tensor="w", consumers=(Consumer("c", 1),), format="int8", axis=0, weight=True)
    placement = Placement(sites=frozenset({site}))
    path, notes = tmp_path / "q.onnx", list[str]()
    save_model(insert_qdq(model, placement, Quantizer(model, {})).proto, path)
    kept = KeptScales.read(model, [path], notes.append)
    assert kept.weights.keys() == {weight_key(site)}
    assert not KeptScales.read(fold_weights(model).model, [path], notes.append).weights
    assert "q.onnx: the scales of 1 weight are not kept: they are for other values" in notes[-1]
    text = """(float[1, 4] x) => (float[1, 4] y) <float s = {0.02}, uint8 z = {0}, float k = {3.0}> {
        q = QuantizeLinear (k, s, z)  d = DequantizeLinear (q, s, z)  y = Add (x, d) }"""
    quantized = model_of(text)
    onnx.save(quantized.proto, path)
    assert not KeptScales.read(Model(strip_qdq(quantized).proto), [path], [].append).weights


# ---- placements in files --------------------------------------------------------------------------

HERE = ("onnxruntime-cpu", "this-machine")


@pytest.fixture
def space(models: Path) -> SchemeSpace:
    model = fold_batchnorm(load_model(models / "digits_resnet.onnx")).model
    return SchemeSpace(model, backend().capabilities(), regions=find_regions(model))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def start(space: SchemeSpace, notes: list[str]) -> SimpleNamespace:
    """The used part of a prepared case."""
    backend, resources = SimpleNamespace(target=HERE[0]), SimpleNamespace(device=SimpleNamespace(key=HERE[1]))
    return SimpleNamespace(space=space, backend=backend, resources=resources, note_once=notes.append)


def warm_starts(paths: Sequence[Path], start: SimpleNamespace) -> tuple[Placement, ...]:
    start.case = Case(id="default", model=Path("net.onnx"), tune=TuneRules(start_from=tuple(paths)))
    return starts_of(start)


@pytest.fixture
def half(space: SchemeSpace) -> Placement:
    """A placement with some quantized units, which is no pure labelling."""
    return space.resolve({unit.id: unit.full for unit in space.units[:9]})


def numbers(space: SchemeSpace) -> Quantizer:
    return Quantizer(space.model, ranges_for(space.model), biases=space.bias_sources)


def cache_at(path: Path, space: SchemeSpace, placement: Placement, target: str = HERE[0]) -> Path:
    trial = Trial(number=0, phase="pure", placement=placement, ratio=0.5)
    path.write_text(PatternCache.gather([trial], space, target, HERE[1]).text())
    return path


@pytest.mark.parametrize("weights", ["integer", "float"])
def test_a_quantized_model_is_a_warm_start_with_its_placement(
    start: SimpleNamespace, half: Placement, tmp_path: Path, weights: str
) -> None:
    """Another tool gives its pairs other names."""
    path, given = tmp_path / "tuned.onnx", floating(half.sites, weights)
    proto = insert_qdq(start.space.model, half, numbers(start.space), floating=given).proto
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.name = f"another_tool/{node.name}"
    save_model(proto, path)
    (found,) = warm_starts([path], start)
    assert found == half
    assert found.labels == half.labels


def test_pairs_of_a_start_that_no_label_has_are_noted(
    start: SimpleNamespace, notes: list[str], half: Placement, tmp_path: Path
) -> None:
    """A weight without its input."""
    path, alone = tmp_path / "tuned.onnx", start.space.units[-1].forms[0].constants[0]
    for more in ([], [alone]):
        placement = Placement(sites=half.sites.union(more))
        save_model(insert_qdq(start.space.model, placement, numbers(start.space)).proto, path)
        assert warm_starts([path], start) == (half,)
        assert [f"1: '{alone.tensor}': the search has no labels" in note for note in notes] == [True] * len(
            more
        )


def test_placements_of_files_are_ordered_and_distinct(
    start: SimpleNamespace, half: Placement, tmp_path: Path
) -> None:
    everything = start.space.resolve(start.space.everything())
    scheme = tmp_path / "scheme.json"
    SchemeFile(backend=HERE[0], pairs=numbers(start.space).placed(half)).write(scheme)
    cache = cache_at(tmp_path / "patterns.yml", start.space, everything)
    same = cache_at(tmp_path / "same.yaml", start.space, half)
    assert warm_starts([scheme, cache, same, scheme], start) == (half, everything)


def test_another_model_is_noted(
    start: SimpleNamespace, notes: list[str], models: Path, tmp_path: Path
) -> None:
    model = load_model(models / "squeezenet10.onnx")
    other = SchemeSpace(model, backend().capabilities(), regions=find_regions(model))
    path = cache_at(tmp_path / "patterns.yaml", other, other.resolve(other.everything()))
    assert warm_starts([path, models / "digits_resnet.onnx"], start) == ()
    assert notes[0] == "patterns.yaml contains no placement for this model"
    assert "digits_resnet.onnx contains no placement for this model" in notes


def test_files_of_another_backend_are_an_error(
    start: SimpleNamespace, half: Placement, tmp_path: Path
) -> None:
    scheme = tmp_path / "scheme.json"
    SchemeFile(backend="tensorrt-10", pairs=numbers(start.space).placed(half)).write(scheme)
    cache = cache_at(tmp_path / "patterns.yaml", start.space, half, "tensorrt-10")
    trial = Trial(number=0, phase="pure", placement=half, ratio=1.0, incumbent=True)
    journal = journal_at(tmp_path / "trials.jsonl", [trial], backend="tensorrt-10")
    for path in (scheme, cache, journal):
        with pytest.raises(StateError, match=r"made on tensorrt-10, not on onnxruntime-cpu") as caught:
            warm_starts([path], start)
        assert caught.value.where == str(path)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.jsonl", "a.onnx", "a.txt"])
def test_missing_damaged_and_other_files_are_an_error_with_the_path(
    start: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    error = {".onnx": ModelError, ".txt": ConfigError}.get(Path(name).suffix, StateError)
    for write in (lambda _: None, lambda path: path.write_bytes(b"\x00\x01{[")):
        write(tmp_path / name)
        with pytest.raises(error, match=name):
            warm_starts([tmp_path / name], start)


# ---- journals -----------------------------------------------------------------------------------


def journal_at(path: Path, trials: Sequence[Trial], backend: str = HERE[0]) -> Path:
    with Journal.open(path, {"backend": backend, "device": HERE[1]}) as journal:
        for trial in trials:
            journal.append(trial)
    return path


@pytest.fixture
def searched(start: SimpleNamespace, half: Placement) -> list[Trial]:
    """A search with the winner ``half``, whose confirmation found full quantization faster."""
    space = start.space
    reference, everything = space.resolve({}), space.resolve(space.everything())
    return [
        Trial(number=0, phase="pure", placement=reference, ratio=1.0, incumbent=True),
        Trial(number=1, phase="pure", placement=everything, ratio=0.6, incumbent=True),
        Trial(number=2, phase="refine", placement=half, ratio=0.5, incumbent=True),
        Trial(number=3, phase="confirm", placement=reference, ratio=1.0),
        Trial(number=4, phase="confirm", placement=half, ratio=0.59),
        Trial(number=5, phase="confirm", placement=everything, ratio=0.58),
    ]


def test_a_journal_is_a_warm_start_with_the_fastest_confirmed_placement(
    start: SimpleNamespace, searched: list[Trial], half: Placement, tmp_path: Path
) -> None:
    everything = searched[1].placement
    path = journal_at(tmp_path / "trials.jsonl", searched)
    before = path.read_bytes()
    assert warm_starts([path], start) == (everything, half)
    assert path.read_bytes() == before
    unfinished = journal_at(tmp_path / "unfinished.jsonl", searched[:3])
    unfinished.write_bytes(unfinished.read_bytes() + b'{"trial": 3, "pha')  # an incomplete line
    assert warm_starts([unfinished], start) == (half, everything)


def test_scales_of_smoothed_activations_and_weights_are_not_kept(tmp_path: Path) -> None:
    """As of SmoothQuant, which divides the data before a layer by the factors that its weight is multiplied by."""
    weight = np.array([[1, -2, 0.5], [4, 0.25, 1]], np.float32)
    ends = "g (float[2,2] x) => (float[2,3] y)"
    model = parsed(f"{ends} {{ [t] t = Tanh(x)  [m] y = MatMul(t, w) }}", 13, w=weight)
    factors = np.array([0.05, 2], np.float32)
    scaled = weight / factors[:, None]
    step = np.float32(np.abs(scaled).max() / 127)
    quantized = parsed(
        f"""{ends} {{ [t] t = Tanh(x)  [smooth] z = Mul(t, f)  q = QuantizeLinear(z, s)
            d = DequantizeLinear(q, s)  e = DequantizeLinear(i, v)  [m] y = MatMul(d, e) }}""",
        13,
        f=factors, s=np.float32(0.01), v=step, i=np.rint(scaled / step).astype(np.int8),
    )  # fmt: skip
    save_model(quantized.proto, tmp_path / "q.onnx")
    notes: list[str] = []
    kept = KeptScales.read(model, [tmp_path / "q.onnx"], notes.append)
    assert (kept.ranges, kept.weights) == ({}, {})
    assert ["1 weight are not kept" in notes[0], "1 activation are not kept" in notes[1]] == [True, True]


@pytest.mark.parametrize(("factor", "is_kept"), [(1.3, False), (1.01, True), (0.8, True)])
def test_scales_that_would_clip_a_weight_are_not_kept(tmp_path: Path, factor: float, is_kept: bool) -> None:
    """As those of a weight that a BatchNormalization enlarges a little."""
    text = "g (float[2,4] x) => (float[2,4] y) { [m] y = MatMul(x, w) }"
    model = parsed(text, 13, w=(4, 4))
    site = Site(tensor="w", consumers=(Consumer("m", 1),), format="int8", weight=True)
    placement = Placement(sites=frozenset({site}))
    save_model(insert_qdq(model, placement, Quantizer(model, {})).proto, tmp_path / "q.onnx")
    larger = parsed(text, 13, w=(model.array("w") * factor).astype(np.float32))
    assert bool(KeptScales.read(larger, [tmp_path / "q.onnx"], lambda _: None).weights) == is_kept


def test_a_scale_that_is_computed_when_the_model_runs_is_not_kept(tmp_path: Path) -> None:
    model = parsed("g (float[2,4] x) => (float[2,4] y) { [m] y = MatMul(x, w) }", 13, w=(4, 4))
    save_model(model.proto, tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "q.onnx")
    kept = KeptScales.read(model, [tmp_path / "q.onnx"], lambda _: None)
    assert ([*kept.ranges], [tensor for tensor, _, _ in kept.weights]) == ([], ["w"])


@pytest.mark.parametrize("swapped", [False, True])
def test_scales_of_each_format_of_a_tensor_are_kept(tmp_path: Path, *, swapped: bool) -> None:
    """As where a tool joins layers of 8 and of 16 bits; the range of one format gives the other its own no more."""
    low, high = -2.005, 0.493
    numbers = {
        name: (np.float32((high - low) / steps), np.dtype(name).type(np.rint(-low / ((high - low) / steps))))
        for name, steps in (("uint8", 255), ("uint16", 65535))
    } | {"int8": (np.float32(0.0123), np.int8(0))}
    ends = "g (float[2,4] x) => (float[2,4] a, float[2,4] b, float[2,4] c)"
    tail = "a = MatMul({}, w)  b = MatMul({}, w)  c = MatMul({}, w)"
    model = parsed(f"{ends} {{ t = Tanh(x)  {tail.format('t', 't', 't')} }}", 21, w=(4, 4))
    chain = """t = Tanh(x)  p = QuantizeLinear(t, s, z)  d = DequantizeLinear(p, s, z)
        q = QuantizeLinear(d, u, y)  e = DequantizeLinear(q, u, y)
        r = QuantizeLinear(t, v, o)  f = DequantizeLinear(r, v, o) """
    readers = ("e", "d", "f") if swapped else ("f", "d", "e")
    given = dict(zip("szuyvo", (each for pair in numbers.values() for each in pair), strict=True))
    quantized = parsed(f"{ends} {{ {chain} {tail.format(*readers)} }}", 21, w=model.array("w"), **given)
    save_model(quantized.proto, tmp_path / "q.onnx")
    quantizer = Quantizer(model, KeptScales.read(model, [tmp_path / "q.onnx"], lambda _: None).ranges)
    for name, (scale, zero_point) in numbers.items():
        params = quantizer.params(Site(tensor="t", consumers=(Consumer("MatMul#1", 0),), format=name))
        assert (params.scale, params.zero_point) == (scale, zero_point), name


def test_numbers_that_are_kept_follow_the_rules_of_a_target() -> None:
    """Zero points of other values than its own are not kept; ranges of copies that differ share no numbers."""
    kept = (("uint8", 0.5, 100), ("int8", 0.5, 3))
    span = TensorRange(-50.0, 77.5, kept)
    assert activation_params(span, number_format("uint8")).zero_point == 100
    assert activation_params(span, number_format("uint8"), symmetric=True).zero_point == 128
    assert activation_params(span, number_format("int8")).zero_point == 3
    assert activation_params(span, number_format("int8"), symmetric=True).zero_point == 0
    assert span.union(TensorRange(-50.0, 77.5, kept[:1])).kept == kept[:1]
    assert span.union(TensorRange(-50.0, 80.0, kept)) == TensorRange(-50.0, 80.0)
