"""The table of number formats in docs/how-to/formats.md, from the code. ``python tools/formats_page.py`` renews it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
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

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "formats.md"
_HEAD = ("format", "for", "block", "scale", "zero point", "opset", "TensorRT", "compute capability",
         "ONNX Runtime CPU", "lint rules")  # fmt: skip
_PREFERRED: dict[LintTarget, str] = {"tensorrt-11": "int8", "onnxruntime-cpu": "uint8"}
_LAYER = """<ir_version: 8, opset_import: ["": 17]>
    g (float[32,256] x) => (float[32,64] y) { [y] y = MatMul(x, w) }"""


def table() -> str:
    """Each number format that a spec may name, with its runtimes and lint rules."""
    rows = [_row(fmt) for name, fmt in FORMATS.items() if name not in (BIAS_FORMAT, RUN_TIME)]
    return tabulate(rows, headers=_HEAD, tablefmt="github", disable_numparse=True)


def page() -> str:
    """The page with the table of this code."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- formats -->\n")
    _, _, after = rest.partition("<!-- end -->")
    return f"{before}<!-- formats -->\n{table()}\n<!-- end -->{after}"


def _row(fmt: NumberFormat) -> tuple[str, ...]:
    sides = "weights" if fmt.weight_only else "both"
    if fmt.dynamic:
        sides += ", activations in blocks as they come"
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
    if known is not None and trt_ops.why_not(fmt.name, (12, 0), (11, 4)):
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
        _lint_rules(fmt),
    )


def _on_onnxruntime(fmt: NumberFormat) -> str:
    if fmt.name in BLOCKED_8:
        return "from " + ".".join(map(str, BLOCKED_8_SINCE))
    return "yes" if fmt.name in OnnxRuntime().capabilities().formats else "no"


def _lint_rules(fmt: NumberFormat) -> str:
    """The lint findings of a layer in this format that the preferred format of the target does not have."""
    found = []
    for target, preferred in _PREFERRED.items():
        own, usual = ({f.id for f in lint_model(_layer(each), target)} for each in (fmt, FORMATS[preferred]))
        found += sorted(own - usual)
    return ", ".join(found) or "-"


def _layer(fmt: NumberFormat) -> Model:
    """A linear layer in a format: activation and weight, or the weight alone."""
    proto = onnx.parser.parse_model(_LAYER)
    weight = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    weight_axis = 0 if fmt.block else 1
    sites = {Site(tensor="w", consumers=(Consumer("y", 1),), format=fmt.name, axis=weight_axis, weight=True)}
    if not fmt.weight_only:
        axis = 1 if fmt.block else None
        sites.add(Site(tensor="x", consumers=(Consumer("y", 0),), format=fmt.name, axis=axis))
    model = Model(proto)
    numbers = Quantizer(model, {"x": TensorRange(-4.0, 4.0)}, symmetric_activations=True)
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
