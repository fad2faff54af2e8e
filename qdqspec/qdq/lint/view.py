"""A view of a model for lint rules: which tensors are dequantized, with which numbers, and their readers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import numpy.typing as npt
from onnx import TensorProto
from packaging.version import Version

from qdqspec._core.hooks import declaration_of, owner_of
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import QDQ_OPS, data_inputs, is_default, is_nearest, weight_input
from qdqspec.graph.trt import DOMAIN, FP4_DYNAMIC
from qdqspec.qdq.dynamic_kernels import QUANTIZE
from qdqspec.qdq.formats import format_stored_as, number_format
from qdqspec.qdq.pair_numbers import (
    blocks_of,
    is_constant,
    is_dynamic,
    is_op,
    is_qdq,
    makes_scale,
    stated_numbers,
)
from qdqspec.qdq.recognize import with_constant_numbers
from qdqspec.qdq.units import WEIGHT_AXES, dynamic_misfit, edges_before
from qdqspec.types import Consumer, LintTarget

Reals = npt.NDArray[np.floating]
# The first opset whose QuantizeLinear and DequantizeLinear support a stored type, if it is not the first of all.
_SINCE_OPSET: dict[int, int] = {
    TensorProto.FLOAT8E4M3FN: 19, TensorProto.FLOAT8E4M3FNUZ: 19, TensorProto.FLOAT8E5M2: 19,
    TensorProto.FLOAT8E5M2FNUZ: 19, TensorProto.INT16: 21, TensorProto.UINT16: 21, TensorProto.INT4: 21,
    TensorProto.UINT4: 21, TensorProto.FLOAT4E2M1: 23,
}  # fmt: skip
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LAYOUT = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True, eq=False)
class QdqNumbers:
    """The parameters of one Q or DQ. ``scale`` is ``None`` if it is computed at run time."""

    elem_type: int | None  # of the stored numbers
    scale: Reals | None
    zero_point: Reals | None  # zeros if none is given, ``None`` if it is computed
    axis: int
    block: int
    dynamic: bool = False  # whether the scales of blocks are computed at run time and multiplied by ``scale``

    @property
    def limits(self) -> tuple[float, float] | None:
        """The lowest and the highest stored integer; ``None`` for other types than those of 8 and 16 bits."""
        fmt = format_stored_as(self.elem_type or 0)
        return (fmt.low, fmt.high) if fmt.name in ("int8", "int16", "uint8", "uint16") else None

    @property
    def channel_scales(self) -> int:
        """The number of scales, one a channel; 0 for a single scale, blocks, and scales computed at run time."""
        return 0 if self.scale is None or self.block or self.scale.size < 2 else self.scale.size

    def same_scale(self, other: QdqNumbers) -> bool:
        """Whether two pairs represent the same real numbers."""
        if self.scale is None or other.scale is None or self.elem_type != other.elem_type:
            return False
        zeros = (self.zero_point, other.zero_point)
        same_zeros = zeros[0] is not None and zeros[1] is not None and np.array_equal(zeros[0], zeros[1])
        return same_zeros and np.array_equal(self.scale, other.scale)


@cache
def versions_of(target: LintTarget) -> tuple[Version, ...]:
    """The versions of a target that are judged: the one that it names, or all that are known of a major one.

    A target without a version has the version of the installed package, or none if that is not known.
    """
    name, _, named = target.rpartition("-")
    declared = declaration_of(owner_of(target))
    if named[:1].isdecimal():
        minors = [t.removeprefix(f"{name}-") for t in declared.lint_targets if t.startswith(f"{target}.")]
        return tuple(map(Version, minors or [named]))
    try:
        return (Version(version(declared.lint_package)),)
    except (PackageNotFoundError, ValueError):  # another package of the runtime, or none is declared
        return ()


class View:
    """Queries on one model that several rules share."""

    def __init__(self, model: Model, target: LintTarget, capability: tuple[int, int] | None = None) -> None:
        self.model = with_constant_numbers(model)
        self.computed = self.model.constants.keys() - model.constants.keys()  # by nodes, from constants
        self.target = target
        self.capability = capability
        self.versions = versions_of(target)  # of the target's runtime that are judged
        self._numbers: dict[str, QdqNumbers] = {}

    @cached_property
    def pairs(self) -> tuple[tuple[Node, QdqNumbers], ...]:
        """Each Q and DQ of the main graph with its numbers, except pairs that make the scale of another pair."""
        return tuple(
            (node, self.numbers(node))
            for node in self.model.nodes
            if node.op_type in QDQ_OPS and is_qdq(node) and not makes_scale(self.model, node.outputs[0])
        )

    @cached_property
    def plain_pairs(self) -> tuple[tuple[Node, QdqNumbers], ...]:
        """The `pairs` without operators of domain ``trt``, which have other inputs, and scales of other types."""
        return tuple(pair for pair in self.pairs if pair[0].domain != DOMAIN)

    @cached_property
    def dequantizers(self) -> tuple[tuple[Node, QdqNumbers], ...]:
        """The DQ among `pairs`."""
        return tuple(pair for pair in self.pairs if is_op(pair[0], "DequantizeLinear"))

    @cached_property
    def heads(self) -> tuple[tuple[Node, QdqNumbers], ...]:
        """One node per pair, for findings on its numbers: the Q, or the DQ of a stored weight."""
        made = {node.outputs[0] for node, _ in self.pairs if is_op(node, "QuantizeLinear")}
        return tuple(
            (node, numbers)
            for node, numbers in self.pairs
            if is_op(node, "QuantizeLinear") or node.inputs[0] not in made
        )

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """Each node of ONNX's own that is not a Q, DQ or constant."""
        return tuple(
            node
            for node in self.model.nodes
            if is_default(node) and node.op_type not in QDQ_OPS and node.op_type != "Constant"
        )

    def of(self, *op_types: str) -> Iterator[Node]:
        """The `operators` of these types."""
        return (node for node in self.operators if node.op_type in op_types)

    @cached_property
    def too_new(self) -> dict[str, int]:
        """Q and DQ of ONNX's own whose stored type needs a later opset than the model's: that opset."""
        needed = {n.name: _SINCE_OPSET.get(p.elem_type or 0, 0) for n, p in self.plain_pairs if is_default(n)}
        return {name: since for name, since in needed.items() if since > self.model.opset}

    def numbers(self, node: Node) -> QdqNumbers:
        """The numbers of a Q or DQ; of a pair whose Q computes scales at run time their common factor, if any."""
        if node.name not in self._numbers:
            self._numbers[node.name] = self._read_numbers(node)
        return self._numbers[node.name]

    def _read_numbers(self, node: Node) -> QdqNumbers:
        quantizes = is_op(node, "QuantizeLinear")
        maker = node if quantizes else self.model.producer.get(node.inputs[0])
        if maker is None or not is_dynamic(maker):
            elem_type = self.model.elem_type(node.outputs[0] if quantizes else node.inputs[0])
            stated = stated_numbers(self.model, node)
            scale, zero_point = (None if each is None else each.astype(np.float64) for each in stated)
            return QdqNumbers(elem_type, scale, zero_point, *blocks_of(node))
        scale, factor = np.ones(()), maker.input_at(1)
        if factor:
            known = factor in self.model.constants
            scale = self.model.array(factor).astype(np.float64) if known else None
        zero_point = np.zeros(() if scale is None else scale.shape)
        elem_type = TensorProto.UINT8 if maker.op_type == QUANTIZE else self.model.elem_type(maker.outputs[0])
        return QdqNumbers(elem_type, scale, zero_point, *blocks_of(maker), dynamic=True)

    # ---- tensors ----------------------------------------------------------------------------

    def dequantizer(self, tensor: str, through: Collection[str] = ()) -> Node | None:
        """The DQ that makes a tensor, also behind operators of these types, along their first inputs."""
        node = self.maker(tensor, through)
        return node if node is not None and is_op(node, "DequantizeLinear") else None

    def dequantizers_before(self, node: Node, index: int, moved_past: Collection[str]) -> Iterator[Node]:
        """Each DQ whose values an input of a node holds, if pairs are moved past operators of these types."""
        edges = edges_before(self.model, (node.inputs[index], Consumer(node.name, index)), moved_past)
        yield from filter(None, (self.dequantizer(tensor) for tensor, _ in edges))

    def is_given(self, number: str) -> bool:
        """Whether a scale or zero point is omitted, a constant in the file, or dequantized from one."""
        return number not in self.computed and is_constant(self.model, (number,))

    def dynamic_misfit(self, quantizer: Node) -> str | None:
        """The reason against a quantizer that finds scales of blocks along the last axis at run time, or ``None``."""
        fmt = number_format("nvfp4" if quantizer.op_type == FP4_DYNAMIC else "mxfp8")
        return dynamic_misfit(self.model, quantizer.inputs[0], fmt, None)

    def stored_weight(self, dequantizer: Node) -> str | None:
        """The constant behind a DQ, stored directly or quantized by a Q that is folded; ``None`` for activations."""
        tensor = dequantizer.inputs[0]
        maker = self.model.producer.get(tensor)
        if maker is not None and is_op(maker, "QuantizeLinear"):
            tensor = maker.inputs[0]
        return tensor if tensor in self.model.constants else None

    def quantizes_constant(self, node: Node) -> bool:
        """Whether a Q reads, or a DQ represents, a constant and not an activation."""
        if node.op_type == "DequantizeLinear":
            return self.stored_weight(node) is not None
        return node.inputs[0] in self.model.constants

    def before_pair(self, tensor: str) -> str:
        """The tensor that a pair quantizes; a tensor without a pair is returned unchanged."""
        dequantizer = self.dequantizer(tensor)
        maker = self.model.producer.get(dequantizer.inputs[0]) if dequantizer is not None else None
        return maker.inputs[0] if maker is not None and is_op(maker, "QuantizeLinear") else tensor

    def maker(self, tensor: str, through: Collection[str]) -> Node | None:
        """The node that a tensor comes from, through operators of these types, along their first inputs."""
        node = self.model.producer.get(tensor)
        while node is not None and node.op_type in through and node.inputs:
            node = self.model.producer.get(node.inputs[0])
        return node

    def convolution_behind(self, tensor: str) -> Node | None:
        """The Conv whose result, possibly normalized, a tensor is, through a pair or not."""
        node = self.maker(self.before_pair(tensor), ("BatchNormalization", "Identity"))
        return node if node is not None and node.op_type in ("Conv", "ConvTranspose") else None

    def weight_dequantizer(self, node: Node) -> Node | None:
        """The DQ of a linear operator's weight; ``None`` if the weight is float or computed."""
        if node.op_type not in _LINEAR or len(node.inputs) < 2:
            return None
        found = self.dequantizer(node.inputs[1])
        return found if found is not None and self.stored_weight(found) is not None else None

    def quantized_weights(self, *op_types: str) -> Iterator[tuple[Node, Node]]:
        """Each linear operator of these types, or of all, whose weight is behind a DQ, and that DQ."""
        for node in self.of(*op_types or _LINEAR):
            dequantizer = self.weight_dequantizer(node)
            if dequantizer is not None:
                yield node, dequantizer

    def channel_axis(self, node: Node, dequantizer: Node) -> int:
        """The axis of the output channels of a linear operator's stored weight."""
        if node.op_type == "Gemm":
            return 0 if node.attributes.get("transB", 0) else 1
        rank = len(self.model.constants[self.stored_weight(dequantizer) or ""].dims)
        return WEIGHT_AXES.get(node.op_type, rank - 1)

    def inputs(self, node: Node) -> dict[int, Node | None]:
        """The data inputs of a node, each with the DQ that makes it; a constant weight without one counts."""
        return {index: self.dequantizer(node.inputs[index]) for index in data_inputs(node)}

    def is_constant(self, tensor: str) -> bool:
        """Whether a tensor is a constant, or one behind a DQ."""
        maker = self.dequantizer(tensor)
        return tensor in self.model.constants or (maker is not None and self.stored_weight(maker) is not None)

    def readers(self, tensor: str) -> tuple[Node, ...]:
        """The nodes that read a tensor, each once."""
        return tuple({node.name: node for node in self.model.readers(tensor)}.values())

    def quantizers(self, tensor: str) -> tuple[Node, ...]:
        """The Q that read a tensor."""
        return tuple(node for node in self.readers(tensor) if is_op(node, "QuantizeLinear"))

    def is_seen(self, tensor: str) -> bool:
        """Whether a tensor is an output of the graph or read in a body."""
        return tensor in self.model.outputs or tensor in self.model.captured

    def only_quantized(self, tensor: str) -> bool:
        """Whether all readers of a tensor read it quantized."""
        readers = self.readers(tensor)
        return bool(readers) and not self.is_seen(tensor) and len(self.quantizers(tensor)) == len(readers)

    def is_weighted(self, node: Node) -> bool:
        """Whether a node is a linear operator with a constant weight, float or behind a DQ."""
        return weight_input(self.model, node) is not None or self.weight_dequantizer(node) is not None

    def fused(self, node: Node, absorbed: Collection[str]) -> tuple[Node, ...]:
        """A node and the chain of operators that fuse into it: each is the only reader of the one before."""
        chain = [node]
        while True:
            last = chain[-1]
            readers = self.readers(last.outputs[0])
            alone = len(readers) == 1 and len(last.outputs) == 1 and not self.is_seen(last.outputs[0])
            if not alone or readers[0].op_type not in absorbed or readers[0].inputs[0] != last.outputs[0]:
                return tuple(chain)
            chain.append(readers[0])

    def weight_dims(self, node: Node) -> tuple[int, ...]:
        """The shape of a weighted operator's constant weight; empty if it is computed."""
        source = self.weight_dequantizer(node)
        stored = self.stored_weight(source) if source is not None else next(iter(node.inputs[1:2]), "")
        constant = self.model.constants.get(stored or "")
        return () if constant is None else tuple(constant.dims)

    def channels(self, node: Node) -> tuple[int, int] | None:
        """Input and output channels of a weighted operator, of one group; ``None`` if unknown."""
        dims = self.weight_dims(node)
        if len(dims) < 2:
            return None
        if node.op_type == "Conv":
            return dims[1], dims[0]
        if node.op_type == "ConvTranspose":
            return dims[0], dims[1]
        if node.op_type == "Gemm" and node.attributes.get("transB", 0):
            return dims[1], dims[0]
        return dims[-2], dims[-1]


def interpolates(node: Node) -> bool:
    """Whether a Resize computes values between those of its input."""
    return node.op_type == "Resize" and not is_nearest(node)


def type_name(elem_type: int | None) -> str:
    """``uint8``; ``an unknown type`` if inference did not find it."""
    return "an unknown type" if elem_type is None else TensorProto.DataType.Name(elem_type).lower()
