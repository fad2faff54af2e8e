"""The cost model of the simulated device: kernels, their times, and which of them run in quantized formats.

Deterministic: one model and one seed give one result. The structure follows real runtimes: work divided by
throughput; a factor for quantized kernels that differs between layers and formats and is sometimes above 1; a
cost for each conversion that no quantized kernel absorbs; and activation functions that are free directly after
the linear operator they fuse with. Formats are 8-bit integers, 8-bit floats, 4-bit integers for weights alone, and
NVFP4 and MXFP8, whose activations are quantized dynamically by a separate kernel.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from onnx import TensorProto

from qdqspec.backends.base import labels_of
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.graph.trt import MXFP8_DEQUANTIZE, PAIR_OPS
from qdqspec.types import LayerTime

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
FUSED = frozenset({"Relu", "Clip"})
FREE = frozenset({"Constant", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Dropout"})

LABELS = labels_of(
    alone=("Gemm", "MatMul"),
    between=("Conv", "Add", "Mul", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool"),
)

INT8, FP8, INT4, NVFP4, MXFP8 = "int8", "fp8", "int4", "nvfp4", "mxfp8"
_KINDS: dict[int, str] = {
    TensorProto.INT8: INT8, TensorProto.UINT8: INT8, TensorProto.FLOAT8E4M3FN: FP8, TensorProto.INT4: INT4,
    TensorProto.FLOAT4E2M1: NVFP4,
}  # fmt: skip
# Axes along which a weight's blocks may run, as on TensorRT.
BLOCKED_AXES: dict[str, tuple[int, ...]] = {"MatMul": (0,), "Gemm": (0, 1)}

_FLOPS_PER_MS = 2e7  # one float core; only ratios matter
_ELEMENTS_PER_MS = 1e6  # operators that move or convert values
LAUNCH_MS = 0.002  # the minimum time of any kernel


@dataclass(frozen=True, slots=True)
class Cost:
    """The executed kernels in graph order. Their times add up to the total."""

    layers: tuple[LayerTime, ...]
    structure: str  # digest: equal structures run the same kernels with the same scales

    @property
    def milliseconds(self) -> float:
        """Time of one run, without noise."""
        return math.fsum(layer.milliseconds for layer in self.layers)


def cost_of(model: Model, seed: int, scale: float = 1.0, integer: float = 1.0) -> Cost:
    """The kernels this device runs for ``model``; ``scale`` slows all kernels, ``integer`` those on integers."""
    simulation = _Simulation(model, seed, integer)
    layers = tuple(
        replace(layer, milliseconds=layer.milliseconds * scale)
        for node in model.nodes
        if (layer := simulation.layer(node)) is not None
    )
    layers = layers or (LayerTime(name="run", op_type="Run", milliseconds=LAUNCH_MS * scale),)
    digest = hashlib.sha256()
    for layer in layers:
        digest.update(repr((layer.op_type, layer.nodes, layer.tensors, layer.milliseconds)).encode())
    for node in model.nodes:
        if node.op_type in QDQ_OPS:
            digest.update(repr(node.inputs).encode())
            for tensor in node.inputs[1:3]:  # scale and zero point
                if tensor in model.constants:
                    digest.update(model.array(tensor).tobytes())
    return Cost(layers=layers, structure=digest.hexdigest()[:16])


class _Simulation:
    """Determines which nodes of a model become kernels, and their times."""

    def __init__(self, model: Model, seed: int, factor: float) -> None:
        self._model = model
        self._seed = seed
        self._factor = factor
        self._powers = {node.inputs[0] for node in model.nodes if node.op_type == MXFP8_DEQUANTIZE}
        kinds = ((node.name, self._kind_of_kernel(node)) for node in model.nodes)
        self._narrow = {name: kind for name, kind in kinds if kind is not None}

    def layer(self, node: Node) -> LayerTime | None:
        """The kernel of a node, or ``None`` if it is free or part of another kernel."""
        if node.op_type in QDQ_OPS:
            return self._conversion(node)
        if node.op_type in FREE or self._is_fused(node):
            return None
        kind = self._narrow.get(node.name)
        fused = [self._behind(node)] if self._absorbs(node) else []
        return LayerTime(
            name=f"{node.name}_kernel",
            op_type=node.op_type if kind is None else f"QLinear{node.op_type}",
            milliseconds=LAUNCH_MS + self._work_ms(node, kind),
            nodes=(node.name, *(other.name for other in fused)),
            integer=kind is not None,
        )

    # ---- narrow kernels -------------------------------------------------------------------------

    def _kind_of_kernel(self, node: Node) -> str | None:
        """The format that a node computes in, by that of each activation and weight; ``None`` for float.

        A bias may be float.
        """
        if node.op_type not in LABELS:
            return None
        inputs = node.inputs[:2] if node.op_type in LINEAR else node.inputs
        producers = [self._model.producer.get(tensor) for tensor in inputs if tensor]
        kinds = [self._kind(p.inputs[0]) if p is not None and _dequantizes(p) else None for p in producers]
        if kinds == [None, INT4]:
            return INT4 if node.op_type in BLOCKED_AXES else None
        if not kinds or kinds[0] is None or kinds[0] == INT4 or len(set(kinds)) > 1:
            return None
        return kinds[0] if "in-only" in LABELS[node.op_type] or self._is_quantized(node) else None

    def _kind(self, stored: str) -> str | None:
        """The format of stored numbers. 8-bit floats are distinguished by their scales."""
        if stored in self._powers:
            return MXFP8
        return _KINDS.get(self._model.elem_type(stored) or 0)

    def _is_quantized(self, node: Node) -> bool:
        """Whether its output, after a fused activation, is read by QuantizeLinear only."""
        last = self._behind(node) if self._absorbs(node) else node
        readers = self._readers(last)
        return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)

    def _absorbs(self, node: Node) -> bool:
        """Whether the only reader of a linear operator, whose output is not the graph's, fuses with it."""
        readers = self._readers(node) if node.op_type in LINEAR else []
        return len(readers) == 1 and readers[0].op_type in FUSED

    def _is_fused(self, node: Node) -> bool:
        before = self._model.producer.get(node.inputs[0]) if node.inputs else None
        return node.op_type in FUSED and before is not None and self._absorbs(before)

    def _readers(self, node: Node) -> list[Node]:
        """All consumers of a node's output; none if it is a graph output."""
        if node.outputs[0] in self._model.outputs:
            return []
        return [self._model.by_name[end.node] for end in self._model.consumers.get(node.outputs[0], ())]

    def _behind(self, node: Node) -> Node:
        return self._model.by_name[self._model.consumers[node.outputs[0]][0].node]

    # ---- conversions ----------------------------------------------------------------------------

    def _conversion(self, node: Node) -> LayerTime | None:
        """The time of a Q or DQ: zero if a kernel of its format absorbs it or its value is constant."""
        if self._is_absorbed(node):
            return None
        if not _dequantizes(node):
            tensor = node.inputs[0]
        else:
            pair = self._model.producer.get(node.inputs[0])
            tensor = pair.inputs[0] if pair is not None and pair.inputs else node.inputs[0]
        return LayerTime(
            name=f"{node.op_type}_of_{tensor}",
            op_type=node.op_type,
            milliseconds=LAUNCH_MS + self._elements(node.outputs[0]) / _ELEMENTS_PER_MS,
            tensors=(tensor,),
            boundary=True,
        )

    def _is_absorbed(self, node: Node) -> bool:
        if _dequantizes(node):
            readers = self._model.consumers.get(node.outputs[0], ())
            if all(self._model.by_name[reader.node].op_type in QDQ_OPS for reader in readers):
                return bool(readers)  # it makes scales
            kind = self._kind(node.inputs[0])
            return bool(readers) and all(self._narrow.get(reader.node) == kind for reader in readers)
        before = self._model.producer.get(node.inputs[0])
        if before is None:
            return node.inputs[0] in self._model.constants
        if self._is_fused(before):
            before = self._model.producer[before.inputs[0]]
        kind = self._narrow.get(before.name)
        return kind is not None and self._is_quantized(before) and kind == self._kind(node.outputs[0])

    # ---- work -----------------------------------------------------------------------------------

    def _work_ms(self, node: Node, kind: str | None) -> float:
        """The time of a kernel without its launch. Small operators may be slower in a quantized format."""
        is_linear = node.op_type in LINEAR
        if is_linear:
            weight = self._shape(node.inputs[1])
            if node.op_type in ("Conv", "ConvTranspose"):
                side = node.outputs[0] if node.op_type == "Conv" else node.inputs[0]
                inner = math.prod(weight[1:])
            else:
                side = node.outputs[0]
                inner = weight[-2] if len(weight) > 1 else math.prod(weight)
            flops = 2.0 * self._elements(side) * inner
            work = flops / _FLOPS_PER_MS * self._draw(node, "speed", 0.7, 1.4)
        else:
            elements = sum(self._elements(t) for t in (*node.inputs, *node.outputs) if t)
            work = elements / _ELEMENTS_PER_MS * self._draw(node, "speed", 0.5, 2.0)
        discount = 1.0
        if kind == INT4:
            discount = self._factor * self._draw(node, kind, 0.3, 1.2)
        elif kind is not None:
            what = "integer" if kind == INT8 else kind
            discount = self._factor * self._draw(node, what, 0.25, 0.8 if is_linear else 1.3)
            if not self._is_quantized(node):
                discount *= self._draw(node, "in-only", 0.9, 1.3)
        return work * discount

    def _elements(self, tensor: str) -> float:
        return float(math.prod(self._shape(tensor)))

    def _shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor; unknown dimensions count as one."""
        return tuple(dim or 1 for dim in self._model.shape(tensor) or ())

    def _draw(self, node: Node, what: str, low: float, high: float) -> float:
        """A number determined by the seed and the kind of layer: same operator, same shapes."""
        shapes = [self._shape(tensor) for tensor in (*node.inputs[:2], node.outputs[0])]
        return low + (high - low) * fraction(self._seed, what, node.op_type, repr(shapes))


def _dequantizes(node: Node) -> bool:
    return PAIR_OPS.get(node.op_type, node.op_type) == "DequantizeLinear"


def fraction(*parts: object) -> float:
    """A number in [0, 1) that depends on ``parts`` only, uniformly distributed over different parts."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
