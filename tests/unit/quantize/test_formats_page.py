"""The table of formats in the documentation is generated from the code."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from onnx_text import model_of
from packaging.version import Version
from tabulate import tabulate

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.onnxruntime.ops import BLOCKED_8, BLOCKED_8_SINCE
from qdqspec.backends.tensorrt import ops as trt_ops
from qdqspec.graph.model import Model
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS, RUN_TIME, NumberFormat
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Consumer, LintTarget, Placement, Site

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "formats.md"
HEAD = ("format", "for", "block", "scale", "zero point", "opset", "TensorRT", "compute capability", "ONNX Runtime CPU",
        "lint rules")  # fmt: skip
PREFERRED: dict[LintTarget, str] = {"tensorrt-11": "int8", "onnxruntime-cpu": "uint8"}


def layer(fmt: NumberFormat) -> Model:
    """A linear layer in a format: activation and weight, or the weight alone."""
    text = "(float[32,256] x) => (float[32,64] y) { y = MatMul(x, w) }"
    model = model_of(text, w=(256, 64))
    weight_axis = 0 if fmt.block else 1
    sites = {Site(tensor="w", consumers=(Consumer("y", 1),), format=fmt.name, axis=weight_axis, weight=True)}
    if not fmt.weight_only:
        axis = 1 if fmt.block else None
        sites.add(Site(tensor="x", consumers=(Consumer("y", 0),), format=fmt.name, axis=axis))
    numbers = Quantizer(model, {"x": TensorRange(-4.0, 4.0)}, symmetric_activations=True)
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


def rules_of(fmt: NumberFormat) -> str:
    """The lint findings of such a layer that the preferred format of the target does not have."""
    found = []
    for target, preferred in PREFERRED.items():
        own, usual = ({f.id for f in lint_model(layer(each), target)} for each in (fmt, FORMATS[preferred]))
        found += sorted(own - usual)
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
        str(fmt.opset) + (", and domain `trt`" if fmt.dynamic else ""),
        version,
        capability,
        _on_onnxruntime(fmt),
        rules_of(fmt),
    )


def _on_onnxruntime(fmt: NumberFormat) -> str:
    if fmt.name in BLOCKED_8:
        return "from " + ".".join(map(str, BLOCKED_8_SINCE))
    return "yes" if fmt.name in OnnxRuntime().capabilities().formats else "no"


def test_the_table_of_formats_is_the_generated_one(request: pytest.FixtureRequest) -> None:
    if Version(onnxruntime.__version__) < Version("1.32"):
        pytest.skip("the page states the lint rules that apply with ONNX Runtime 1.32 and newer")
    rows = [row(fmt) for name, fmt in FORMATS.items() if name not in (BIAS_FORMAT, RUN_TIME)]
    table = tabulate(rows, headers=HEAD, tablefmt="github", disable_numparse=True)
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        before, _, rest = text.partition("<!-- formats -->\n")
        _, _, after = rest.partition("<!-- end -->")
        PAGE.write_text(f"{before}<!-- formats -->\n{table}\n<!-- end -->{after}", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
    assert table in text, "the formats changed; renew the table with --update-golden"
