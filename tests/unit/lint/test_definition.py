"""Lint rules that hold on every target, and the behaviour of ONNX Runtime that they state."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from random_models import runs
from trt_corpus import F32, ROWS, parse

from qdqspec._core.hooks import all_names
from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model

WEIGHT = np.ones((16, 8), np.int8)
INT4 = np.ones((50, 64), np.int8).astype(ml_dtypes.int4)
COLUMNS = "float[4,50] x"
ODD = F32([0.1, np.nan])


def weight(attributes: str, scale: object, zero_point: object = None, stored: np.ndarray = WEIGHT) -> Model:
    """A product with a weight behind a DQ that has these numbers."""
    text = (
        f"v = DequantizeLinear{attributes}(m, s{', z' if zero_point is not None else ''})  y = MatMul(x, v)"
    )
    inputs = COLUMNS if len(stored) == 50 else ROWS
    given = {} if zero_point is None else {"z": np.asarray(zero_point)}
    return parse(inputs, "y", text, m=stored, s=np.asarray(scale, F32), **given)


def activation(attributes: str, scale: object) -> Model:
    text = f"q = QuantizeLinear{attributes}(x, s)  a = DequantizeLinear{attributes}(q, s)  y = Neg(a)"
    return parse(ROWS, "y", text, s=np.asarray(scale, F32))


def filled(*shape: int) -> np.ndarray:
    return np.full(shape, 0.1, F32)


UNFIT = {
    "too few scales": weight("<axis = 0>", filled(15)),
    "scales of another axis": weight("<axis = 1>", filled(16)),
    "no such axis": weight("<axis = 2>", filled(8)),
    "no such negative axis": weight("<axis = -3>", filled(16)),
    "the default axis of a vector": weight("", filled(16), stored=np.ones(16, np.int32)),
    "no scale": weight("", filled(0)),
    "rank without blocks": weight("", filled(1, 1)),
    "one zero point": weight("<axis = 1>", filled(8), np.int8(3)),
    "zero points of one scale": weight("", 0.1, np.zeros(8, np.int8)),
    "zero points of other blocks": weight("<axis = 0, block_size = 4>", filled(4, 8), np.zeros((4, 7), np.int8)),
    "blocks along another axis": weight("<axis = 0, block_size = 32>", filled(50, 2), stored=INT4),
    "blocks of another size": weight("<axis = 0, block_size = 16>", filled(2, 64), stored=INT4),
    "negative blocks": weight("<axis = 0, block_size = -8>", filled(2, 8)),
    "a scalar with blocks": weight("<axis = 0, block_size = 8>", 0.1),
    "a vector with blocks": weight("<axis = 0, block_size = 8>", filled(2)),
    "an activation": activation("<axis = 1>", filled(15)),
}  # fmt: skip
FIT = {
    "each element": weight("<axis = -1>", filled(8), np.zeros(8, np.int8)),
    "an axis that is not used": weight("<axis = 7>", filled(1), np.int8(0)),
    "a short last block": weight("<axis = 0, block_size = 32>", filled(2, 64), stored=INT4),
    "a vector": weight("<axis = 0>", filled(16), stored=np.ones(16, np.int32)),
    "an activation": activation("<axis = 0>", filled(4)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_scale_that_does_not_fit_is_refused_on_every_target(name: str) -> None:
    assert not runs(UNFIT[name])
    for target in all_names("lint_targets"):
        (found, *_) = [f for f in lint_model(UNFIT[name], target) if f.id == "ONX002"]
        assert found.severity == "refused"


@pytest.mark.parametrize("name", FIT)
def test_a_scale_that_fits_is_not_reported(name: str) -> None:
    assert runs(FIT[name])
    for target in all_names("lint_targets"):
        assert not [f for f in lint_model(FIT[name], target) if f.id.startswith("ONX")]


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (weight("<axis = 1>", np.resize(ODD, 8)), 4),
        (weight("", np.inf), 1),
        (weight("", 0), 0),
        (activation("", 0), 1),  # of the Q
        (activation("", np.nan), 2),
    ],
)
def test_scales_without_a_meaning_are_reported(model: Model, count: int) -> None:
    found = [f.message for f in lint_model(model, "onnxruntime-cpu") if f.id == "ONX003"]
    assert sum(int(text.split()[1]) for text in found) == count


def test_unknown_sizes_are_not_judged() -> None:
    text = "q = QuantizeLinear<axis = 1>(x, s)  a = DequantizeLinear<axis = 1>(q, s)  y = Neg(a)"
    model = parse("float[n,m] x", "y", text, s=filled(8))
    assert "ONX002" not in {f.id for f in lint_model(model, "onnxruntime-cpu")}
