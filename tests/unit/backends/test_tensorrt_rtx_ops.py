"""The formats, labels and placement rules of TensorRT for RTX, by the compute capabilities that engines are for."""

from __future__ import annotations

from itertools import product

import pytest
from graph_text import model_of

from qdqspec.backends.tensorrt_rtx.ops import FORMATS, capabilities
from qdqspec.graph.model import Model
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import QuantizeRules

ADA, BLACKWELL = (8, 9), (12, 0)
ATTENTION = (
    "(float[1,4,32,64] q, float[1,4,64,32] k, float[1,4,32,64] v) => (float[1,4,32,64] y) "
    "{ d = MatMul(q, k)  p = Softmax(d)  a = MatMul(p, v)  y = Sigmoid(a) }"
)


def space_of(model: Model, fmt: str = "int8", compute: tuple[int, int] = BLACKWELL) -> SchemeSpace:
    return SchemeSpace(model, capabilities([compute]), rules=QuantizeRules(format=fmt))


@pytest.mark.parametrize(
    ("compute", "formats"),
    [
        ([(7, 5)], ["int8"]), ([(8, 0)], ["int8", "int4"]), ([(8, 6), BLACKWELL], ["int8", "int4"]),
        ([ADA], ["int8", "fp8", "int4"]), ([ADA, BLACKWELL], ["int8", "fp8", "int4"]),
        ([BLACKWELL], ["int8", "fp8", "int4", "nvfp4"]),
    ],
)  # fmt: skip
def test_formats_are_those_of_all_compute_capabilities(
    compute: list[tuple[int, int]], formats: list[str]
) -> None:
    can = capabilities(compute)
    assert list(can.formats) == formats
    assert can.lacking.keys() == FORMATS.keys() - set(formats)
    if compute == [(8, 6), BLACKWELL]:
        assert can.lacking["fp8"] == "fp8 needs compute capability 8.9, and engines are for 8.6 too"


@pytest.mark.parametrize(
    ("op", "offered"),
    [
        ("MaxPool<kernel_shape=[2,2]>", {("int8", ADA), ("int8", BLACKWELL)}),
        ("AveragePool<kernel_shape=[2,2]>", set()),
        ("GlobalAveragePool", {("int8", BLACKWELL)}),
    ],
)
def test_pooling_is_offered_where_it_has_a_kernel(op: str, offered: set[tuple[str, tuple[int, int]]]) -> None:
    model = model_of(f"(float[1,16,8,8] x) => (float[1,16,H,W] y) {{ t = {op}(x)  y = Sigmoid(t) }}")
    for case in product(("int8", "fp8"), (ADA, BLACKWELL)):
        assert bool(space_of(model, *case).units) == (case in offered)


@pytest.mark.parametrize(
    ("kernel", "fp8"), [((4, 8), True), ((1, 32), True), ((1, 33), False), ((5, 7), False)]
)
def test_kernels_up_to_32_elements_are_offered_in_fp8(kernel: tuple[int, int], fp8: bool) -> None:
    text = "(float[1,32,40,40] x) => (float[1,32,H,W] y) { y = Conv(x, w) }"
    assert bool(space_of(model_of(text, w=(32, 32, *kernel)), "fp8").units) == fp8
    assert space_of(model_of(text, w=(32, 32, *kernel))).units


def test_an_attention_is_quantized_with_its_result() -> None:
    (unit,) = space_of(model_of(ATTENTION)).units
    assert unit.labels == ("fp", "in+out")
    assert {tensor for tensor, _ in unit.edges} == {"q", "k", "p", "v"}
    (weighted,) = space_of(
        model_of("(float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }", w=(64, 64))
    ).units
    assert "in-only" in weighted.labels
