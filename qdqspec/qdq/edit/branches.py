"""Products inserted where only some readers of a tensor can have factors, as those of a normalization of BERT.

There a residual sum reads what linear operators read: the sum needs the values as they are, so that factors of the
channels need an operator of their own. It costs time, a small share of the products behind it.
Source: G. Xiao et al., "SmoothQuant", arXiv 2211.10438, for models whose normalization other operators read too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import refill

_NORMALIZATIONS = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("EmbedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    }
)
LEAST_OUTPUTS = 256  # of all linear operators behind a product, so that it takes a small share of their time


class Branch(NamedTuple):
    """The linear operators, by name, that read the product of a tensor with factors in place of the tensor."""

    tensor: str
    readers: tuple[str, ...]

    @property
    def product(self) -> str:
        """The name of the inserted node, and of its output."""
        return f"{self.tensor}_scaled"

    @property
    def factors(self) -> str:
        """The name of the constant with a factor for each channel."""
        return f"{self.tensor}_factors"


def find_branches(model: Model, fixed: Collection[str] = ()) -> list[Branch]:
    """The branches that may have factors, in graph order: MatMul and Gemm whose constant weights nothing else reads.

    They read a normalization. Tensors in ``fixed`` have no branch.
    """
    readers: dict[str, list[Node]] = {}
    read_elsewhere = {*model.outputs, *model.captured, *(value.name for value in model.flat.graph.input)}
    for node in model.nodes:
        if _may_scale(model, node) and node.inputs[1] not in read_elsewhere:
            readers.setdefault(node.inputs[0], []).append(node)
    known = {*model.producer, *model.constants, *model.inputs, *model.by_name}
    found = []
    for tensor, nodes in readers.items():
        branch = Branch(tensor, tuple(node.name for node in nodes))
        if tensor in fixed or not _is_normalized(model, tensor) or {branch.product, branch.factors} & known:
            continue
        if sum(_count_outputs(model, node) for node in nodes) >= LEAST_OUTPUTS:
            found.append(branch)
    return found


def _is_normalized(model: Model, tensor: str) -> bool:
    """Whether a tensor is the output of a normalization, or of its last operators: a product and a sum by channel."""
    maker = model.producer.get(tensor)
    if maker is None or maker.outputs[0] != tensor:
        return False
    if maker.op_type in _NORMALIZATIONS:
        return True
    product = _find_behind_vector(model, maker, "Add")
    return product is not None and _find_behind_vector(model, product, "Mul") is not None


def _find_behind_vector(model: Model, node: Node, op_type: str) -> Node | None:
    """The node whose output an operator of this type combines with a constant vector, if it does."""
    if node.op_type != op_type or sum(name in model.constants for name in node.inputs) != 1:
        return None
    constant, other = sorted(node.inputs, key=lambda name: name not in model.constants)
    return model.producer.get(other) if len(model.constants[constant].dims) == 1 else None


def _may_scale(model: Model, node: Node) -> bool:
    """Whether a linear operator's weight can be divided by factors of its input's last axis."""
    if node.op_type not in ("Gemm", "MatMul") or not is_default(node) or node.scope:
        return False
    source, weight = node.inputs[0], model.constants.get(node.inputs[1])
    shape = model.shape(source)
    if weight is None or shape is None or node.attributes.get("transA", 0) or source in model.constants:
        return False
    axis = int(bool(node.attributes.get("transB", 0)))
    is_private = len(model.consumers[node.inputs[1]]) == 1
    is_plain = weight.data_type == TensorProto.FLOAT and model.elem_type(source) == TensorProto.FLOAT
    has_channels = len(shape) > 1 and len(weight.dims) == 2 and shape[-1] == weight.dims[axis]
    return is_private and is_plain and has_channels and weight.dims[axis] > 1


def _count_outputs(model: Model, node: Node) -> int:
    dims = model.constants[node.inputs[1]].dims
    return int(dims[0 if node.attributes.get("transB", 0) else 1])


def with_branches(
    proto: onnx.ModelProto, model: Model, branches: Iterable[Branch], factors: Mapping[str, Array]
) -> None:
    """Insert the product of each branch before its first reader, into a copy of the flat form of ``model``."""
    of_reader = {(branch.tensor, name): branch for branch in branches for name in branch.readers}
    if not of_reader:
        return
    names = {node.outputs[0]: node.name for node in model.nodes if node.outputs and not node.scope}
    nodes: list[onnx.NodeProto] = []
    made = dict.fromkeys(of_reader.values(), False)
    for node in proto.graph.node:
        name = names.get(node.output[0], "") if node.output else ""
        branch = of_reader.get((node.input[0], name)) if node.input else None
        if branch is not None:
            if not made[branch]:
                inputs = [branch.tensor, branch.factors]
                nodes.append(helper.make_node("Mul", inputs, [branch.product], name=branch.product))
                proto.graph.initializer.append(
                    numpy_helper.from_array(factors[branch.factors], branch.factors)
                )
                made[branch] = True
            node.input[0] = branch.product
        nodes.append(node)
    refill(proto.graph.node, nodes)


def without_branches(proto: onnx.ModelProto, branches: Collection[Branch]) -> None:
    """Remove the products of these branches: their readers read the tensors themselves."""
    if not branches:
        return
    tensors = {branch.product: branch.tensor for branch in branches}
    factors = {branch.factors for branch in branches}
    nodes = [node for node in proto.graph.node if not (node.output and node.output[0] in tensors)]
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in tensors:
                node.input[index] = tensors[name]
    refill(proto.graph.node, nodes)
    refill(proto.graph.initializer, [one for one in proto.graph.initializer if one.name not in factors])
    refill(proto.graph.value_info, [one for one in proto.graph.value_info if one.name not in tensors])
