from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from qdqspec.accuracy.compare import (
    OutputComparison,
    SampleOutputs,
    SliceComparison,
    Typical,
    class_axis,
    compare_outputs,
    in_common,
    noise_power,
    signal_power,
    typical_of,
)
from qdqspec.checks.parity_text import comparison_sections, number_notes
from qdqspec.errors import DataError
from qdqspec.types import NO_SIGNAL, TensorParity, TopK

finite = st.floats(-1e3, 1e3, width=32)
signals = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=finite)


def parity_of(*pairs: tuple[object, object]) -> TensorParity:
    arrays = [({"y": np.asarray(a)}, {"y": np.asarray(b)}) for a, b in pairs]
    (output,) = compare_outputs(arrays, "evaluation").outputs
    return output


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@given(signals)
def test_equal_outputs_have_infinite_sqnr_and_no_difference(signal: np.ndarray) -> None:
    found = parity_of((signal, signal.copy()))
    assert found.slice_sqnr_db in (None, math.inf)
    assert replace(found, worst_slice=None) == TensorParity(
        name="y",
        sqnr_db=math.inf,
        cosine=pytest.approx(1.0),
        max_abs=0.0,
        max_steps=0.0,
        is_single=signal.size == 1,
        note="" if signal.any() else NO_SIGNAL,
    )


ODD = "NaN or infinite values where the reference has none"


@pytest.mark.parametrize(
    ("tuned", "note"),
    [(f32(1, np.nan), ODD), (f32(1, -np.inf), ODD), (f32(1, 2, 3), "shape [3] instead of [2]")],
)
def test_one_sample_that_cannot_be_compared_gives_the_lowest_figures_and_a_note(
    tuned: np.ndarray, note: str
) -> None:
    found = parity_of((f32(1, 2), f32(1, 2)), (f32(1, 2), tuned), (f32(1, 2), f32(1, 2)))
    figures = (found.sqnr_db, found.cosine, found.max_abs, found.max_steps, found.matches, found.note)
    assert figures == (-math.inf, -1, math.inf, math.inf, False, note)


@pytest.mark.parametrize(
    ("reference", "tuned", "sqnr_db"),
    [
        (f32(1, -np.inf, np.nan), f32(1, -np.inf, np.nan), math.inf),
        (f32(1, -np.inf), f32(1, np.inf), -math.inf),
        (f32(1, -np.inf), f32(1, 0), -math.inf),
        (f32(0, 0), f32(0, 0), math.inf),
        (f32(0, 0), f32(0, 1), -math.inf),
        (f32(1), np.array([1]), -math.inf),
    ],
)
def test_an_sqnr_without_a_finite_value(reference: np.ndarray, tuned: np.ndarray, sqnr_db: float) -> None:
    assert parity_of((reference, tuned)).sqnr_db == sqnr_db


def test_outputs_without_any_number_are_equal_where_both_have_the_same_values() -> None:
    nothing = f32(-np.inf, np.nan)
    found = parity_of((nothing, nothing), (nothing, nothing))
    assert (found.sqnr_db, found.compared, found.matches) == (math.inf, False, True)
    assert "infinite in every sample" in found.note
    assert len([*number_notes([found])]) == 1
    assert len([*number_notes([parity_of((f32(0, 0), f32(0, 0))), parity_of((f32(0, 0), f32(0, 1)))])]) == 1
    other = parity_of((nothing, nothing), (nothing, nothing[::-1]))
    assert (other.sqnr_db, other.matches) == (-math.inf, False)
    assert parity_of((nothing, nothing), (f32(1, 2), f32(1, 2))).sqnr_db == math.inf
    empty = np.zeros((0, 3), np.float32)
    assert parity_of((empty, empty)).matches


def test_figures_of_worked_examples(capfd: pytest.CaptureFixture[str]) -> None:
    one = parity_of((f32(0, 255, -0.0), f32(0, 254.5, 0)))
    assert one.sqnr_db == pytest.approx(10 * math.log10(255**2 / 0.25))
    assert (one.max_abs, one.max_steps) == (0.5, pytest.approx(0.5))
    assert one.cosine == pytest.approx(1.0)
    several = parity_of((f32(10), f32(10)), (f32(10), f32(8)), (f32(-5), f32(-5)))
    assert several.sqnr_db == pytest.approx(10 * math.log10(225 / 4))  # power is summed, not averaged in dB
    assert (several.max_abs, several.max_steps) == (2, pytest.approx(2 / (15 / 255)))
    turned = parity_of((f32(1, 0), f32(1, 0)), (f32(1, 0), f32(0, 1)))
    assert turned.cosine == 0  # the lowest of all samples
    assert capfd.readouterr() == ("", "")  # of Polygraphy


def test_a_mask_is_no_signal_and_must_not_change() -> None:
    given, tuned, other = f32(3, 4, -3.4e38), f32(3, 4.5, -3.4e38), f32(3, 4, -3e38)
    found = parity_of((given, tuned))
    assert found.sqnr_db == pytest.approx(20)
    assert (found.max_abs, found.max_steps) == (0.5, pytest.approx(0.5 / 4 * 255))
    assert found.cosine < 0.9999
    changed = parity_of((given, other))
    assert changed.sqnr_db < -100
    assert changed.cosine < 0.1


def test_a_missing_output_is_a_mismatch_with_a_note() -> None:
    evidence = compare_outputs([({"y": f32(1), "z": f32(1)}, {"y": f32(1)})], "random")
    there, missing = evidence.outputs
    assert (there.matches, missing.matches, missing.sqnr_db) == (True, False, -math.inf)
    assert missing.note == "the tuned model does not give this output"
    assert (evidence.sqnr_db, evidence.samples, evidence.data) == (-200.0, 1, "random")


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_integers_must_be_equal_and_have_an_sqnr_if_no_output_is_a_float(dtype: type) -> None:
    given, changed = np.array([0, 1, 1], dtype), np.array([1, 1, 0], dtype)
    same, other = parity_of((given, given)), parity_of((given, changed))
    assert (same.compared, same.matches, same.note, same.sqnr_db) == (False, True, "", math.inf)
    assert (other.compared, other.matches, other.note) == (False, False, "2 values differ")
    assert other.sqnr_db == pytest.approx(0)
    assert parity_of((given, changed[:1])).sqnr_db == -math.inf
    score = {"score": f32(1)}
    beside = compare_outputs([({"y": given} | score, {"y": changed} | score)], "random")
    assert beside.sqnr_db == 200.0


def test_a_comparison_of_no_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="no evaluation sample"):
        compare_outputs([], "evaluation")


def test_errors_of_quantization_and_of_the_runtime_are_separate() -> None:
    run = SampleOutputs({"y": f32(10, 0)}, tuned={"y": f32(10, 3)}, arithmetic={"y": f32(10, 1)})
    found = compare_outputs([run, run], "evaluation")
    assert found.sqnr_db == pytest.approx(10 * math.log10(100 / 9))
    assert found.quantization[0].sqnr_db == pytest.approx(20)
    assert found.runtime[0].sqnr_db == pytest.approx(10 * math.log10(101 / 4))
    partly = compare_outputs([run, run._replace(arithmetic=None)], "evaluation")
    assert (partly.samples, partly.quantization, partly.runtime) == (2, (), ())


def test_agreement_is_computed_for_outputs_with_class_scores() -> None:
    scores = np.eye(3, dtype=np.float32)
    runs = [({"label": np.array([1]), "y": scores}, {"label": np.array([1]), "y": scores[[1, 0, 2]]})]
    label, y = compare_outputs(runs, "evaluation", [TopK(), TopK(k=2), TopK(k=7)]).outputs
    assert label.agreement == {}
    assert y.agreement == {"top1": pytest.approx(1 / 3), "top2": 1.0}
    # NaN is never best
    assert in_common(np.array([[np.nan, 1.0, 0.0]]), np.array([[-1.0, 2.0, 0.0]]), 1, axis=1) == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_powers_are_summed_over_finite_values_of_the_reference(dtype: type) -> None:
    reference = np.array([[3, np.inf, np.nan], [4, 0, 0]], dtype)
    assert signal_power(reference) == signal_power(np.append(reference, np.finfo(dtype).min)) == 25
    assert noise_power(reference, reference) == 0
    assert noise_power(reference, np.array([[1, np.inf, np.nan], [4, 1, 0]], dtype)) == 5
    assert noise_power(reference, np.array([[1, 7, np.nan], [4, 1, 0]], dtype)) == math.inf
    assert noise_power(reference, np.array([[np.nan, 7, 7], [4, 1, 0]], dtype)) == math.inf
    assert noise_power(reference, np.array([[-np.inf, 7, 7], [4, 1, 0]], dtype)) == math.inf
    assert noise_power(reference, reference[:1]) == noise_power(reference, None) == math.inf


def test_weak_outputs_are_compared_to_the_typical_power_and_range() -> None:
    """The quantization step does not depend on the input, so a weak output has no smaller error."""
    typical = typical_of([{"y": f32(8, -4, 0, 0), "label": np.array([3])}, {"y": f32(0, 0)}])
    assert typical == {"y": Typical(power=80 / 6, low=-4, high=8)}
    weak = OutputComparison(typical=typical)
    weak.add({"y": f32(0, 0)}, {"y": f32(0.1, 0)})
    (found,) = weak.results()
    assert found.sqnr_db == pytest.approx(10 * math.log10(2 * 80 / 6 / 0.01))
    assert found.max_steps == pytest.approx(0.1 / (12 / 255))
    strong = OutputComparison(typical=typical)
    strong.add({"y": f32(100, 0)}, {"y": f32(90, 0)})
    assert strong.results()[0].sqnr_db == pytest.approx(20)


def test_an_output_of_one_number_is_known_as_such():
    """The cosine of one number is 1 or -1 for every error."""
    run = {"one": np.full((1, 1), 2.0), "two": np.ones(2)}
    runs = [(run, {**run, "one": np.full((1, 1), 2.5)})] * 2
    one, two = compare_outputs(runs, "evaluation").outputs
    assert (one.is_single, two.is_single) == (True, False)
    (table, *_) = comparison_sections(compare_outputs(runs, "evaluation"), "Outputs")
    cosines = {row[0]: row[table.headers.index("cosine")] for row in table.rows}
    assert cosines == {"one": "", "two": "1.0000"}


scores = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(2, 8)), elements=st.floats(-9, 9, width=16)
)


@given(scores, st.integers(1, 4), st.randoms(use_true_random=False))
def test_sets_of_the_best_are_compared(reference: np.ndarray, k: int, random) -> None:
    tuned = reference[:, random.sample(range(reference.shape[1]), reference.shape[1])]
    expected = 0
    for ours, theirs in zip(reference, tuned, strict=True):
        best = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in (ours, theirs)]
        expected += len({*best[0]} & {*best[1]})
    assert in_common(reference, tuned, k, axis=1) == expected


@pytest.mark.parametrize(
    ("shape", "top", "axis"),
    [
        ((1, 1000, 1, 1), TopK(k=5), 1),  # squeezenet: what follows the classes is empty
        ((4, 128, 30522), TopK(), 2),
        ((4, 21, 64, 64), TopK(axis=-3), 1),
        ((10,), TopK(), 0),
        ((20, 1), TopK(), None),  # the first axis counts samples, never classes
        ((20, 3), TopK(k=3), None),
        ((), TopK(), None),
    ],
)
def test_where_classes_lie(shape: tuple[int, ...], top: TopK, axis: int | None) -> None:
    assert class_axis(shape, top) == axis


# ---- the worst slice of an output: against a plain computation, and where none is to be reported ----


def in_steps(values: np.ndarray, step: float) -> np.ndarray:
    return (np.rint(values / step) * step).astype(np.float32)


def plain_worst(
    samples: list[tuple[np.ndarray, np.ndarray]], least_values: int, least_share: float
) -> float | None:
    """The lowest SQNR of all slices, computed slice by slice."""
    largest = max(np.abs(r[np.isfinite(r)]).max(initial=0.0) for r, _ in samples)
    found, rank = list[float](), samples[0][0].ndim
    for axis in range(1 if rank > 1 else 0, rank):
        lengths = {reference.shape[axis] for reference, _ in samples}
        if len(lengths) > 1 or lengths <= {0, 1}:
            continue
        for index in range(*lengths):
            parts = [np.stack([each.take(index, axis).ravel() for each in pair]) for pair in samples]
            reference, tuned = np.concatenate(parts, axis=1).astype(np.float64)
            known = np.isfinite(reference)
            reference, tuned = reference[known], tuned[known]
            peak = np.abs(reference).max(initial=0.0)
            if reference.size >= least_values and 0 < peak >= least_share * largest:
                noise = np.square(reference - tuned).sum()
                found.append(10 * math.log10(np.square(reference).sum() / noise) if noise else math.inf)
    return min(found, default=None)


@st.composite
def outputs(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Samples of one rank, of which axes may differ in length, with infinite values that both outputs have."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, max_side=5))
    free = draw(st.sampled_from([None, *range(len(shape))]))
    elements = st.one_of(st.floats(-8, 8, width=16), st.just(-np.inf))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        own = tuple(draw(st.integers(0, 3)) if axis == free else n for axis, n in enumerate(shape))
        reference = draw(hnp.arrays(np.float32, own, elements=elements))
        noise = draw(hnp.arrays(np.float32, own, elements=st.floats(-2, 2, width=16)))
        samples.append((reference, np.asarray(reference + noise)))
    return samples


@given(outputs(), st.integers(1, 20), st.sampled_from([0.0, 1 / 4096, 0.5]))
def test_the_worst_slice_is_that_of_a_plain_computation(
    samples: list[tuple[np.ndarray, np.ndarray]], least_values: int, least_share: float
) -> None:
    compared, largest = SliceComparison(), 0.0
    for reference, tuned in samples:
        finite = np.isfinite(reference)
        own, other = (np.where(finite, values, 0).astype(np.float64) for values in (reference, tuned))
        compared.add(own, own - other, finite)
        largest = max(largest, float(np.abs(own).max(initial=0.0)))
    found = compared.worst(largest, least_values=least_values, least_share=least_share)
    expected = plain_worst(samples, least_values, least_share)
    assert (None if found is None else found.sqnr_db) == (
        None if expected is None else pytest.approx(expected, abs=1e-6)
    )


def no_alarm() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Outputs in which a slice has no SQNR, and nothing is wrong."""
    random = np.random.default_rng(5)
    ordinary = random.normal(size=(1, 8, 32, 32)).astype(np.float32)
    padded = ordinary.copy()
    padded[:, 6:] = 0
    off = ordinary.copy()
    off[:, 3] *= 1e-5
    logits = 12 * np.eye(8, dtype=np.float32)[random.integers(0, 6, size=(32, 32))].transpose(2, 0, 1)[None]
    powers = np.exp(logits)
    classes = powers / powers.sum(axis=1, keepdims=True)  # classes 6 and 7 never occur
    anchors = random.normal(size=(16, 4420, 2)).astype(np.float32)
    anchors[:, 3476] *= np.float32(0.01)  # of a face detector: one place where nothing ever was
    noisy = random.normal(size=ordinary.shape) * 0.01
    found = {"padded channels": padded, "a channel that is off": off}
    pairs = {name: (values, (values + noisy).astype(np.float32)) for name, values in found.items()}
    return {
        **pairs,
        "classes that never occur": (classes, in_steps(classes, 1 / 255)),
        "thousands of anchors": (anchors, in_steps(anchors, 0.02)),
        "a nearly exact output": (ordinary, (ordinary * (1 + 1e-6)).astype(np.float32)),
        "few values": (np.float32([[100, 1, 1]]), np.float32([[100, 2, 0]])),
    }


@pytest.mark.parametrize("name", no_alarm())
def test_slices_without_a_signal_or_without_values_are_not_reported(name: str) -> None:
    reference, tuned = no_alarm()[name]
    comparison = OutputComparison()
    comparison.add({"y": reference}, {"y": tuned})
    assert comparison.results()[0].far_slice() is None
