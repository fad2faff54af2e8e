from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from arrays import arrays_of
from onnx import TensorProto, numpy_helper

from qdqspec._core.arrays import MOST_SPACED, REDUCTIONS, Feed, Reduction
from qdqspec.errors import DataError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.wire import Parts
from qdqspec.qdq.quantize.calibrate import calibrate
from qdqspec.qdq.quantize.ranges import TensorRange

METHODS = ("max", "percentile", "entropy", "mse", "mean")


def run_on_cpu(parts: Parts) -> Callable[[Feed], Mapping[str, np.ndarray]]:
    session = onnxruntime.InferenceSession(
        parts.proto().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(names, dict(feed)), strict=True))


def model_of(nodes: str, *, kind: str = "float", inputs: str = "x", **constants: float) -> Model:
    ports = ", ".join(f"{kind}[n] {name}" for name in inputs.split())
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g ({ports}) => ({kind}[m] y) {{ {nodes} }}'
    )
    real = np.float16 if kind == "float16" else np.float32
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value, real), name))
    return Model(proto)


def feeds_of(*samples: list[float]) -> Callable[[], Iterator[Feed]]:
    return lambda: iter({"x": np.asarray(sample, np.float32)} for sample in samples)


@pytest.fixture
def absolute() -> Model:
    """x > Neg > n > Abs > y"""
    return model_of("n = Neg(x)  y = Abs(n)")


def test_max_is_over_all_samples_of_inputs_inner_tensors_and_outputs(absolute: Model) -> None:
    found = calibrate(absolute, ["x", "n", "y"], feeds_of([1, 2], [-3, 0.5]), "max", run_on_cpu)
    assert found == {"x": TensorRange(-3, 2), "n": TensorRange(-2, 3), "y": TensorRange(0, 3)}


def test_mean_averages_the_extremes_of_the_samples(absolute: Model) -> None:
    found = calibrate(absolute, ["x", "n", "y"], feeds_of([1, 2], [-3, 1]), "mean", run_on_cpu)
    assert found["x"] == TensorRange(-1.5, 1.5), "the range of a sample includes zero"
    assert found["y"] == TensorRange(0, 3), "an output is never clipped"


def test_ranges_of_graph_inputs_need_no_run(absolute: Model) -> None:
    def refuse(observer: Parts) -> Callable[[Feed], Mapping[str, np.ndarray]]:
        raise AssertionError("nothing to run")

    assert calibrate(absolute, ["x"], feeds_of([1]), "max", refuse) == {"x": TensorRange(0, 1)}


@pytest.mark.parametrize("method", METHODS)
def test_ranges_of_every_method_are_within_those_of_max(models: Path, method: str) -> None:
    model = load_model(models / "digits_resnet.onnx")
    images = arrays_of(models.parent / "data" / "digits_calibration.npz")["input"][:16, None]
    tensors = [tensor for node in model.nodes for tensor in (*node.inputs, *node.outputs)]

    def feeds() -> Iterable[Feed]:
        return ({"input": image} for image in images)

    largest = calibrate(model, tensors, feeds, "max", run_on_cpu)
    chosen = calibrate(model, tensors, feeds, method, run_on_cpu)
    assert chosen.keys() == largest.keys() >= {"input", "logits"}
    assert not chosen.keys() & model.constants.keys()
    for tensor, span in chosen.items():
        assert largest[tensor].low <= span.low <= 0 <= span.high <= largest[tensor].high
    relus = [node.outputs[0] for node in model.nodes if node.op_type == "Relu"]
    assert relus
    assert all(chosen[relu].low == 0 for relu in relus)
    assert (chosen == largest) == (method == "max")


@pytest.mark.parametrize("method", ["percentile", "entropy"])  # one such error outweighs all rounding in mse
def test_one_outlier_in_a_hundred_thousand_values_is_clipped(absolute: Model, method: str) -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    values[0] = 60
    found = calibrate(absolute, ["x", "y"], feeds_of(values[:50_000], values[50_000:]), method, run_on_cpu)
    assert 2.5 < found["x"].high < 25
    assert -6 < found["x"].low < -2.5
    assert found["y"] == TensorRange(0, 60)  # an output is never clipped


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
    assert method in ("max", "mse", "mean") or found["x"] != largest["x"]


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_that_is_always_zero_keeps_an_empty_range(absolute: Model, method: str) -> None:
    assert calibrate(absolute, ["y"], feeds_of([0, 0]), method, run_on_cpu) == {"y": TensorRange(0, 0)}


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_are_not_finite_stay_float_and_are_reported(method: str) -> None:
    """Attention masks contain minus infinity, and random inputs cause roots of negative numbers."""
    model = model_of("root = Sqrt(x)  y = Abs(x)")
    notes: list[str] = []
    found = calibrate(model, ["root", "y"], feeds_of([1], [-1], [4]), method, run_on_cpu, note=notes.append)
    assert found.keys() == {"y"}
    (note,) = notes
    assert note.endswith("in calibration sample 1, as masks are, so left in floating point: 'root'")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("masked", [-np.inf, np.inf, "smallest", "largest", "half"])
def test_masked_scores_stay_float_and_other_tensors_keep_their_ranges(
    method: str, dtype: type, masked: float | str
) -> None:
    limits = np.finfo(dtype)
    values = {"smallest": limits.min, "largest": limits.max, "half": limits.min / 2}
    mask = np.array([0, values.get(str(masked), masked), 0], dtype)
    model = model_of(
        "s = Mul(x, x)  m = Add(s, mask)  y = Clip(m, low, high)",
        kind="float16" if dtype is np.float16 else "float", inputs="x mask", low=-1, high=9,
    )  # fmt: skip
    feeds = [{"x": np.array([1, 2, 3], dtype), "mask": mask}, {"x": np.array([2, 0, 1], dtype), "mask": mask}]
    notes: list[str] = []
    found = calibrate(
        model, ["x", "mask", "s", "m", "y"], lambda: iter(feeds), method, run_on_cpu, note=notes.append
    )
    assert found.keys() == {"x", "s", "y"}
    assert 0 < found["s"].high <= 9
    (note,) = notes
    assert note.endswith("so left in floating point: 'mask', 'm'")


def masked_scores(after: str) -> Model:
    """Scores with a mask added, then other nodes that read them as ``m``."""
    return model_of(f"m = Add(x, mask)  {after}", inputs="x mask")


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("masked", [-1e4, -65504, -1e9])
def test_scores_of_which_8_bits_keep_the_mask_alone_stay_float(masked: float, reduces: bool) -> None:
    mask = np.float32([0, masked, 0, 0])
    feeds = [
        {"x": np.float32([3, -4, 9, -8]) * gain, "mask": mask * hides} for gain, hides in ((1, 0), (0.5, 1))
    ]
    notes: list[str] = []
    run = ReducingRuns if reduces else run_on_cpu
    model = masked_scores("c = Identity(m)  y = Softmax(c)")
    found = calibrate(model, ["x", "m", "c", "y"], lambda: iter(feeds), "max", run, note=notes.append)
    assert found.keys() == {"x", "y"}
    (note,) = notes
    assert note.endswith("so left in floating point: 'c', 'm'")


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(
    ("masked", "op"),
    [(-1000.0, "Softmax"), (-1e4, "Relu"), (0.0, "Softmax")],
    ids=["near", "other reader", "none"],
)
def test_other_scores_keep_their_range(masked: float, op: str, reduces: bool) -> None:
    """Scores up to 9 beside a mask of -1000 are more than a step; other operators compute with sizes."""
    feeds = [{"x": np.float32([3, -4, 9, -8]), "mask": np.float32([0, masked, 0, 0])}]
    run = ReducingRuns if reduces else run_on_cpu
    model = masked_scores(f"y = {op}(m)")
    assert "m" in calibrate(model, ["m"], lambda: iter(feeds), "max", run)


def test_no_sample_is_an_error_not_an_empty_result(absolute: Model) -> None:
    with pytest.raises(DataError, match="no calibration sample"):
        calibrate(absolute, ["y"], feeds_of(), "max", run_on_cpu)


class ReducingRuns:
    """A runner that reduces values, as an engine in its own process does."""

    def __init__(self, parts: Parts) -> None:
        self.run = run_on_cpu(parts)
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

    def run(parts: Parts) -> ReducingRuns:
        opened.append(ReducingRuns(parts))
        return opened[-1]

    found = calibrate(absolute, ["x", "n", "y"], feeds, method, run)
    assert found == calibrate(absolute, ["x", "n", "y"], feeds, method, run_on_cpu)
    assert opened[0].calls == ["extremes"] * 2 + (["spaced"] * 2 if method not in ("max", "mean") else [])


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_has_ranges_as_well(absolute: Model, method: str) -> None:
    """numpy has no such type and does not count it as floating point."""
    absolute.proto.graph.input[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    absolute.proto.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    values = np.array([-3, 2], ml_dtypes.bfloat16)

    def run(parts: Parts) -> Callable[[Feed], Mapping[str, np.ndarray]]:
        return lambda feed: {"y": np.abs(feed["x"])}

    found = calibrate(absolute, ["x", "y"], lambda: iter([{"x": values}]), method, run)
    assert found["y"] == TensorRange(0, 3)
    assert found["x"].low < -2


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
        "no values in 'gate/else_branch' on the calibration data: 2 tensors left in floating point"
    ]
    both = [*samples, {"x": np.float32([-5]), "c": np.array(False)}]
    found = calibrate(model, wanted, lambda: iter(both), "max", run_on_cpu, note=notes.append)
    assert found["gate/then_branch/u"] == TensorRange(-2, 3)
    assert found["e"] == TensorRange(0, 5)
