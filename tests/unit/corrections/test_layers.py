"""Linear layers as matrices: the product of rows and weights equals the output of the operator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_models import layer_of, linear_model
from onnx_text import outputs_of


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_means_of_windows_times_weights_are_means_of_the_outputs(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rank, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    inputs, made = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    attributes: dict[str, object] = {
        "group": groups,
        "strides": [data.draw(st.integers(1, 2)) for _ in range(rank)],
        "dilations": [data.draw(st.integers(1, 2)) for _ in range(rank)],
    }
    padding = data.draw(st.sampled_from(["", "pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if padding == "pads":
        attributes["pads"] = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    elif padding:
        attributes["auto_pad"] = padding
    if padding.startswith("SAME"):  # which ONNX Runtime refuses with dilations
        attributes["dilations"] = [1] * rank
    weight = random.standard_normal((made, inputs // groups, *kernel)).astype(np.float32)
    model = linear_model("Conv", weight, rank + 2, **attributes)
    x = random.standard_normal((2, inputs, *[7, 6][:rank])).astype(np.float32)
    layer = layer_of(model)
    means = layer.window_means(x)
    assert means is not None
    found = np.einsum("goc,gc->go", layer.matrix(weight), means).reshape(-1)
    (expected,) = outputs_of(model, {"x": x})
    np.testing.assert_allclose(found, expected.mean(axis=(0, *range(2, rank + 2))), atol=1e-5)


@pytest.mark.parametrize(("op", "transposed"), [("MatMul", 0), ("Gemm", 0), ("Gemm", 1)])
def test_rows_times_weights_are_the_outputs(op: str, transposed: int) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 4) if transposed else (4, 3)).astype(np.float32)
    x = random.standard_normal((5, 4)).astype(np.float32)
    model = linear_model(op, weight, 2, **({"transB": transposed} if op == "Gemm" else {}))
    layer = layer_of(model)
    found = layer.rows(x)[:, 0] @ layer.matrix(weight)[0].T
    np.testing.assert_allclose(found, outputs_of(model, {"x": x})[0], atol=1e-5)


def test_inputs_of_another_shape_have_no_rows() -> None:
    product = layer_of(linear_model("MatMul", np.ones((4, 3), np.float32), 2))
    assert product.rows(np.ones((4, 5), np.float32)) is None
    convolution = layer_of(linear_model("Conv", np.ones((2, 4, 1, 1), np.float32), 4))
    other = np.ones((1, 3, 5, 5), np.float32)
    assert convolution.rows(other) is None
    assert convolution.window_means(other) is None
