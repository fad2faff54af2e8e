"""The table of formats in the documentation is generated from the code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from packaging.version import Version
from tabulate import tabulate

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.onnxruntime.ops import BLOCKED_8, BLOCKED_8_SINCE
from qdqspec.backends.tensorrt import ops as trt_ops
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.quantize.formats import BIAS_FORMAT, FORMATS, RUN_TIME, NumberFormat
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import Consumer, LintTarget, Placement, Site

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "formats.md"
HEAD = ("format", "for", "block", "scale", "zero point", "opset", "TensorRT", "compute capability", "ONNX Runtime CPU",
        "lint rules")  # fmt: skip
TARGETS: tuple[LintTarget, ...] = ("tensorrt-11", "onnxruntime-cpu")


def layer(fmt: NumberFormat) -> Model:
    """A linear layer in a format: activation and weight, or the weight alone."""
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [32, 256 if n == "x" else 64]) for n in ("x", "y")
    ]
    weight = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "linear")
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    model = Model(proto)
    sites = {
        Site(
            tensor="w",
            consumers=(Consumer("linear", 1),),
            format=fmt.name,
            axis=0 if fmt.block else 1,
            weight=True,
        )
    }
    if not fmt.weight_only:
        axis = 1 if fmt.block else None
        sites.add(Site(tensor="x", consumers=(Consumer("linear", 0),), format=fmt.name, axis=axis))
    numbers = Quantizer(model, {"x": TensorRange(-4.0, 4.0)}, symmetric_activations=True)
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


def lint_ids(fmt: NumberFormat, target: LintTarget) -> set[str]:
    return {finding.id for finding in lint_model(layer(fmt), target)}


def rules_of(fmt: NumberFormat) -> str:
    """The lint findings of such a layer that the preferred format of the target does not have."""
    preferred = {"tensorrt-11": "int8", "onnxruntime-cpu": "uint8"}
    found = [
        rule
        for target in TARGETS
        for rule in sorted(lint_ids(fmt, target) - lint_ids(FORMATS[preferred[target]], target))
    ]
    return ", ".join(found) or "-"


def row(fmt: NumberFormat) -> tuple[str, ...]:
    sides = (
        "weights"
        if fmt.weight_only
        else "both" + (", activations in blocks as they come" if fmt.dynamic else "")
    )
    scale = "the model's float type"
    if fmt.two_level:
        scale = "float8e4m3fn a block, times one in the model's float type"
    elif fmt.dynamic:
        scale = "a power of two a block: uint8, exponent plus 127 (E8M0)"
    zero = (
        "none" if fmt.block and fmt.signed else "0" if fmt.signed else "any; 8 here" if fmt.block else "any"
    )
    opset = str(fmt.opset)
    known = trt_ops.FORMATS.get(fmt.name)
    capability, version = ("-", "-") if known is None else (".".join(map(str, part)) for part in known)
    if fmt.name in trt_ops.FORMATS and trt_ops.why_not(fmt.name, (12, 0), (11, 4)):
        capability += ", not 12.x"
    return (
        f"`{fmt.name}`",
        sides,
        str(fmt.block or "-"),
        scale,
        zero,
        opset + (", and domain `trt`" if fmt.dynamic else ""),
        version,
        capability,
        _on_onnxruntime(fmt),
        rules_of(fmt),
    )


def _on_onnxruntime(fmt: NumberFormat) -> str:
    """The support by ONNX Runtime, which is the same for all supported versions."""
    if fmt.name in BLOCKED_8:
        return "from " + ".".join(map(str, BLOCKED_8_SINCE))
    return "yes" if fmt.name in OnnxRuntime().capabilities().formats else "no"


@pytest.fixture(scope="module")
def table() -> str:
    rows = [row(fmt) for name, fmt in FORMATS.items() if name not in (BIAS_FORMAT, RUN_TIME)]
    return tabulate(rows, headers=HEAD, tablefmt="github", disable_numparse=True)


def test_the_table_of_formats_is_the_generated_one(table: str, request: pytest.FixtureRequest) -> None:
    if Version(onnxruntime.__version__) < Version("1.32"):
        pytest.skip("the page states the lint rules that apply with ONNX Runtime 1.32 and newer")
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        before, _, rest = text.partition("<!-- formats -->\n")
        _, _, after = rest.partition("<!-- end -->")
        PAGE.write_text(f"{before}<!-- formats -->\n{table}\n<!-- end -->{after}", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
    assert table in text, "the formats changed; renew the table with --update-golden"
