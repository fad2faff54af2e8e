"""Ranges of tensors: from samples, from files of other tools, and ties between them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto

from qdqspec._core.arrays import MOST_SPACED, REDUCTIONS, Feed, Reduction, evenly_spaced
from qdqspec.errors import DataError
from qdqspec.graph.model import Model
from qdqspec.qdq.calibrate import (
    BINS,
    Histogram,
    _divergences,
    calibrate_with,
    given_ranges,
    mse_range,
    percentile_range,
    read_ranges,
)
from qdqspec.qdq.import_qdq import KeptScales
from qdqspec.qdq.ranges import TensorRange, tie_ranges

METHODS = ("max", "percentile", "entropy", "mse", "mean")


def run_on_cpu(proto: onnx.ModelProto) -> Callable[[Feed], Mapping[str, np.ndarray]]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(names, dict(feed)), strict=True))


def model_of(nodes: str, *, inputs: str = "x") -> Model:
    ports = ", ".join(f"float[n] {name}" for name in inputs.split())
    text = f'<ir_version: 9, opset_import: ["": 17]> g ({ports}) => (float[m] y) {{ {nodes} }}'
    return Model(onnx.parser.parse_model(text))


def calibrate(
    model: Model, tensors: list[str], feeds: object, method: str, run: object, **more: object
) -> dict[str, TensorRange]:
    return calibrate_with(model, tensors, feeds, (method,), run, **more)[method]


def feeds_of(*samples: list[float]) -> Callable[[], Iterator[Feed]]:
    return lambda: iter({"x": np.asarray(sample, np.float32)} for sample in samples)


@pytest.fixture
def absolute() -> Model:
    return model_of("n = Neg(x)  y = Abs(n)")


@pytest.mark.parametrize(
    ("method", "x", "n"),
    [
        ("max", TensorRange(-3, 2), TensorRange(-2, 3)),
        ("mean", TensorRange(-1.5, 1.25), TensorRange(-1.25, 1.5)),  # the range of a sample includes zero
    ],
)
def test_ranges_are_over_all_samples(absolute: Model, method: str, x: TensorRange, n: TensorRange) -> None:
    found = calibrate(absolute, ["x", "n", "y"], feeds_of([1, 2], [-3, 0.5]), method, run_on_cpu)
    assert found == {"x": x, "n": n, "y": TensorRange(0, 3)}


@pytest.mark.parametrize("method", METHODS)
def test_graph_outputs_and_inputs_of_saturating_operators_are_never_clipped(method: str) -> None:
    """One large value among many small ones: clipped in x and n, kept in logits, p, s and y."""
    model = model_of("logits = Neg(x) p = Softmax(logits) n = Neg(p) s = Sigmoid(n) y = Neg(s)")
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    values[0] = -60

    def of(chosen: str) -> dict[str, TensorRange]:
        return calibrate(model, ["x", "logits", "p", "s", "y"], feeds_of(values), chosen, run_on_cpu)

    found, largest = of(method), of("max")
    assert all(found[tensor] == largest[tensor] for tensor in ("logits", "p", "s", "y"))
    if method in ("percentile", "entropy"):  # one such error outweighs all rounding in mse
        assert -25 < found["x"].low < -2.5
        assert 2.5 < found["x"].high < 6


@pytest.mark.parametrize("method", METHODS)
def test_tensors_of_zeros_and_of_bfloat16_have_ranges_as_well(absolute: Model, method: str) -> None:
    """numpy has no such type and does not count it as floating point."""
    for port in (absolute.proto.graph.input[0], absolute.proto.graph.output[0]):
        port.type.tensor_type.elem_type = TensorProto.BFLOAT16

    def run(proto: onnx.ModelProto) -> Callable[[Feed], Mapping[str, np.ndarray]]:
        return lambda feed: {"y": np.abs(feed["x"])}

    for values in ([0, 0], [-3, 2]):
        feeds = [{"x": np.array(values, ml_dtypes.bfloat16)}]
        found = calibrate(absolute, ["x", "y"], lambda feeds=feeds: iter(feeds), method, run)
        assert found["y"] == TensorRange(0, max(map(abs, values)))
        assert (found["x"].low < -2) == any(values)


def test_a_tensor_that_is_not_a_number_in_a_sample_has_no_range(absolute: Model) -> None:
    samples = feeds_of([1, 2], [np.nan, 3])
    assert calibrate(absolute, ["x", "y"], samples, "max", run_on_cpu, note=[].append) == {}


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(
    ("masked", "op", "kept"),
    [
        (-1e4, "Softmax", False),
        (-65504, "Softmax", False),
        (-1e9, "Softmax", False),
        (-1000, "Softmax", True),  # a score of 9 is more than a step beside it
        (-1e4, "Relu", True),  # it computes with sizes
        (0, "Softmax", True),
    ],
)
def test_scores_of_which_8_bits_keep_the_mask_alone_stay_float(
    masked: float, op: str, kept: bool, reduces: bool
) -> None:
    mask = np.float32([0, masked, 0, 0])
    feeds = [
        {"x": np.float32([3, -4, 9, -8]) * gain, "mask": mask * hides} for gain, hides in ((1, 0), (0.5, 1))
    ]
    notes: list[str] = []
    run = ReducingRuns if reduces else run_on_cpu
    model = model_of(f"m = Add(x, mask)  c = Identity(m)  y = {op}(c)", inputs="x mask")
    found = calibrate(model, ["x", "m", "c", "y"], lambda: iter(feeds), "max", run, note=notes.append)
    assert found.keys() == {"x", "y"} | ({"m", "c"} if kept else set())
    assert [note.partition("left in ")[2] for note in notes] == ([] if kept else ["floating point: 'c', 'm'"])


def test_no_sample_is_an_error_not_an_empty_result(absolute: Model) -> None:
    with pytest.raises(DataError, match="no calibration sample"):
        calibrate(absolute, ["y"], feeds_of(), "max", run_on_cpu)


class ReducingRuns:
    """A runner that reduces values, as an engine in its own process does."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.run = run_on_cpu(proto)
        self.calls: list[str] = []

    def __call__(self, feed: Feed) -> Mapping[str, np.ndarray]:
        raise AssertionError

    def reduced(self, feed: Feed, how: Reduction) -> Mapping[str, np.ndarray]:
        self.calls.append(how)
        return {name: REDUCTIONS[how](values) for name, values in self.run(feed).items()}


@pytest.mark.parametrize("method", METHODS)
def test_ranges_are_equal_if_the_runner_reduces_values(absolute: Model, method: str) -> None:
    feeds = feeds_of(np.linspace(-2, 1, 3 * MOST_SPACED).tolist(), [-3, 0.25])
    opened = list[ReducingRuns]()

    def run(proto: onnx.ModelProto) -> ReducingRuns:
        opened.append(ReducingRuns(proto))
        return opened[-1]

    found = calibrate(absolute, ["x", "n", "y"], feeds, method, run)
    assert found == calibrate(absolute, ["x", "n", "y"], feeds, method, run_on_cpu)
    assert opened[0].calls == ["extremes"] * 2 + (["spaced"] * 2 if method not in ("max", "mean") else [])


def test_samples_are_released_before_the_next_is_read(absolute: Model) -> None:
    live = most = 0

    class Sample(dict[str, np.ndarray]):
        def __del__(self) -> None:
            nonlocal live
            live -= 1

    def feeds() -> Iterator[Feed]:
        nonlocal live, most
        for _ in range(5):
            live += 1
            most = max(most, live)
            yield Sample(x=np.ones(3, np.float32))

    calibrate(absolute, ["x", "y"], feeds, "entropy", run_on_cpu)
    assert most <= 2


def test_ranges_in_bodies_are_over_all_samples_and_unexecuted_branches_are_noted() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n] x, bool c) => (float[n] y) {
      [gate] y = If (c) <
        then_branch = yes () => (float[n] t) { u = Neg(x)  t = Relu(u) },
        else_branch = no () => (float[n] e) { u = Abs(x)  e = Identity(u) }
      >
    }"""
    model = Model(onnx.parser.parse_model(text))
    samples = [{"x": np.float32([1, 2]), "c": np.array(True)}, {"x": np.float32([-3]), "c": np.array(True)}]
    notes: list[str] = []
    wanted = ["gate/then_branch/u", "t", "gate/else_branch/u", "e"]
    found = calibrate(model, wanted, lambda: iter(samples), "entropy", run_on_cpu, note=notes.append)
    assert found.keys() == {"gate/then_branch/u", "t"}
    assert found["gate/then_branch/u"].low < -1
    assert notes == [
        "never produced by the calibration data, so left in floating point: 'e', 'gate/else_branch/u'"
    ]
    both = [*samples, {"x": np.float32([-5]), "c": np.array(False)}]
    found = calibrate(model, wanted, lambda: iter(both), "max", run_on_cpu, note=notes.append)
    assert found["gate/then_branch/u"] == TensorRange(-2, 3)
    assert found["e"] == TensorRange(0, 5)


# ---- histograms --------------------------------------------------------------------------------------


def histogram_of(values: np.ndarray) -> Histogram:
    histogram = Histogram(TensorRange(float(values.min()), float(values.max())))
    histogram.add(values)
    return histogram


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), most=st.integers(1, 60))
def test_evenly_spaced_values_are_limited_and_cover_every_axis(shape: list[int], most: int) -> None:
    places = np.indices(shape).reshape(len(shape), *shape)
    found = [evenly_spaced(axis, most) for axis in places]
    assert 1 <= found[0].size <= most
    assert found[0].size == places[0].size or places[0].size > most
    if found[0].size >= shape[-1]:
        assert set(found[-1].tolist()) == set(range(shape[-1]))


def test_the_percentile_range_contains_that_share_of_the_values() -> None:
    values = np.random.default_rng(1).standard_normal(200_000)
    span = percentile_range(histogram_of(values), 99.0)
    inside = ((values >= span.low) & (values <= span.high)).mean()
    assert 0.99 <= inside < 0.992
    assert span.low == pytest.approx(-2.576, abs=0.05)
    assert span.high == pytest.approx(2.576, abs=0.05)


def test_the_mse_range_equals_that_of_a_direct_search() -> None:
    values = np.random.default_rng(2).laplace(size=50_000)
    span = mse_range(histogram_of(values))

    def error(limit: float) -> float:
        step = 2 * limit / 255
        return float(np.mean((np.clip(np.rint(values / step) * step, -limit, limit) - values) ** 2))

    limits = np.linspace(1, np.abs(values).max(), 200)
    assert error(max(-span.low, span.high)) <= min(map(error, limits)) * 1.03


def test_the_entropy_range_equals_that_of_the_published_search() -> None:
    """Prefix sums result in the same divergence for each threshold as the published steps."""
    random = np.random.default_rng(3)
    counts = np.histogram(np.abs(random.laplace(size=3000)), bins=BINS)[0].astype(
        float
    )  # many bins are empty
    fast = _divergences(counts)
    for kept in (128, 129, 500, 1023, 2000, 2047, 2048):
        assert fast[kept] == pytest.approx(published_divergence(counts, kept), rel=1e-9)
    assert np.isinf(fast[:128]).all()


def published_divergence(counts: np.ndarray, kept: int) -> float:
    reference = counts[:kept].copy()
    reference[-1] += counts[kept:].sum()
    candidate = np.zeros(kept)
    for level in range(128):
        part = slice(kept * level // 128, kept * (level + 1) // 128)
        filled = reference[part] > 0
        if filled.any():
            candidate[part][filled] = counts[:kept][part].sum() / filled.sum()
    reference, candidate = reference / reference.sum(), candidate / candidate.sum()
    filled = reference > 0
    if (candidate[filled] == 0).any():
        return float("inf")
    return float((reference[filled] * np.log(reference[filled] / candidate[filled])).sum())


# ---- ranges of a file --------------------------------------------------------------------------------


HEADER = "TRT-100001-EntropyCalibration2"
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)
sizes = st.floats(0, 2.0**90, width=32)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "calibration.cache"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, sizes, max_size=6))
def test_ranges_of_a_cache_and_of_json_are_equal(tmp_path: Path, scales: dict[str, float]):
    lines = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    found = read_ranges(written(tmp_path, "\n".join([HEADER, *lines])))
    assert {name: span.high for name, span in found.items()} == pytest.approx(
        {name: 127 * scale for name, scale in scales.items()}
    )
    again = read_ranges(written(tmp_path, json.dumps({n: [s.low, s.high] for n, s in found.items()})))
    assert again == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TRT-\na: 3c010a14", "line 1 is no header"),
        (f"{HEADER}\na: 3c010a1", "line 2 is not 'tensor: 3c010a14': 'a: 3c010a1'"),
        (f"{HEADER}\na: 7fc00000", "line 2: nan is no largest magnitude"),
        ("[1]", "it is no table of tensors"),
        ('{"a": "six"}', "'a': 'six' is no number"),
        ('{"a": [2, 1]}', "'a': 2 is above 1"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        ("", "cannot be read"),
    ],
)
def test_invalid_values_are_an_error_with_their_place(tmp_path: Path, text: str | bytes, message: str):
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        read_ranges(path)
    assert caught.value.where == str(path)
    assert caught.value.cure


def test_tensors_without_a_range_are_noted_and_an_unrelated_or_missing_file_is_an_error(tmp_path: Path):
    notes: list[str] = []
    path = written(tmp_path, '{"a": 1, "other": 2}')
    assert given_ranges(path, {"a", "b", "c"}, "m.onnx", notes.append) == {"a": TensorRange(-1, 1)}
    assert notes == ["calibration.cache has no scale for these, so they stay in floating point: b, c"]
    with pytest.raises(DataError, match=r"has a scale for no tensor of m\.onnx"):
        given_ranges(path, {"b"}, "m.onnx", notes.append)
    for other, said in (
        (tmp_path / "missing", "cannot be read: No such file"),
        (tmp_path, "this is no file"),
    ):
        with pytest.raises(DataError, match=said):
            read_ranges(other)


# ---- ties --------------------------------------------------------------------------------------------


COPIES = "t = Transpose(x)  r = Reshape(t, shape)  c = Concat(r, b)  y = MaxPool(c)"
JOIN = "a = Transpose(x)  b = MaxPool(x)  y = Concat(a, b)"


@pytest.mark.parametrize(
    ("nodes", "tied", "apart"),
    [
        (COPIES, "x y b", ""),
        (JOIN, "a b x", ""),
        ("y, z = Split(x, sizes)", "x y z", "sizes"),
        ("y, indices = MaxPool(x)", "x y", "indices"),
        ('y = Resize<mode = "nearest">(x)', "x y", ""),
        ('y = Resize<mode = "linear">(x)', "", "x y"),
        ("y = Relu(x)", "", "x y"),
        ("y = AveragePool(x)", "", "x y"),
    ],
)
def test_tensors_with_the_same_values_have_the_union_of_their_ranges(
    nodes: str, tied: str, apart: str
) -> None:
    names = (*tied.split(), *apart.split())
    ranges = {name: TensorRange(-index, 10.0**index) for index, name in enumerate(names)}
    union = TensorRange(1 - len(tied.split()), 10.0 ** (len(tied.split()) - 1)) if tied else None
    expected = {name: union or ranges[name] for name in tied.split()}
    assert tie_ranges(model_of(nodes), ranges) == expected | {name: ranges[name] for name in apart.split()}


def test_kept_ranges_hold_for_copies_too_and_not_for_operands_of_a_concat() -> None:
    nodes = "r = Relu(x)  p = MaxPool(r)  t = Tanh(x)  s = Sin(x)  c = Concat(t, s)  y = Add(p, c)"
    wide, narrow = TensorRange(0.0, 4.0), TensorRange(0.0, 3.0)
    model, ranges = model_of(nodes), dict.fromkeys("rptsc", wide)
    found = KeptScales(ranges={"r": narrow, "t": narrow, "x": narrow}).replace_ranges(model, ranges)
    assert found == ranges | {"r": narrow, "p": narrow, "t": narrow}
    assert tie_ranges(model, found) == ranges | {"r": narrow, "p": narrow}
