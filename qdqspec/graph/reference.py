"""Runs models in the ONNX reference implementation, with operators that it lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    """The outputs of a model file by name, computed slowly, operator by operator, as ONNX defines them.

    A tensor is released after the last node that reads it.
    """
    evaluator = evaluator_of(onnx.load(str(model)))
    _release_early(evaluator)
    values = evaluator.run(None, dict(feeds))
    return {name: np.asarray(value) for name, value in zip(evaluator.output_names, values, strict=True)}


def evaluator_of(proto: onnx.ModelProto) -> ReferenceEvaluator:
    """The reference implementation of a model, including the operators of `qdqspec.graph.trt`."""
    own: list[type[OpRun]] = [Conv, *([DequantizeLinear] if opset_of(proto) < _KNOWS_DEQUANTIZE else [])]
    foreign = [*meanings(proto)]
    if foreign:
        proto = copy_model(proto)
        proto.functions.extend(foreign)
    return ReferenceEvaluator(proto, new_ops=own)


def _release_early(evaluator: ReferenceEvaluator) -> None:
    """Put a step after each node that releases the tensors which no later node reads; the evaluator keeps all.

    Nodes with bodies read any tensor, so that those before the last of them are released after it.
    """
    kept = {*evaluator.output_names, *evaluator.input_names, *evaluator.rt_inits_}
    steps: list[Any] = []
    for node in reversed(evaluator.rt_nodes_):
        seen = {name for name in (*node.input, *node.output) if name}
        if node.need_context():
            break
        steps += [_Release(seen - kept), node]
        kept |= seen
    done = evaluator.rt_nodes_[: len(evaluator.rt_nodes_) - len(steps) // 2]
    evaluator.rt_nodes_ = [*done, *reversed(steps)]


class _Release:
    """A node that removes tensors from the results of an evaluator."""

    op_type, input, output, has_linked_attribute = "Release", (), (), False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def need_context(self) -> bool:
        """Whether it is given all results: it removes some of them."""
        return True

    def run(self, *, context: dict[str, Any], **_: object) -> tuple[()]:
        """Remove the tensors."""
        for name in self._names:
            context.pop(name, None)
        return ()


class Conv(OpRun):
    """Conv in the memory of a few of its tensors; that of onnx 1.23 takes 46 times the largest one."""

    op_domain = ""

    def _run(self, x, w, b=None, **attributes):  # type: ignore[no-untyped-def] # its seam
        rank, group = x.ndim - 2, attributes.get("group") or 1
        strides, dilations = (attributes.get(name) or [1] * rank for name in ("strides", "dilations"))
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(w.shape[2:], dilations, strict=True)]
        pads = _pads(attributes.get("auto_pad"), attributes.get("pads"), x.shape[2:], spans, strides)
        padded = np.pad(x, [(0, 0), (0, 0), *pads])
        sides = zip(padded.shape[2:], spans, strides, strict=True)
        sizes = [(size - span) // stride + 1 for size, span, stride in sides]
        y = np.zeros((len(x), group, len(w) // group, int(np.prod(sizes))), x.dtype)
        for tap in np.ndindex(*w.shape[2:]):
            weights = np.ascontiguousarray(w[(..., *tap)]).reshape(group, -1, w.shape[1])
            steps = zip(tap, dilations, sizes, strides, strict=True)
            at: list[Any] = [
                slice(i * own, i * own + (size - 1) * stride + 1, stride) for i, own, size, stride in steps
            ]
            window = padded[(..., *at)].reshape(len(x), group, w.shape[1], -1)
            y += weights * window if w.shape[1] == 1 else weights @ window
        y = y.reshape(len(x), len(w), *sizes)
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def _pads(
    auto: str | None,
    given: Sequence[int] | None,
    sizes: Sequence[int],
    spans: Sequence[int],
    strides: Sequence[int],
) -> list[tuple[int, int]]:
    """The padding before and after each spatial axis."""
    if auto in (None, "", "NOTSET"):
        given = given or [0] * (2 * len(sizes))
        return [(given[axis], given[axis + len(sizes)]) for axis in range(len(sizes))]
    if auto == "VALID":
        return [(0, 0)] * len(sizes)
    steps = zip(sizes, spans, strides, strict=True)
    totals = [max((-(-size // stride) - 1) * stride + span - size, 0) for size, span, stride in steps]
    if auto == "SAME_UPPER":
        return [(total // 2, total - total // 2) for total in totals]
    return [(total - total // 2, total // 2) for total in totals]


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
