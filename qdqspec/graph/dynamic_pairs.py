"""The inverse of `qdqspec.graph.dynamic_kernels`, for models of other tools too.

The tool ``quantize_dynamic`` writes the same kernels under other names, and stores the weights of a
DynamicQuantizeLSTM transposed. An embedding that it quantizes is a Gather of integers before the DequantizeLinear.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.dynamic_kernels import (
    CARRIED,
    DOMAIN,
    IMPORTS,
    LSTM,
    QUANTIZE,
    REPLACED,
    FreeNames,
    attribute_of,
    constants_of,
    is_default,
)
from qdqspec.graph.flat import scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.protos import copied, copy_model, metadata, names_read_inside, refill

_KERNELS = frozenset({"MatMulInteger", LSTM})
_TRANSPOSED = [0, 2, 1]
_LSTM_INPUTS = 8


def with_pairs(model: Model, reference: Model | None = None) -> Model:
    """The model with Q/DQ pairs in the place of kernels with dynamic ranges; itself where it has none.

    A kernel that is used otherwise, with computed weights for example, is unchanged. The ``reference``, the model
    before quantization, shows where another tool split a Gemm.
    """
    if not any(n.op_type in _KERNELS or _is_gather(model, n.proto) or _is_sum(n.proto) for n in model.nodes):
        return model
    proto = _Raising(model.flat, reference).proto()
    return model if proto is model.flat else Model(proto, path=model.path)


def _is_gather(model: Model, node: onnx.NodeProto) -> bool:
    constant = model.constants.get(node.input[0]) if node.op_type == "Gather" else None
    return constant is not None and constant.data_type in (TensorProto.INT8, TensorProto.UINT8)


def _is_sum(node: onnx.NodeProto) -> bool:
    """Whether it was an Add before kernels were written."""
    return node.op_type == "Sum" and metadata(node, REPLACED) is not None


def _add_of(node: onnx.NodeProto) -> onnx.NodeProto:
    found = copied(node)
    found.op_type = "Add"
    refill(found.metadata_props, [prop for prop in node.metadata_props if prop.key != REPLACED])
    return found


class _Raising:
    """Examines every node; replacements are recorded in ``_instead`` and ``_removed``, by the index of the node."""

    def __init__(self, flat: onnx.ModelProto, reference: Model | None) -> None:
        self._flat = flat
        self._reference = reference
        self._nodes = flat.graph.node
        self._names = FreeNames(flat.graph)
        self._producer = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for name in {*node.input, *names_read_inside(node)}:
                self._readers.setdefault(name, []).append(index)
        self._outputs = {output.name for output in flat.graph.output}
        self._constants = constants_of(flat.graph)
        self._instead: dict[int, list[onnx.NodeProto]] = {}
        self._removed: set[int] = set()
        self._changed: dict[str, TensorProto] = {}  # initializers
        self._scopes = list(scopes_of(self._nodes))
        self._made: list[onnx.NodeProto] = []
        self._scope = ""  # of the node that is looked at
        self._known: dict[tuple[str, ...], onnx.NodeProto] = {}  # by scope and inputs: halves of pairs so far

    def proto(self) -> onnx.ModelProto:
        for index, node in enumerate(self._nodes):
            self._scope = self._scopes[index]
            if node.op_type in (QUANTIZE, "DequantizeLinear") and is_default(node):
                self._known.setdefault((self._scope, *node.input), node)
            new = self._raised(node)
            if new:
                self._instead[index] = new
        if not self._instead:
            return self._flat
        nodes = [
            new
            for i, node in enumerate(self._nodes)
            for new in self._instead.get(i, () if i in self._removed else (node,))
        ]
        read = {name for node in nodes for name in (*node.input, *names_read_inside(node))} | self._outputs
        touched = {name for i in (*self._removed, *self._instead) for name in self._nodes[i].input}
        proto = copy_model(self._flat, but={"node", "initializer"})
        proto.graph.node.extend(self._without_unused(nodes, touched))
        proto.graph.initializer.extend(
            self._changed.get(t.name, t)
            for t in self._flat.graph.initializer
            if t.name in read or t.name not in touched
        )
        unused = self._imported(nodes)
        refill(proto.opset_import, [o for o in proto.opset_import if o.domain != unused])
        return proto

    def _imported(self, nodes: Iterable[onnx.NodeProto]) -> str | None:
        """The domain that was imported for the kernels alone."""
        kernels = [node for i in self._instead for node in (self._nodes[i],) if node.domain == DOMAIN]
        foreign = all(metadata(node, REPLACED) is None for node in kernels)
        ours = any(metadata(node, IMPORTS) is not None for node in kernels)
        others = any(node.domain == DOMAIN for node in nodes)
        return DOMAIN if kernels and (foreign or ours) and not others else None

    def _without_unused(self, nodes: list[onnx.NodeProto], touched: set[str]) -> Iterator[onnx.NodeProto]:
        """The nodes without those that only the kernels read: products of scales, and transposed weights."""
        read = {name for node in nodes for name in (*node.input, *names_read_inside(node))} | self._outputs
        for node in nodes:
            if not (touched & {*node.output}) or any(name in read for name in node.output):
                yield node

    def _raised(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type == "MatMulInteger" and is_default(node):
            return self._product(node)
        if node.op_type == LSTM and node.domain == DOMAIN:
            return self._lstm(node)
        if _is_sum(node):
            return [_add_of(node)]
        if node.op_type == "Gather" and is_default(node) and node.input[0] in self._constants:
            return self._gather(node)
        return []

    # ---- MatMulInteger ----------------------------------------------------------------------------

    def _product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """MatMul or Gemm on dequantized operands, in the place of the first node of the chain."""
        quantize, steps = self._quantizer(node), self._chain(node)
        stored, is_transposed = self._stored(node.input[1], [1, 0])
        if quantize is None or stored is None or len(steps) < len(("Cast", "Mul")):
            return []
        scale = self._weight_scale(self._other(steps[1], steps[0].output[0]), quantize.output[1])
        if scale is None or not self._fits(stored, scale):
            return []
        count, before = 2, self._before(node, quantize, steps[1])
        if before is None and len(steps) > count:
            count, before = 3, self._before(node, quantize, steps[2])
        if before is None:
            count, name = 2, node.name.removesuffix("_quant")
            before = helper.make_node("MatMul", [quantize.input[0], ""], list(steps[1].output), name=name)
        if attribute_of(before, "transB", 0) and not is_transposed:
            self._transpose(stored, [1, 0])
        elif is_transposed and not attribute_of(before, "transB", 0):
            return []
        self._removed.update(self._producer[step.output[0]] for step in steps[:count])
        is_single = list(self._constants[scale].dims) in ([], [1])
        axis = None if is_single else int(not attribute_of(before, "transB", 0))
        weight = self._dequantize([stored, scale, *node.input[3:4]], axis, before.input[1])
        return self._fed(before, quantize, [weight])

    def _before(
        self, node: onnx.NodeProto, quantize: onnx.NodeProto, last: onnx.NodeProto
    ) -> onnx.NodeProto | None:
        """The node that was replaced by a chain that ends here, from its metadata or the reference.

        A tool that has no integer kernel for Gemm makes a product and a sum of it, with the weight transposed.
        """
        known = _replaced(node)
        if known is not None and list(known.output) == list(last.output):
            return known
        found = None if self._reference is None else self._reference.producer.get(last.output[0])
        if found is None or found.op_type != "Gemm" or found.inputs[0] != quantize.input[0]:
            return None
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        same = all(attribute_of(found.proto, name, value) == value for name, value in plain.items())
        has_bias = len(found.inputs) > len("AB") and bool(found.inputs[2])
        fits = (
            same and has_bias == (last.op_type == "Add") and (not has_bias or found.inputs[2] in last.input)
        )
        return found.proto if fits else None

    def _transpose(self, stored: str, perm: list[int]) -> None:
        values = numpy_helper.to_array(self._constants[stored]).transpose(perm)
        self._changed[stored] = numpy_helper.from_array(np.array(values, order="C"), stored)

    def _quantizer(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        found = self._maker(node.input[0])
        zero_point = node.input[2] if len(node.input) > 2 else ""
        if found is None or found.op_type != QUANTIZE or not is_default(found):
            return None
        return found if [found.output[0], found.output[2]] == [node.input[0], zero_point] else None

    def _chain(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Cast to float32, Mul, and an Add where it is the only reader."""
        steps: list[onnx.NodeProto] = []
        for op_type in ("Cast", "Mul", "Add"):
            tensor = (steps[-1] if steps else node).output[0]
            readers = self._readers.get(tensor, ())
            follower = self._nodes[readers[0]] if len(readers) == 1 and tensor not in self._outputs else None
            if follower is None or follower.op_type != op_type or not is_default(follower):
                break
            if op_type == "Cast" and attribute_of(follower, "to", 0) != TensorProto.FLOAT:
                break
            steps.append(follower)
        return steps

    def _weight_scale(self, product: str | None, scale: str) -> str | None:
        """The constant that multiplies the scale of the activation."""
        maker = self._maker(product or "")
        other = None if maker is None or maker.op_type != "Mul" else self._other(maker, scale)
        return other if other in self._constants else None

    def _stored(self, tensor: str, perm: list[int]) -> tuple[str | None, bool]:
        """The stored integers behind an operand, and whether they are transposed in between."""
        if tensor in self._constants:
            return tensor, False
        maker = self._maker(tensor)
        if maker is None or maker.op_type != "Transpose" or maker.input[0] not in self._constants:
            return None, False
        return (maker.input[0], True) if attribute_of(maker, "perm", None) == perm else (None, False)

    def _fits(self, stored: str, scale: str) -> bool:
        dims, count = self._constants[stored].dims, list(self._constants[scale].dims)
        return count in ([], [1]) or (len(dims) == 2 and len(count) == 1)

    # ---- DynamicQuantizeLSTM ----------------------------------------------------------------------

    def _lstm(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        numbers = list(node.input[_LSTM_INPUTS:])
        found = [self._stored(node.input[i], _TRANSPOSED) for i in (1, 2)]
        if len(numbers) < 4 or any(stored is None for stored, _ in found):
            return []
        if not all(name in self._constants for name in numbers):
            return []
        before = _replaced(node)
        if before is None or list(before.output) != list(node.output):
            before = helper.make_node(
                "LSTM", [*node.input[:3]], list(node.output), node.name.removesuffix("_quant")
            )
            before.attribute.extend(node.attribute)
            before.input.extend(_trimmed(node.input[3:_LSTM_INPUTS]))
            before.input[1] = before.input[2] = ""
        weights = []
        for index, (stored, transposed) in enumerate(found):
            scale, zero = numbers[2 * index : 2 * index + 2]
            weights.append(
                self._rows(str(stored), scale, zero, before.input[1 + index], transposed=transposed)
            )
        return self._fed(before, None, weights)

    def _rows(self, stored: str, scale: str, zero: str, carried: str, *, transposed: bool) -> onnx.NodeProto:
        """The dequantized weight of an LSTM, in the shape of ONNX's operator."""
        if not transposed:
            self._transpose(stored, _TRANSPOSED)
        directions, rows, depth = (self._changed.get(stored) or self._constants[stored]).dims
        shape: tuple[int, ...] = (directions,)
        axis = block = 0
        if len(self._constants[scale].dims) > 1:  # one for each row; of two directions, only blocks are these
            shape, axis, block = ((rows,), 1, 0) if directions == 1 else ((directions, rows, 1), 2, depth)
        for name in (scale, zero):
            values = numpy_helper.to_array(self._constants[name])
            self._changed[name] = numpy_helper.from_array(np.array(values.reshape(shape), order="C"), name)
        return self._dequantize([stored, scale, zero], axis, carried, block)

    # ---- Gather -----------------------------------------------------------------------------------

    def _gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A Gather of dequantized values in the place of the DequantizeLinear of gathered integers."""
        readers = self._readers.get(node.output[0], ())
        if len(readers) != 1 or node.output[0] in self._outputs:
            return []
        after = self._nodes[readers[0]]
        numbers = list(after.input[1:])
        scalar = all(
            name in self._constants and list(self._constants[name].dims) in ([], [1]) for name in numbers
        )
        if after.op_type != "DequantizeLinear" or after.input[0] != node.output[0] or not scalar:
            return []
        self._removed.add(readers[0])
        weight = self._dequantize([node.input[0], *numbers], None, "")
        gather = copied(node)
        gather.name = node.name.removesuffix("_quant")
        gather.input[0], gather.output[0] = weight.output[0], after.output[0]
        return [*self._pop_made(), gather]

    # ---- pairs ------------------------------------------------------------------------------------

    def _fed(
        self, before: onnx.NodeProto, quantize: onnx.NodeProto | None, weights: list[onnx.NodeProto]
    ) -> list[onnx.NodeProto]:
        """The operator behind the pair of its activation, which is new with the first reader, and its weights."""
        source = before.input[0]
        quantize = quantize or self._known.get((self._scope, source))
        if quantize is None:
            names = [self._names.free(f"{source}{part}") for part in ("_quantized", "_scale", "_zero_point")]
            quantize = helper.make_node(QUANTIZE, [source], names, self._names.free(f"{source}_{QUANTIZE}"))
            self._made.append(quantize)
            self._known[self._scope, source] = quantize
        node = copied(before)
        dequantize = self._dequantize(list(quantize.output), None, source)
        node.input[0] = dequantize.output[0]
        for index, weight in enumerate(weights, start=1):
            node.input[index] = weight.output[0]
        return [*self._pop_made(), node]

    def _pop_made(self) -> list[onnx.NodeProto]:
        """The nodes of pairs that were made for the current operator."""
        made, self._made = self._made, []
        return made

    def _dequantize(
        self, inputs: list[str], axis: int | None, carried: str, block: int = 0
    ) -> onnx.NodeProto:
        if (known := self._known.get((self._scope, *inputs))) is not None:
            return known
        first = inputs[0].removesuffix("_quantized")
        node = helper.make_node(
            "DequantizeLinear",
            inputs,
            [self._names.free(f"{first}_dequantized")],
            self._names.free(f"{first}_DequantizeLinear"),
        )
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        if block:
            node.attribute.append(helper.make_attribute("block_size", block))
        if carried:
            node.metadata_props.add(key=CARRIED, value=carried)
        self._known[self._scope, *inputs] = node
        self._made.append(node)
        return node

    def _maker(self, tensor: str) -> onnx.NodeProto | None:
        index = self._producer.get(tensor)
        return None if index is None else self._nodes[index]

    def _other(self, node: onnx.NodeProto, tensor: str) -> str | None:
        """The other operand of a node with two."""
        others = [name for name in node.input if name != tensor]
        return others[0] if len(node.input) == 2 and len(others) == 1 else None


def _replaced(node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The node that a kernel of ours computes, from its metadata."""
    text = metadata(node, REPLACED)
    try:
        return None if text is None else onnx.NodeProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None


def _trimmed(names: Iterable[str]) -> list[str]:
    """Names without empty ones at the end."""
    kept = list(names)
    while kept and not kept[-1]:
        kept.pop()
    return kept
