"""Runs models in the ONNX reference implementation, with an operator that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qdqspec._core.arrays import Array
from qdqspec.graph.opset import opset_of
from qdqspec.graph.protos import copy_model
from qdqspec.graph.trt import meanings

_KNOWS_DEQUANTIZE = 19  # onnx 1.23 has no version of DequantizeLinear for lower opsets


def reference_outputs(model: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a model file by name, computed slowly, operator by operator, as ONNX defines them."""
    evaluator = evaluator_of(onnx.load(str(model)))
    values = evaluator.run(None, dict(feeds))
    return {name: np.asarray(value) for name, value in zip(evaluator.output_names, values, strict=True)}


def evaluator_of(proto: onnx.ModelProto) -> ReferenceEvaluator:
    """The reference implementation of a model, including the operators of `qdqspec.graph.trt`."""
    own: list[type[OpRun]] = [DequantizeLinear] if opset_of(proto) < _KNOWS_DEQUANTIZE else []
    foreign = [*meanings(proto)]
    if foreign:
        proto = copy_model(proto)
        proto.functions.extend(foreign)
    return ReferenceEvaluator(proto, new_ops=own)


class DequantizeLinear(OpRun):
    """DequantizeLinear of opsets 10 and 13. The evaluator finds it by name, and passes later attributes as well."""

    op_domain = ""

    def _run(self, x, scale, zero_point=None, axis=1, **later):  # type: ignore[no-untyped-def]  # noqa: ARG002 - its seam
        shape = (
            [-1 if axis % x.ndim == index else 1 for index in range(x.ndim)]
            if scale.size > 1
            else scale.shape
        )
        zero = 0 if zero_point is None else zero_point.astype(np.int64).reshape(shape)
        return ((x.astype(np.int64) - zero).astype(scale.dtype) * scale.reshape(shape),)
