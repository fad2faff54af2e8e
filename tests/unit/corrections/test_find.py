"""Corrections of a trained model, from calibration to the scheme and back to the float model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from chain_models import image_model
from onnx import numpy_helper
from onnx_text import model_of, outputs_of
from written_cases import digits_case, normal, written_case

from qdqspec.accuracy.corrections import CorrectionTask, numbers
from qdqspec.accuracy.corrections.numbers import widened
from qdqspec.accuracy.corrections.problem import is_gain
from qdqspec.accuracy.evaluator import Powers
from qdqspec.app.preparation.files import write_placement
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.observe import with_outputs
from qdqspec.qdq.chains import find_chains
from qdqspec.qdq.equalize import equalized
from qdqspec.qdq.factors import choose_factors
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import AccuracyRules, QuantizeRules, TuneRules


def prepared(
    session: Session, models: Path, folder: Path, corrections: object, samples: int = 16
) -> Prepared:
    rules = QuantizeRules(corrections=corrections)  # type: ignore[arg-type]
    return session.work(digits_case(models, folder, samples, quantize=rules)).prepared


@pytest.mark.usefixtures("saturates")  # 8-bit weights leave too little to gain
def test_the_correction_of_biases_is_applied(session: Session, models: Path, tmp_path: Path) -> None:
    work = prepared(session, models, tmp_path, ("bias",))
    (gain,) = work.corrections.gains
    assert (gain.name, gain.taken) == ("bias", True)
    assert gain.changed > 4
    assert gain.after_db - gain.before_db >= 0.1
    placement = work.space.resolve(work.space.everything())
    assert any(pair.bias for pair in work.numbers.placed(placement))


@pytest.mark.parametrize(("corrections", "samples"), [("none", 16), ("auto", 3), (("ranges", "bits"), 3)])
def test_without_corrections_weights_are_rounded_to_nearest(
    session: Session, models: Path, tmp_path: Path, corrections: object, samples: int
) -> None:
    work = prepared(session, models, tmp_path, corrections, samples)
    assert work.corrections.gains == ()
    assert ("corrections need 4 calibration samples, and there are 3: none is applied" in work.warnings) is (
        samples == 3 and corrections != "auto"
    )
    placement = work.space.resolve(work.space.everything())
    assert not any(pair.rounding or pair.bias for pair in work.numbers.placed(placement))


@pytest.mark.usefixtures("saturates")
def test_ranges_of_another_method_or_with_a_margin_are_taken_if_other_samples_gain(
    session: Session, models: Path, tmp_path: Path
) -> None:
    work = prepared(session, models, tmp_path, ("ranges",))
    (gain,) = work.corrections.gains
    assert (gain.name, gain.taken) == ("ranges", True)
    assert gain.after_db >= gain.before_db + 0.1
    changed, own = work.corrections.ranges, work.calibrated[1].ranges
    assert len(changed) == gain.changed > 4
    assert all(span != own[tensor] for tensor, span in changed.items())
    placement = work.space.resolve(work.space.everything())
    assert all((work.numbers.params(site).scale > 0).all() for site in placement.ordered)


@pytest.mark.usefixtures("saturates")
@pytest.mark.parametrize("change", [-0.01, 0.0, 0.01])
def test_a_correction_that_lowers_the_metric_of_the_limit_is_not_taken(
    session: Session, models: Path, tmp_path: Path, change: float
) -> None:
    x = np.random.default_rng(0).normal(size=(4, 1, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "labelled.npz", input=x, labels=np.arange(4))
    values = iter([0.9, 0.9 + change])
    case = digits_case(
        models,
        tmp_path,
        16,
        quantize=QuantizeRules(corrections=("bias",)),
        tune=TuneRules(accuracy=AccuracyRules(metric="mine", max_drop=0.01)),
        metrics={"mine": lambda _outputs, _labels: next(values)},
    )
    case = replace(case, inputs=replace(case.inputs, evaluation=tmp_path / "labelled.npz"))
    (gain,) = session.work(case).prepared.corrections.gains
    assert gain.taken is (change >= 0)
    assert bool(session.work(case).prepared.corrections.biases) is gain.taken
    assert next(values, None) is None
    notes = "; ".join(session.work(case).prepared.warnings)
    assert ("they lower mine of everything quantized from 0.9 to 0.89" in notes) is (change < 0)


LOUD = [9, 1, 1, 1]  # noise of the first sample


@pytest.mark.parametrize(
    ("gains", "is_taken"),
    [
        pytest.param([([3.0, -0.5, -0.5, -0.5], LOUD)], False, id="on a single sample"),
        pytest.param([([3.0, 3.0, -0.5, -0.5], LOUD)], True, id="on two samples"),
        pytest.param([(2.0, 10), (0.0, 1)], True, id="of one placement"),
        pytest.param([(10.0, 10), (-0.1, 1)], False, id="of one placement, another loses"),
        pytest.param([(0.05, 10), (0.0, 1)], False, id="too small"),
    ],
)
def test_a_gain_is_on_several_samples_and_no_placement_loses(gains: list[tuple], *, is_taken: bool) -> None:
    after, before = ([errors_of(gain if has else 0.0, noise) for gain, noise in gains] for has in (1, 0))
    assert is_gain(after, before) is is_taken


def errors_of(gain_db: float | list[float], noise: float | list[float]) -> Powers:
    """Errors about 30 dB on each of four samples, with a factor on their noise, after a gain."""
    powers = np.broadcast_to(1e-3 * np.asarray(noise) * 10 ** (-np.asarray(gain_db) / 10), 4)
    return Powers({"y": [(1.0, float(power)) for power in powers]}, 4)


@pytest.mark.parametrize(("bounded", "wider"), [("Relu", True), ("Sigmoid", False)])
def test_ranges_of_bounded_tensors_are_not_changed(bounded: str, wider: bool) -> None:
    """The output of a MaxPool is tied to its input."""
    body = f"y = {bounded} (x)  z = MaxPool <kernel_shape = [1]> (y)"
    model, span = model_of(f"(float[1, 2, 4] x) => (float[1, 2, 4] z) {{ {body} }}"), TensorRange(0.0, 1.0)
    found = widened(model, {"x": span, "y": span, "z": span}, 1.25)
    assert found["x"] == span
    assert found["y"] == found["z"] == (TensorRange(0.0, 1.25) if wider else span)  # tied


@pytest.mark.parametrize(
    ("objective", "least_db", "is_sought"),
    [
        ("coverage", "none", False),
        ("coverage", 10, False),
        ("coverage", 44.0, True),
        ("latency", 44.0, False),
    ],
)
def test_biases_are_corrected_near_a_limit_and_where_nothing_is_timed(
    session: Session, models: Path, tmp_path: Path, objective: Any, least_db: Any, *, is_sought: bool
) -> None:
    work = prepared(session, models, tmp_path, "auto")
    work.case = replace(work.case, tune=replace(work.case.tune, min_sqnr_db=least_db, objective=objective))
    assert ("bias" in {gain.name for gain in work.corrections.gains}) is is_sought


@pytest.mark.usefixtures("saturates")
def test_a_correction_that_fails_does_not_remove_the_others(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=BackendError("the runtime ended"))
    monkeypatch.setattr("qdqspec.accuracy.corrections.numbers.widened", fails)
    work = prepared(session, models, tmp_path, ("ranges", "bias"))
    assert [(gain.name, gain.taken) for gain in work.corrections.gains] == [("bias", True)]
    assert "the correction 'ranges' could not be tried: the runtime ended" in work.warnings


@pytest.mark.usefixtures("saturates")
@pytest.mark.parametrize("spent", [0.2, 0.4])
def test_a_model_whose_first_judgement_takes_a_third_of_the_time_is_not_corrected(
    session: Session, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: float
) -> None:
    """Equalization of a model of 0.4 s a run took 33 of the 60 seconds of its search, of which it may take 9."""
    monkeypatch.setattr(CorrectionTask, "is_over", lambda _, share=1.0: spent > share)
    work = prepared(session, models, tmp_path, ("bias",))
    assert bool(work.corrections.gains) is (spent < 0.3)


def test_an_output_that_is_a_sequence_does_not_prevent_corrections(session: Session, tmp_path: Path) -> None:
    text = """g (float[n,8] x) => (float[n,8] y, seq(float[n,4]) halves) <int64 at = {4}> {
        a = MatMul(x, w)  y = MatMul(a, w)  halves = SplitToSequence<axis = 1>(a, at) }"""
    case = written_case(tmp_path, text, {"x": normal(8, 8)}, w=normal(8, 8, seed=1))
    work = session.work(replace(case, quantize=QuantizeRules(corrections=("ranges",)))).prepared
    assert work.corrections is not None
    assert not any("could not" in warning for warning in work.warnings)


# ---- factors of channels ------------------------------------------------------------------------


FACTORS = 2.0 ** np.array([4, -3, 0, 2])


def with_factors(model: Model) -> Model:
    """The model with the channels of the first convolution scaled by `FACTORS`, and by the inverse in the next one."""
    proto = model.proto
    for tensor, factors in zip(
        proto.graph.initializer, (FACTORS[:, None, None, None], FACTORS, 1 / FACTORS), strict=False
    ):
        values = numpy_helper.to_array(tensor)
        factors = factors[:, None, None] if tensor.name == "c2" else factors
        tensor.CopyFrom(numpy_helper.from_array((values * factors).astype(np.float32), tensor.name))
    return Model(proto)


def observed(model: Model, tensors: object) -> list[dict[str, np.ndarray]]:
    observer = with_outputs(model, tensors)  # type: ignore[arg-type]
    names = [output.name for output in observer.proto.graph.output]
    runs = (outputs_of(observer.proto, {"x": normal(1, 3, 6, 6, seed=seed)}) for seed in range(4))
    return [observer.seen(dict(zip(names, run, strict=True))) for run in runs]


@pytest.mark.parametrize("per_channel", [True, False])
def test_equalized_channels_have_similar_ranges(per_channel: bool) -> None:
    model = with_factors(image_model(3, ["relu"], "conv"))
    weights = {"c0", "c2"} if per_channel else ()
    ((_, change),) = choose_factors(
        model, find_chains(model), lambda each: observed(model, each), per_channel=weights, saturates=False
    )

    def spread(which: Model) -> float:
        largest = np.max([values["t1"].max(axis=(0, 2, 3)) for values in observed(which, ["t1"])], axis=0)
        return float(largest.max() / largest.min())

    assert spread(model) > 16
    assert spread(equalized(model, [change])) < spread(model) / 4


def test_extremes_of_few_samples_alone_do_not_change_factors() -> None:
    """All channels have the same distribution, with rare large values in different channels of each sample."""
    model = image_model(3, ["relu"], "conv", channels=64)
    random = np.random.default_rng(0)
    values = [random.standard_t(3, (1, 64, 6, 6)).astype(np.float32) for _ in range(8)]
    seen = [{"t1": each} for each in values]
    chains, weights = find_chains(model), {"c0", "c2"}
    assert choose_factors(model, chains, lambda _: seen, per_channel=weights, saturates=False) == []


WIDTH = 16
OUTLIERS = """outliers (float[1,8,16] x) => (float[1,8,16] y) {
  n = LayerNormalization(x, gamma, beta)  a = MatMul(n, first)  b = Tanh(a)  y = MatMul(b, second) }"""


def with_outliers(session: Session, folder: Path, names: tuple[str, ...] = ("equalization",)) -> Prepared:
    """A model whose LayerNormalization scales three channels more than the others, with data."""
    gamma = np.ones(WIDTH, np.float32)
    gamma[[2, 7, 11]] = 40
    weights = {"gamma": gamma, "beta": np.zeros(WIDTH, np.float32)}
    weights |= {"first": normal(WIDTH, WIDTH) / gamma[:, None], "second": normal(WIDTH, WIDTH, seed=2) / 4}
    case = written_case(folder, OUTLIERS, {"x": normal(16, 8, WIDTH, seed=1)}, **weights)
    return session.work(replace(case, quantize=QuantizeRules(corrections=names))).prepared


def test_channels_with_outliers_are_equalized(session: Session, tmp_path: Path) -> None:
    work = with_outliers(session, tmp_path)
    (gain,) = work.corrections.gains
    assert (gain.name, gain.changed, gain.taken) == ("equalization", 1, True)
    assert gain.after_db - gain.before_db > 5
    (change,) = work.corrections.equalized
    assert [n for n, exponent in enumerate(change.exponents) if exponent] == [2, 7, 11]
    assert work.numbers.ranges["n"].largest < 10  # 40 times the largest of the others before
    write_placement(work, work.space.resolve(work.space.everything()), tmp_path / "q.onnx")
    made = load_model(tmp_path / "q.onnx")
    assert made.array("gamma").max() < 4
    np.testing.assert_array_equal(Model(strip_qdq(made).proto).array("gamma"), work.given.array("gamma"))


def test_corrected_models_with_other_outputs_are_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = numbers.equalized

    def wrong(model: Model, changes: object) -> Model:
        made = original(model, changes)  # type: ignore[arg-type]
        for tensor in made.proto.graph.initializer:
            if tensor.name == "beta":
                tensor.CopyFrom(numpy_helper.from_array(np.full(WIDTH, 1e-5, np.float32), "beta"))
        return Model(made.proto, path=model.path)

    monkeypatch.setattr(numbers, "equalized", wrong)
    work = with_outliers(session, tmp_path)
    (gain,) = work.corrections.gains
    assert (gain.taken, gain.after_db) == (False, gain.before_db)
    assert work.model is work.folded


@pytest.mark.usefixtures("saturates")
@pytest.mark.parametrize("corrections", ["equalization", "bias"])
def test_a_resumed_search_has_the_corrections_of_the_first_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrections: str
) -> None:
    def case(run: str = "of this test") -> Prepared:
        with Session(root=tmp_path) as other:
            if corrections == "equalization":
                work = with_outliers(other, tmp_path, names=("equalization", "ranges"))
            else:
                work = prepared(other, models, tmp_path, ("bias",))
        work.__dict__["journal_header"] = {"model": run}
        work.keep_corrections(path)
        return work

    def numbers_of(work: Prepared) -> object:
        placement = work.space.resolve(work.space.everything())
        return work.numbers.placed(placement), work.equalized_for(placement), work.corrections.gains

    path = tmp_path / "corrections.json"
    first = case()
    expected = numbers_of(first)
    assert any(gain.taken for gain in first.corrections.gains)
    fails = Mock(side_effect=AssertionError("found anew"))
    monkeypatch.setattr("qdqspec.app.preparation.prepare.find_case_corrections", fails)
    assert numbers_of(case()) == expected
    uses = (("another", ""), ("of this test", "x"))
    for name, damaged in uses if corrections == "equalization" else ():
        other = case(name)
        path.write_text(path.read_text() + damaged)
        with pytest.raises(AssertionError, match="found anew"):
            _ = other.corrections
