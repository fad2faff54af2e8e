"""The worst slice of an output: against a plain computation, and where no slice is to be reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqspec.accuracy.compare import OutputComparison, SliceComparison

RANDOM = np.random.default_rng(5)


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
    ordinary = RANDOM.normal(size=(1, 8, 32, 32)).astype(np.float32)
    padded = ordinary.copy()
    padded[:, 6:] = 0
    off = ordinary.copy()
    off[:, 3] *= 1e-5
    logits = 12 * np.eye(8, dtype=np.float32)[RANDOM.integers(0, 6, size=(32, 32))].transpose(2, 0, 1)[None]
    powers = np.exp(logits)
    classes = powers / powers.sum(axis=1, keepdims=True)  # classes 6 and 7 never occur
    anchors = RANDOM.normal(size=(16, 4420, 2)).astype(np.float32)
    anchors[:, 3476] *= np.float32(0.01)  # of a face detector: one place where nothing ever was
    noisy = RANDOM.normal(size=ordinary.shape) * 0.01
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
