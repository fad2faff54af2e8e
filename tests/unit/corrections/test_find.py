"""Corrections of a trained model, from calibration to the scheme and back to the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from chain_models import ChainModel
from onnx import TensorProto, helper

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.corrections import find
from qdqspec.corrections.judge import Errors, Judge
from qdqspec.corrections.ranges import PARTS, _Fit, chosen_ranges, widened
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.save import save_model
from qdqspec.parity.gate import MOST_DB
from qdqspec.placement.edit.insert import insert_qdq
from qdqspec.placement.read.strip import strip_qdq
from qdqspec.placement.scheme.scheme_file import apply_scheme, write_scheme
from qdqspec.preparation.correcting import Correcting
from qdqspec.preparation.files import write_placed, write_placement
from qdqspec.preparation.prepare import Prepared
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange
from qdqspec.rehearsal import Rehearsal
from qdqspec.session import Session
from qdqspec.types import Case, Consumer, Inputs, Placement, QuantizeRules, Site


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(root=tmp_path) as opened:
        yield opened


@pytest.fixture
def seven_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 7 bits on every processor, as on those whose sums of 8-bit products saturate."""
    own = OnnxRuntime.capabilities
    monkeypatch.setattr(
        OnnxRuntime, "capabilities", lambda *given, **more: replace(own(*given, **more), reduce_range=True)
    )


def prepared(
    session: Session, models: Path, folder: Path, corrections: object, samples: int = 16
) -> Prepared:
    model = models / "digits_resnet.onnx"
    data = folder / "calibration.npz"
    np.savez(
        data,
        **{
            load_model(model).inputs[0]: arrays_of(models.parent / "data" / "digits_calibration.npz")[
                "input"
            ][:samples]
        },
    )
    rules = QuantizeRules(corrections=corrections)  # type: ignore[arg-type]
    case = Case(id="default", model=model, inputs=Inputs(calibration=data), quantize=rules)
    return session.work(case).setup.prepared


@pytest.mark.usefixtures("seven_bits")  # 8-bit weights leave too little to gain
@pytest.mark.parametrize("name", ["rounding", "bias"])
def test_corrections_are_applied_written_and_repeated(
    session: Session, models: Path, tmp_path: Path, name: str
) -> None:
    work = prepared(session, models, tmp_path, (name,))
    (gain,) = work.corrections.gains
    assert (gain.name, gain.taken) == (name, True)
    assert gain.changed > 4
    assert gain.after_db - gain.before_db >= 0.1
    placement = work.space.resolve(work.space.everything())
    made = insert_qdq(work.model, placement, work.numbers)
    write_scheme(tmp_path / "scheme.json", placement, work.numbers.placed(placement), "onnxruntime")
    again = apply_scheme(work.given, tmp_path / "scheme.json")
    assert again.proto.SerializeToString() == made.proto.SerializeToString()
    save_model(again.parts, tmp_path / "q.onnx")
    stripped = strip_qdq(load_model(tmp_path / "q.onnx"), work.given)
    original = {t.name: t for t in work.given.proto.graph.initializer}
    assert stripped.proto.graph == work.given.proto.graph
    assert original


@pytest.mark.parametrize(("corrections", "samples"), [("none", 16), ("auto", 3)])
def test_without_corrections_weights_are_rounded_to_nearest(
    session: Session, models: Path, tmp_path: Path, corrections: str, samples: int
) -> None:
    work = prepared(session, models, tmp_path, corrections, samples)
    assert work.corrections.gains == ()
    placement = work.space.resolve(work.space.everything())
    assert not any(pair.rounding or pair.bias for pair in work.numbers.placed(placement))


def test_a_list_of_corrections_with_too_few_samples_is_noted(
    session: Session, models: Path, tmp_path: Path
) -> None:
    work = prepared(session, models, tmp_path, ("ranges", "bits"), 3)
    assert work.corrections.gains == ()
    assert "corrections need 4 calibration samples, and there are 3: none is applied" in work.warnings


@pytest.mark.usefixtures("seven_bits")
def test_ranges_that_other_samples_exceed_are_widened(session: Session, models: Path, tmp_path: Path) -> None:
    work = prepared(session, models, tmp_path, ("margins",))
    (gain,) = work.corrections.gains
    assert (gain.name, gain.taken) == ("margins", True)
    assert gain.after_db >= gain.before_db + 0.1
    wider, own = work.corrections.corrections.ranges, work.numbers.ranges
    assert len(wider) == gain.changed > 4
    inputs = set(work.model.inputs)
    assert not inputs & wider.keys()  # images have the same bounds in all samples
    factors = {span.largest / own[tensor].largest for tensor, span in wider.items()}
    assert len({round(factor, 4) for factor in factors}) == 1
    assert min(factors) > 1.0


def judge_by(totals: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each judgement have the next SQNR, equal for all placements and samples."""

    def errors(judge: Judge, numbers: object, **late: object) -> tuple[Errors, ...]:
        noise = 10 ** (-next(totals) / 10)
        return (Errors(np.tile([1.0, noise], (4, 1, 1))),) * len(judge.placements)

    monkeypatch.setattr(Judge, "errors", errors)
    monkeypatch.setattr(Judge, "compared", lambda judge, numbers, *_: errors(judge, numbers))
    monkeypatch.setattr(find, "JUDGEMENTS", 1e9)


def test_a_margin_with_larger_errors_is_not_used(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(chain([30.0, 30.0], repeat(29.9)), monkeypatch)
    found = prepared(session, models, tmp_path, ("margins",)).corrections
    assert [(gain.name, gain.taken) for gain in found.gains] == [("margins", False)]
    assert not found.corrections.ranges


@pytest.mark.parametrize(("with_own_db", "is_taken"), [(39.0, True), (20.0, False)])
def test_a_margin_is_judged_by_the_mean_noise_with_ranges_of_half_and_of_all_samples(
    session: Session,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    with_own_db: float,
    is_taken: bool,
) -> None:
    # without a margin: of all samples and of half; with one: of half and of all
    judge_by(chain([40.0, 20.0], cycle([25.0, with_own_db])), monkeypatch)
    (gain,) = prepared(session, models, tmp_path, ("margins",)).corrections.gains
    assert gain.taken == is_taken
    assert gain.before_db == pytest.approx(-10 * np.log10((1e-4 + 1e-2) / 2), abs=1e-6)


@pytest.mark.parametrize(
    ("gains_db", "is_taken"), [([3.0, -0.5, -0.5, -0.5], False), ([3.0, 3.0, -0.5, -0.5], True)]
)
def test_a_gain_on_a_single_sample_is_not_enough(
    session: Session,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gains_db: list[float],
    is_taken: bool,
) -> None:
    monkeypatch.setattr(find, "lower_bound_db", lambda *_: 1.0)
    monkeypatch.setattr(Judge, "errors", lambda judge, *_, **__: with_gains(judge, [0.0] * 4))
    monkeypatch.setattr(Judge, "compared", lambda judge, *_: with_gains(judge, gains_db))
    monkeypatch.setattr(find, "JUDGEMENTS", 1e9)
    (gain,) = prepared(session, models, tmp_path, ("rounding",)).corrections.gains
    assert gain.taken == is_taken


def test_a_sample_with_infinite_noise_counts_for_the_others() -> None:
    before, after = (
        Errors(np.array([[[1.0, first]], [[1.0, 1e-3]], [[1.0, 1e-3]]])) for first in (np.inf, 1e-4)
    )
    with np.errstate(divide="ignore"):
        assert after.gains_without_db(before) == pytest.approx([0, MOST_DB + 32.6, MOST_DB + 32.6], abs=0.1)


def with_gains(judge: Judge, gains_db: list[float]) -> tuple[Errors, ...]:
    """Errors about 30 dB with a gain for each sample, the first of which has most of the noise."""
    powers = [
        [[1.0, scale * 10 ** (-(30 + gain) / 10)]] for scale, gain in zip([9, 1, 1, 1], gains_db, strict=True)
    ]
    return (Errors(np.array(powers)),) * len(judge.placements)


@pytest.mark.parametrize("loses", [True, False])
def test_a_correction_with_larger_errors_at_the_first_placement_is_not_used(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, loses: bool
) -> None:
    work = prepared(session, models, tmp_path, ("rounding",))
    everything = work.space.everything()
    first = work.space.resolve(dict(list(everything.items())[:2]))
    judgements = iter(range(99))

    def errors(judge: Judge, *_: object, **late: object) -> tuple[Errors, ...]:
        gained = 2.0 * next(judgements)
        return tuple(
            errors_of(30.0 - gained if loses and placement == first else 20.0 + gained)
            for placement in judge.placements
        )

    monkeypatch.setattr(Judge, "errors", errors)
    monkeypatch.setattr(Judge, "compared", errors)
    monkeypatch.setattr(find, "JUDGEMENTS", 1e9)
    work.judge_corrections_at(first)
    assert [(gain.name, gain.taken) for gain in work.corrections.gains] == [("rounding", not loses)]


def test_units_excluded_by_the_limits_are_not_in_judged_placements(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = prepared(session, models, tmp_path, ("rounding",))
    everything = work.space.everything()
    excluded = frozenset(list(everything)[2:])
    kept = work.space.resolve({unit: everything[unit] for unit in everything if unit not in excluded})
    judged: list[Judge] = []
    monkeypatch.setattr(
        Judge, "errors", lambda judge, *_, **__: judged.append(judge) or (errors_of(20.0),) * 9
    )
    monkeypatch.setattr(find._Search, "attempt", lambda *_: None)
    work.judge_corrections_at(None, excluded)
    assert not work.corrections.gains
    everywhere, *_ = judged[0].placements
    assert everywhere == kept
    weights = {site.tensor for site in kept.sites if site.weight}
    for placement in judged[0].placements:
        assert {site.tensor for site in placement.sites if site.weight} <= weights


@pytest.mark.parametrize("usable", [True, False])
def test_ranges_are_chosen_for_the_first_placement_with_usable_outputs(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, usable: bool
) -> None:
    work = prepared(session, models, tmp_path, ("ranges",))
    chosen_for: list[tuple[int, Placement]] = []

    def errors(judge: Judge, *_: object, **__: object) -> tuple[Errors, ...]:
        everything, *_ = judge.placements
        return tuple(
            errors_of(20.0 if usable and placement != everything else 2.0) for placement in judge.placements
        )

    def chosen(judge: Judge, placement: Placement, *given: object) -> tuple[object, object]:
        chosen_for.append((judge.placements.index(placement), placement))
        options = given[2]
        return options[0], options[0]  # type: ignore[index]

    monkeypatch.setattr(Judge, "errors", errors)
    monkeypatch.setattr(Judge, "compared", lambda judge, *_: errors(judge))
    monkeypatch.setattr(Judge, "dominating", lambda *_: ())
    monkeypatch.setattr(find, "JUDGEMENTS", 1e9)
    monkeypatch.setattr(find, "chosen_ranges", chosen)
    assert not any(gain.taken for gain in work.corrections.gains)
    assert [number for number, _ in chosen_for] == [int(usable)]


def each_of(values: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """The values of each run, as a rehearsal gives them."""
    return lambda runs, adjusted: (values(setting, feed, adjusted) for setting, feed in runs)


@pytest.mark.parametrize(("tails", "bounded"), [(True, False), (False, False), (True, True)])
def test_a_range_with_few_large_values_is_reduced(*, tails: bool, bounded: bool) -> None:
    """A smaller range clips large values, but reduces the steps of many small ones."""
    model = pooled("Sigmoid" if bounded else "Relu")
    edge = ("z", Consumer("", 0))
    small = np.linspace(0.0, 0.5, 200_000)
    value = np.append(small, 1.0 if tails else np.full(400, 1.0))
    site = Site(tensor="y", consumers=(Consumer("", 0),), format="uint8")

    def values(_: object, feed: object, spans: dict[str, TensorRange]) -> dict[object, np.ndarray]:
        step = spans["y"].high / 255
        return {edge: np.minimum(np.round(value / step), 255) * step}

    rehearsal = SimpleNamespace(
        guiding_edges=[edge],
        values_each=each_of(values),
        references=lambda: iter([({}, {edge: value})] * 6),
        switches=SimpleNamespace(setting=lambda placement: placement),
    )
    judge = SimpleNamespace(model=model, rehearsal=lambda numbers, part: (rehearsal, numbers))
    whole = {"y": TensorRange(0.0, 1.0), "z": TensorRange(0.0, 1.0)}
    _, chosen = chosen_ranges(
        judge,  # type: ignore[arg-type]
        Placement(sites=frozenset({site})),
        lambda ranges: ranges,  # type: ignore[arg-type,return-value]
        [("y", "z")],
        [whole],
        seconds=60.0,
    )
    part = chosen["y"].high
    assert chosen["z"].high == part
    assert part in (PARTS if tails and not bounded else (1.0,))


def pooled(op: str) -> Model:
    """An operator, and a MaxPool whose output is tied to its input."""
    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xyz")
    nodes = [
        helper.make_node(op, ["x"], ["y"]),
        helper.make_node("MaxPool", ["y"], ["z"], kernel_shape=[1]),
    ]
    return Model(helper.make_model(helper.make_graph(nodes, "g", [x], [z], value_info=[y])))


@pytest.mark.parametrize(("bounded", "wider"), [("Relu", True), ("Sigmoid", False)])
def test_ranges_of_bounded_tensors_are_not_changed(bounded: str, wider: bool) -> None:
    span = TensorRange(0.0, 1.0)
    found = widened(pooled(bounded), {"x": span, "y": span, "z": span}, 1.25)
    assert found["x"] == span
    assert found["y"] == found["z"] == (TensorRange(0.0, 1.25) if wider else span)  # tied


@pytest.mark.parametrize("kept", ["y", "z"])
def test_ranges_tied_to_an_unchanged_range_are_not_changed(kept: str) -> None:
    span = TensorRange(0.0, 1.0)
    assert set(widened(pooled("Relu"), {"y": span, "z": span}, 1.25, {kept}).values()) == {span}


def test_margins_exclude_inputs_of_linear_operators_if_these_have_larger_errors(
    session: Session, models: Path, tmp_path: Path
) -> None:
    # With 8-bit weights, only the error of the last Gemm would be larger.
    work = prepared(session, models, tmp_path, ("margins",))
    (gain,) = work.corrections.gains
    assert gain.taken
    assert gain.after_db >= gain.before_db + 0.1


def test_a_rehearsal_is_opened_again_only_for_other_weights(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Quantizer] = []
    judged: list[Quantizer] = []

    def opening(self: Judge, numbers: Quantizer, part: str) -> Rehearsal:
        opened.append(numbers)
        return own(self, numbers, part)

    def judging(self: Judge, numbers: Quantizer, *args: object, **more: object) -> tuple[Errors, ...]:
        judged.append(numbers)
        return errors(self, numbers, *args, **more)

    own, errors = Judge._opened, Judge._errors
    monkeypatch.setattr(Judge, "_opened", opening)
    monkeypatch.setattr(Judge, "_errors", judging)
    gains = prepared(session, models, tmp_path, ("margins", "rounding")).corrections.gains
    assert {gain.name for gain in gains} == {"margins", "rounding"}
    assert (len(opened), len(judged) >= 5) == (2, True)
    assert opened[1].corrections.weights


def test_the_time_limit_is_a_multiple_of_the_first_evaluation(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqspec.corrections.find.JUDGEMENTS", 1)
    assert prepared(session, models, tmp_path, "auto").corrections.gains == ()


def test_a_slow_model_is_evaluated_on_fewer_samples(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    errors = Judge._errors

    def counted(self: Judge, *args: object, **more: object) -> tuple[Errors, ...]:
        found = errors(self, *args, **more)  # type: ignore[arg-type]
        judged.extend(len(one.powers) for one in found)
        return found

    monkeypatch.setattr(Judge, "_errors", counted)
    monkeypatch.setattr("qdqspec.corrections.find.LEAST_JUDGEMENTS", 1e9)
    assert prepared(session, models, tmp_path, ("bias",)).corrections.gains
    assert set(judged) == {2}


def errors_of(*noise_db: float) -> Errors:
    """Errors with this SQNR on each sample."""
    return Errors(np.array([[[1.0, 10 ** (-db / 10)]] for db in noise_db]))


def test_placements_without_changed_numbers_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def site(tensor: str, *, weight: bool) -> Site:
        return Site(tensor=tensor, consumers=(Consumer("node", 0),), format="int8", weight=weight)

    weights, activations = site("w", weight=True), site("x", weight=False)
    placements = tuple(
        Placement(sites=frozenset(sites)) for sites in ((weights, activations), (weights,), (activations,))
    )
    judge = Judge(model=None, placements=placements, feeds=list, runtime=None)  # type: ignore[arg-type]
    run: list[Placement] = []

    def judged(
        _: Judge, numbers: object, part: str, some: tuple[Placement, ...], is_enough, least: int, most: int
    ):
        run.extend(some)
        assert most == 12
        found = tuple(errors_of(19.0, 18.5, 19.5, 19.0) for _ in some)
        assert (least, is_enough(found)) == (4, True)
        return found

    monkeypatch.setattr(Judge, "_errors", judged)
    before = (errors_of(*[20.0] * 12),) * 3
    after = judge.compared(None, before, "weights", lambda found: found[0].gain_db(before[0]) < 0)  # type: ignore[arg-type]
    assert run == [placements[0], placements[1]]
    assert [round(one.total_db) for one in after] == [19, 19, 20]
    assert {len(one.powers) for one in after} == {4}
    everything = judge.compared(None, before, None, lambda _: True)  # type: ignore[arg-type]
    assert (len(run), len(everything)) == (5, 3)


def test_a_correction_is_judged_on_as_many_samples_as_the_compared_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the time is over before the first correction, there are errors of two samples only."""
    edge = ("y", Consumer("", 0))
    placement = Placement(
        sites=frozenset({Site(tensor="x", consumers=(Consumer("node", 0),), format="uint8")})
    )
    rehearsal = SimpleNamespace(
        guiding_edges=[edge],
        values_each=each_of(lambda *_: {edge: np.full(4, 1.2)}),
        switches=SimpleNamespace(setting=lambda placement: placement),
        references=lambda: (({}, {edge: np.ones(4)}) for _ in range(6)),
    )
    judge = Judge(model=None, placements=(placement,), feeds=list, runtime=None)  # type: ignore[arg-type]
    monkeypatch.setattr(Judge, "rehearsal", lambda *_: (rehearsal, None))
    before = judge.errors(None, is_late=lambda: True)  # type: ignore[arg-type]
    assert len(before[0].powers) == 2
    lost = []
    after = judge.compared(None, before, None, lambda found: bool(lost.append(found[0].gains_db(before[0]))))  # type: ignore[arg-type]
    assert len(after[0].powers) == 2


@pytest.mark.parametrize(("error", "runs"), [(0.2, 2), (0.05, 6)])
def test_a_range_with_larger_errors_on_the_first_samples_is_rejected_early(error: float, runs: int) -> None:
    edge = ("y", Consumer("", 0))
    ran: list[object] = []

    def values(_: object, feed: object, adjusted: object) -> dict[object, np.ndarray]:
        ran.append((feed, adjusted))
        return {edge: np.full(4, 1 + error)}

    rehearsal = SimpleNamespace(
        guiding_edges=[edge],
        values_each=each_of(values),
        switches=SimpleNamespace(setting=lambda placement: placement),
    )
    judge = SimpleNamespace(placements=["everything"], rehearsal=lambda *_: (rehearsal, {"scales": 1.0}))
    fit = _Fit(judge, "everything", [({}, {edge: np.ones(4)})] * 6)  # type: ignore[arg-type]
    found = fit.errors(None, errors_of(*[20.0] * 6))  # type: ignore[arg-type]
    assert len(ran) == len(found.powers) == runs


def test_ranges_of_activations_come_from_several_methods(
    session: Session, models: Path, tmp_path: Path
) -> None:
    work = prepared(session, models, tmp_path, ("ranges",))
    taken = work.corrections.corrections.ranges
    placement = work.space.resolve(work.space.everything())
    for site in placement.ordered:
        if site.tensor in taken and not site.weight:
            assert (work.numbers.params(site).scale > 0).all()
    assert all(gain.name == "ranges" for gain in work.corrections.gains)
    assert isinstance(work.given.proto, onnx.ModelProto)


def test_ranges_by_all_methods_are_not_observed_where_calibration_took_too_long(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in models whose operators are in loops: each sample takes a second to observe."""
    work = prepared(session, models, tmp_path, ("ranges", "bias"))
    assert work.calibrated
    assert work.calibration_seconds > 0
    work.calibration_seconds = 1e3
    asked = []
    monkeypatch.setattr(Correcting, "_ranges", lambda *given: asked.append(given))
    assert [gain.name for gain in work.corrections.gains] == ["bias"]
    assert not asked


@pytest.mark.usefixtures("seven_bits")
def test_a_correction_that_fails_does_not_remove_the_others(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> object:
        raise BackendError("the runtime ended")

    monkeypatch.setattr(Correcting, "_ranges", fails)
    work = prepared(session, models, tmp_path, ("ranges", "rounding"))
    assert [(gain.name, gain.taken) for gain in work.corrections.gains] == [("rounding", True)]
    assert "the correction 'ranges' could not be tried: the runtime ended" in work.warnings


WIDTH = 16


def with_outliers(
    session: Session,
    folder: Path,
    factor: float = 40.0,
    names: tuple[str, ...] = ("equalization",),
    *,
    is_hidden: bool = False,
) -> Prepared:
    """A model whose LayerNormalization scales three channels more than the others, with data.

    If the gain ``is_hidden``, another layer that cannot be equalized has a large error.
    """
    work = ChainModel(0, [1, 8, WIDTH])
    gamma = np.ones(WIDTH, np.float32)
    gamma[[2, 7, 11]] *= factor
    constants = {"gamma": gamma, "beta": np.zeros(WIDTH, np.float32)}
    for name in ("first", "second"):
        weight = work.random.standard_normal((WIDTH, WIDTH)) / gamma[:, None]
        constants[name] = weight.astype(np.float32)
    constants["second"] *= gamma[:, None] / 4
    work.constants += [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    work.add("LayerNormalization", "x", "gamma", "beta")
    work.add("MatMul", work.now, "first")
    work.add("Tanh")
    work.add("MatMul", work.now, "second")
    if is_hidden:
        factors = np.geomspace(1, 1e4, WIDTH).astype(np.float32)
        weight = work.random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / factors[:, None]
        work.constants += [
            onnx.numpy_helper.from_array(factors, "factors"), onnx.numpy_helper.from_array(weight, "third")
        ]  # fmt: skip
        product = work.add("Mul", work.now, "factors")
        work.add("Abs", product)  # another reader, so that the product's channels have no factors
        work.add("MatMul", product, "third")
    model, data = folder / "outliers.onnx", folder / "data.npz"
    save_model(work.model().proto, model)
    np.savez(data, x=np.random.default_rng(1).standard_normal((16, 8, WIDTH)).astype(np.float32))
    rules = QuantizeRules(corrections=names)
    case = Case(id="default", model=model, inputs=Inputs(calibration=data), quantize=rules)
    return session.work(case).setup.prepared


def with_hard_layers(
    session: Session, folder: Path, *hard: int, names: tuple[str, ...] = ("rounding",)
) -> Prepared:
    """Sixteen linear layers; those of ``hard`` read channels with scales from 1 to 10,000."""
    work = ChainModel(0, [1, 8, WIDTH])
    for number in range(16):
        weight = work.random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
        if number in hard:
            factors = work.random.permutation(np.geomspace(1, 1e4, WIDTH)).astype(np.float32)
            work.constants.append(onnx.numpy_helper.from_array(factors, f"factors{number}"))
            work.add("Mul", work.now, f"factors{number}")
            weight /= factors[:, None]
        work.constants.append(onnx.numpy_helper.from_array(weight, f"weight{number}"))
        work.add("MatMul", work.now, f"weight{number}")
        work.add("Tanh")
    model, data = folder / "hard.onnx", folder / "data.npz"
    save_model(work.model().proto, model)
    np.savez(data, x=np.random.default_rng(1).standard_normal((16, 8, WIDTH)).astype(np.float32))
    rules = QuantizeRules(corrections=names)
    case = Case(id="default", model=model, inputs=Inputs(calibration=data), quantize=rules)
    return session.work(case).setup.prepared


@pytest.mark.parametrize("hard", [(3,), (1, 6)])
def test_gains_are_measured_in_spite_of_a_few_layers_with_large_errors(
    session: Session, tmp_path: Path, hard: tuple[int, ...]
) -> None:
    (gain,) = with_hard_layers(session, tmp_path, *hard).corrections.gains
    assert gain.before_db < find.USABLE_DB
    assert gain.taken


def test_equalization_is_judged_without_units_whose_errors_dominate(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[str, ...]] = []
    original = Judge.dominating

    def dominating(self: Judge, *args: object) -> tuple[str, ...]:
        left.append(original(self, *args))  # type: ignore[arg-type]
        return left[-1]

    monkeypatch.setattr(Judge, "dominating", dominating)
    (gain,) = with_hard_layers(session, tmp_path, 3, names=("equalization",)).corrections.gains
    assert left[0]
    assert gain.taken


def test_nothing_is_judged_if_many_layers_have_large_errors(session: Session, tmp_path: Path) -> None:
    (gain,) = with_hard_layers(session, tmp_path, *range(16)).corrections.gains
    assert gain.before_db < find.USABLE_DB
    assert not gain.taken


@pytest.mark.parametrize("times", [0.0, 1e9])
def test_equalization_that_takes_most_of_the_time_needs_a_large_gain(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    monkeypatch.setattr(find, "EQUALIZING", times)  # how long it takes, in first judgements
    monkeypatch.setattr(find, "LARGE_GAIN", 1.0)  # more than any chain gains
    tried = [gain.name for gain in with_outliers(session, tmp_path).corrections.gains]
    assert tried == ([] if times else ["equalization"])


def test_channels_with_outliers_are_equalized(session: Session, tmp_path: Path) -> None:
    work = with_outliers(session, tmp_path)
    (gain,) = work.corrections.gains
    assert (gain.name, gain.changed, gain.taken) == ("equalization", 1, True)
    assert gain.after_db - gain.before_db > 5
    (change,) = work.corrections.equalized
    assert [n for n, exponent in enumerate(change.exponents) if exponent] == [2, 7, 11]
    assert work.numbers.ranges["t0"].largest < 10  # 40 times the largest of the others before
    placement = work.space.resolve(work.space.everything())
    write_placement(work, placement, tmp_path / "q.onnx")
    write_placed(work, placement, tmp_path / "scheme.json", "onnxruntime")
    save_model(apply_scheme(work.given, tmp_path / "scheme.json").parts, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "q.onnx").read_bytes()
    made = load_model(tmp_path / "q.onnx")
    assert made.array("gamma").max() < 4
    assert strip_qdq(made, work.given).proto == work.given.proto
    np.testing.assert_array_equal(Model(strip_qdq(made).proto).array("gamma"), work.given.array("gamma"))


def test_equalization_that_other_errors_hide_is_judged_at_its_layers(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gain is hidden where a product outside the chain, quantized with outliers, dominates the error."""
    monkeypatch.setattr(Judge, "dominating", lambda *_: ())
    alone: list[Placement] = []
    original = Judge.errors_of

    def errors_of(self: Judge, placement: Placement, numbers: object) -> Errors:
        alone.append(placement)
        return original(self, placement, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(Judge, "errors_of", errors_of)
    work = with_outliers(session, tmp_path, is_hidden=True)
    (gain,) = work.corrections.gains
    assert gain.before_db < find.USABLE_DB
    assert gain.after_db == pytest.approx(gain.before_db, abs=0.5)
    assert gain.taken
    (placement,) = alone
    assert {site.tensor for site in placement.sites} == {"t0", "first"}


def test_a_placement_without_equalized_channels_keeps_its_constants(session: Session, tmp_path: Path) -> None:
    work = with_outliers(session, tmp_path)
    everything = work.space.resolve(work.space.everything())
    second = Placement(sites=frozenset(s for s in everything.sites if s.tensor in ("t2", "second")))
    assert len(second.sites) == 2
    write_placement(work, second, tmp_path / "q.onnx")
    write_placed(work, second, tmp_path / "scheme.json", "onnxruntime")
    made = load_model(tmp_path / "q.onnx")
    assert made.array("gamma").tobytes() == work.given.array("gamma").tobytes()
    assert "equalized" not in (tmp_path / "scheme.json").read_text()


def test_channels_of_similar_ranges_are_not_equalized(session: Session, tmp_path: Path) -> None:
    work = with_outliers(session, tmp_path, factor=1.0)
    assert work.corrections.gains == ()
    assert work.model is work.folded


def test_corrected_models_with_other_outputs_are_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = find.equalized

    def wrong(model: Model, changes: object) -> Model:
        made = original(model, changes)  # type: ignore[arg-type]
        for tensor in made.proto.graph.initializer:
            if tensor.name == "beta":
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(WIDTH, 1e-5, np.float32), "beta"))
        return Model(made.proto, path=model.path)

    monkeypatch.setattr(find, "equalized", wrong)
    work = with_outliers(session, tmp_path)
    (gain,) = work.corrections.gains
    assert (gain.taken, gain.after_db) == (False, gain.before_db)
    assert work.model is work.folded


def numbers_of(work: Prepared) -> object:
    placement = work.space.resolve(work.space.everything())
    return work.numbers.placed(placement), work.equalized_for(placement), work.corrections.gains


@pytest.mark.parametrize("corrections", ["equalization", "bias"])
def test_a_resumed_search_has_the_corrections_of_the_first_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrections: str
) -> None:
    def case() -> Prepared:
        with Session(root=tmp_path) as other:
            if corrections == "equalization":
                return with_outliers(other, tmp_path, names=("equalization", "margins", "rounding", "ranges"))
            return prepared(other, models, tmp_path, ("bias", "rounding"))

    path, run = tmp_path / "corrections.json", {"model": "of this test"}
    first = case()
    first.keep_corrections(path, run)
    expected = numbers_of(first)
    assert any(gain.taken for gain in first.corrections.gains)

    def fails(_: object) -> object:
        raise AssertionError("found anew")

    monkeypatch.setattr(Correcting, "find", fails)
    again = case()
    again.keep_corrections(path, run)
    assert numbers_of(again) == expected
    uses = (({"model": "another"}, ""), (run, "x"))
    for name, damaged in uses if corrections == "equalization" else ():
        other = case()
        other.keep_corrections(path, name)
        path.write_text(path.read_text() + damaged)
        with pytest.raises(AssertionError, match="found anew"):
            _ = other.corrections
