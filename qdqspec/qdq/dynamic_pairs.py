"""Operators that compute in integers with ranges found at run time, in their Q/DQ form: see `dynamic_kernels`.

`with_pairs` is for models of other tools too: ``quantize_dynamic`` writes the same kernels under other names, and
stores the weights of a DynamicQuantizeLSTM transposed. An embedding that it quantizes is a Gather of integers before
the DequantizeLinear.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph import Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    copied,
    free_name,
    metadata,
    names_in,
    padded_inputs,
    refill,
    replace_values,
    trimmed_inputs,
    without_unread,
)
from qdqspec.qdq.dynamic_kernels import ATTENTION, CARRIED, IMPORTS, LSTM, LSTM_INPUTS, QUANTIZE, REPLACED

_READ = frozenset({"ConvInteger", "MatMulInteger", ATTENTION, LSTM, "Gather", "Sum"})
_TRANSPOSED = [0, 2, 1]
# Size of the blocks in which a weight of two directions has a scale for each row: all blocks of a row have the same
# scale. It is the largest of a format of integers, so that a row has few.
_ROW_BLOCK = 256


def with_pairs(model: Model, reference: Model | None = None) -> Model:
    """The model with Q/DQ pairs in the place of kernels with dynamic ranges; itself where it has none.

    A kernel that is used otherwise, with computed weights for example, is unchanged. The ``reference``, the model
    before quantization, shows where another tool split a Gemm.
    """
    if not any(node.op_type in _READ for node in model.nodes):
        return model
    proto = _Raising(model, reference).proto()
    return model if proto is model.flat else Model(proto, path=model.path)


class _Raising:
    """Examines every node; ``_instead`` has the nodes that replace one, none for one that is removed, by its index."""

    def __init__(self, model: Model, reference: Model | None) -> None:
        self._model = model
        self._in_reference = {} if reference is None else reference.producer
        self._constants = model.constants
        self._free = partial(free_name, taken=names_in(model.flat.graph))
        self._instead: dict[int, list[onnx.NodeProto]] = {}
        self._changed: dict[str, TensorProto] = {}  # constants
        self._made: list[onnx.NodeProto] = []  # halves of pairs for the node that is looked at, of this scope
        self._scope = ""
        self._known: dict[tuple[str, ...], onnx.NodeProto] = {}  # by scope and inputs: halves of pairs so far

    def proto(self) -> onnx.ModelProto:
        flat = self._model.flat
        for node in self._model.nodes:
            self._scope, self._made = node.scope, []
            if node.op_type in (QUANTIZE, "DequantizeLinear") and is_default(node):
                self._known.setdefault((self._scope, *node.inputs), node.proto)
            if new := self._raise_node(node):
                self._instead[node.index] = new
        if not self._instead:
            return flat
        old = [self._model.nodes[index].proto for index in self._instead]
        nodes = [new for node in self._model.nodes for new in self._instead.get(node.index, (node.proto,))]
        # without products of scales, transposed weights, and biases in integers, which only the kernels read
        proto = without_unread(flat, nodes, (name for node in old for name in node.input))
        replace_values(proto.graph, self._changed)
        kernels = [node for node in old if node.domain == CONTRIBUTED]
        foreign = all(metadata(node, REPLACED) is None for node in kernels)
        ours = any(metadata(node, IMPORTS) is not None for node in kernels)
        if kernels and (foreign or ours) and all(node.domain != CONTRIBUTED for node in proto.graph.node):
            # the domain was imported for the kernels alone
            refill(proto.opset_import, [o for o in proto.opset_import if o.domain != CONTRIBUTED])
        return proto

    def _raise_node(self, node: Node) -> list[onnx.NodeProto]:
        """The nodes in the place of a kernel, or of the first node of its chain; none if it stays."""
        match node.domain if node.domain == CONTRIBUTED else is_default(node), node.op_type:
            case True, "MatMulInteger":
                return self._product(node)
            case True, "ConvInteger":
                return self._convolution(node)
            case True, "Gather" if node.inputs[0] in self._constants:
                return self._gather(node)
            case True, "Sum" if metadata(node.proto, REPLACED) is not None:  # it was an Add
                add = copied(node.proto)
                add.op_type = "Add"
                refill(add.metadata_props, [prop for prop in add.metadata_props if prop.key != REPLACED])
                return [add]
            case "com.microsoft", "DynamicQuantizeLSTM":
                return self._lstm(node)
            case "com.microsoft", "QAttention":
                return self._attention(node)
        return []

    # ---- products of integers ---------------------------------------------------------------------

    def _product(self, node: Node) -> list[onnx.NodeProto]:
        """MatMul or Gemm on dequantized operands.

        A tool that has no integer kernel for Gemm makes a product and a sum of it, with the weight transposed.
        """
        quantize, steps = self._find_quantizer(node.inputs[0], node.input_at(2)), self._follow_chain(node)
        stored, is_transposed = self._find_stored(node.inputs[1], [1, 0])
        scale = self._find_weight_scale(quantize, steps)
        if quantize is None or not stored or scale not in self._constants:
            return []
        is_single = self._is_single(scale)
        if not is_single and (len(self._constants[stored].dims), len(self._constants[scale].dims)) != (2, 1):
            return []
        # the node that the chain replaced, up to its product of scales or its sum
        found = ((step, _read_replaced(node, step) or self._find_gemm(quantize, step)) for step in steps[1:])
        guess = self._guess_original("MatMul", [quantize.inputs[0], ""], steps[1], node)
        last, before = next(((step, known) for step, known in found if known is not None), (steps[1], guess))
        by_rows = bool(attribute_of(before, "transB", 0))
        if is_transposed and not by_rows:
            return []
        if by_rows and not is_transposed:
            self._transpose(stored, [1, 0])
        self._remove(steps[: steps.index(last) + 1])
        columns = self._constants[stored].dims[0 if is_transposed else -1]
        if columns == 1 and self._constants[scale].dims:  # the scale of the only column
            is_single = False
        axis = None if is_single else int(not by_rows)
        weight = self._dequantize([stored, scale, node.input_at(3)], axis, before.input[1])
        return self._feed_operator(before, quantize, [weight])

    def _find_gemm(self, quantize: Node, last: Node) -> onnx.NodeProto | None:
        """The Gemm of the reference that a chain computes up to its ``last`` node."""
        found = self._in_reference.get(last.outputs[0])
        if found is None or found.op_type != "Gemm" or found.inputs[0] != quantize.inputs[0]:
            return None
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        same = all(attribute_of(found.proto, name, value) == value for name, value in plain.items())
        bias = found.input_at(2)
        fits = bool(bias) == (last.op_type == "Add") and (not bias or bias in last.inputs)
        return found.proto if same and fits else None

    def _convolution(self, node: Node) -> list[onnx.NodeProto]:
        """Conv on dequantized operands, with the bias that was split off."""
        quantize, steps = self._find_quantizer(node.inputs[0], node.input_at(2)), self._follow_chain(node)
        numbers = [node.inputs[1], self._find_weight_scale(quantize, steps), node.input_at(3)]
        if maker := self._find_quantizer(node.inputs[1], node.input_at(3)):  # for a constant that is a node
            weight, is_single = self._constants.get(maker.inputs[0]), numbers == [*maker.outputs]
        else:
            weight = self._constants.get(numbers[0])
            is_single = numbers[1] in self._constants and self._is_single(numbers[1])
        if quantize is None or weight is None or not is_single:
            return []
        bias = None
        if len(steps) > 2 and steps[1].outputs[0] not in self._in_reference:
            bias = self._find_bias(_other_operand(steps[2], steps[1].outputs[0]), list(weight.dims))
        steps = steps if bias else steps[:2]
        inputs = [quantize.inputs[0], "", *([bias] if bias else [])]
        before = self._guess_original("Conv", inputs, steps[-1], node)
        self._remove(steps)
        return self._feed_operator(before, quantize, [self._dequantize(numbers, None, before.input[1])])

    def _find_bias(self, tensor: str, weight: list[int]) -> str:
        """The constant that an operand gives the shape of a bias."""
        shape: list[int] = []
        while (maker := self._model.producer.get(tensor)) is not None and maker.op_type == "Reshape":
            if maker.inputs[1] in self._constants:
                shape = self._model.array(maker.inputs[1]).tolist()
            tensor = maker.inputs[0]
        found = self._constants.get(tensor)
        wanted = [1, weight[0], *[1] * (len(weight) - 2)]
        is_bias = found is not None and list(found.dims) == weight[:1]
        return tensor if is_bias and shape in (wanted, [1, -1, *wanted[2:]]) else ""

    def _find_quantizer(self, tensor: str, zero_point: str) -> Node | None:
        """The node that found the range of an operand at run time."""
        found = self._model.producer.get(tensor)
        if found is None or found.op_type != QUANTIZE or not is_default(found):
            return None
        return found if (found.outputs[0], found.outputs[2]) == (tensor, zero_point) else None

    def _follow_chain(self, node: Node) -> list[Node]:
        """The nodes behind a product of integers, each the only reader of the one before: to float, scales, a bias."""
        steps: list[Node] = []
        for op_type in ("Cast", "Mul", "Add"):
            follower = self._find_only_reader((steps[-1] if steps else node).outputs[0])
            if follower is None or follower.op_type != op_type or not is_default(follower):
                break
            if op_type == "Cast" and follower.number("to", 0) != TensorProto.FLOAT:
                break
            steps.append(follower)
        return steps

    def _find_weight_scale(self, quantize: Node | None, steps: Sequence[Node]) -> str:
        """The factor of the activation's scale in the product of scales of a chain; empty for none."""
        if quantize is None or len(steps) < 2:
            return ""
        maker = self._model.producer.get(_other_operand(steps[1], steps[0].outputs[0]))
        return _other_operand(maker, quantize.outputs[1]) if maker and maker.op_type == "Mul" else ""

    def _find_stored(self, tensor: str, perm: list[int]) -> tuple[str, bool]:
        """The stored integers behind an operand, and whether they are transposed in between."""
        if tensor in self._constants:
            return tensor, False
        maker = self._model.producer.get(tensor)
        if maker is None or maker.op_type != "Transpose" or maker.inputs[0] not in self._constants:
            return "", False
        return (maker.inputs[0], True) if attribute_of(maker.proto, "perm", None) == perm else ("", False)

    def _is_single(self, scale: str) -> bool:
        return list(self._constants[scale].dims) in ([], [1])

    def _remove(self, steps: Sequence[Node]) -> None:
        self._instead.update((step.index, []) for step in steps)

    def _guess_original(
        self, op_type: str, inputs: list[str], last: Node, kernel: Node, domain: str = ""
    ) -> onnx.NodeProto:
        """The operator that a kernel of another tool computes, up to the ``last`` node; weights have no name here.

        It is the reference's node, if that is equal except for its weights, its name and the order of attributes.
        """
        name = kernel.proto.name.removesuffix("_quant")
        node = helper.make_node(op_type, inputs, last.proto.output, name, domain=domain)
        node.attribute.extend(kernel.proto.attribute)
        found = self._in_reference.get(node.output[0])
        if found is None or found.op_type != op_type or len(found.inputs) != len(inputs):
            return node
        own, other = (sorted(a.SerializeToString() for a in n.attribute) for n in (node, found.proto))
        same = zip(found.inputs, inputs, strict=True)
        is_same = own == other and all(one == mine or not mine for one, mine in same)
        return found.proto if is_same else node

    def _transpose(self, stored: str, perm: list[int]) -> None:
        values = self._model.array(stored).transpose(perm)
        self._changed[stored] = numpy_helper.from_array(np.array(values, order="C"), stored)

    # ---- DynamicQuantizeLSTM ----------------------------------------------------------------------

    def _lstm(self, node: Node) -> list[onnx.NodeProto]:
        numbers = node.inputs[LSTM_INPUTS:]
        found = [self._find_stored(node.inputs[i], _TRANSPOSED) for i in (1, 2)]
        if len(numbers) < 4 or not all(n in self._constants for n in (*numbers, found[0][0], found[1][0])):
            return []
        inputs = trimmed_inputs([node.inputs[0], "", "", *node.inputs[3:LSTM_INPUTS]], least=3)
        before = _read_replaced(node, node) or self._guess_original("LSTM", inputs, node, node)
        weights = []
        for index, (stored, is_transposed) in enumerate(found):
            scale, zero = numbers[2 * index : 2 * index + 2]
            if not is_transposed:
                self._transpose(stored, _TRANSPOSED)
            directions, rows, depth = (self._changed.get(stored) or self._constants[stored]).dims
            shape: tuple[int, ...] = (directions,)
            axis, block, blocks = 0, 0, 1
            # one for each row; of two directions, only blocks are these
            if len(self._constants[scale].dims) > 1:
                shape, axis = (rows,), 1
                if directions > 1:
                    shape, axis, block, blocks = (directions, rows, 1), 2, _ROW_BLOCK, -(-depth // _ROW_BLOCK)
            for name in (scale, zero):
                values = self._model.array(name).reshape(shape)
                values = np.repeat(values, blocks, axis=-1) if blocks > 1 else values
                self._changed[name] = numpy_helper.from_array(np.array(values, order="C"), name)
            weights.append(self._dequantize([stored, scale, zero], axis, before.input[1 + index], block))
        return self._feed_operator(before, None, weights)

    # ---- QAttention -------------------------------------------------------------------------------

    def _attention(self, node: Node) -> list[onnx.NodeProto]:
        """Attention on dequantized operands; one whose input has a stored scale is unchanged."""
        data, stored, bias, data_scale, scale, mask, data_zero, zero, past = padded_inputs(node.proto, 9)
        quantize = self._find_quantizer(data, data_zero)
        is_known = all(name in self._constants for name in (stored, scale, zero) if name)
        if quantize is None or data_scale != quantize.outputs[1] or not is_known:
            return []
        inputs = trimmed_inputs([quantize.inputs[0], "", bias, mask, past])
        before = _read_replaced(node, node) or self._guess_original(
            "Attention", inputs, node, node, CONTRIBUTED
        )
        axis = None if self._is_single(scale) else 1
        weight = self._dequantize([stored, scale, zero], axis, before.input[1])
        return self._feed_operator(before, quantize, [weight])

    # ---- Gather -----------------------------------------------------------------------------------

    def _gather(self, node: Node) -> list[onnx.NodeProto]:
        """A Gather of dequantized values in the place of the DequantizeLinear of gathered integers."""
        after = self._find_only_reader(node.outputs[0])
        if after is None or after.op_type != "DequantizeLinear" or after.inputs[0] != node.outputs[0]:
            return []
        numbers = after.inputs[1:]
        if not all(name in self._constants for name in numbers) or after.number("block_size", 0):
            return []
        axis = None
        if not all(map(self._is_single, numbers)):
            indices, rank = self._model.shape(node.inputs[1]), len(self._constants[node.inputs[0]].dims)
            if indices is None:
                return []
            # in the place of this axis of the table, the result has the axes of the indices
            first = node.number("axis", 0) % rank
            axis = after.number("axis", 1) % (rank - 1 + len(indices))
            if first <= axis < first + len(indices):
                return []
            axis -= len(indices) - 1 if axis >= first else 0
        self._remove([after])
        weight = self._dequantize([node.inputs[0], *numbers], axis, "")
        gather = copied(node.proto)
        gather.name = gather.name.removesuffix("_quant")
        gather.input[0], gather.output[0] = weight.output[0], after.outputs[0]
        return [*self._made, gather]

    # ---- pairs ------------------------------------------------------------------------------------

    def _feed_operator(
        self, before: onnx.NodeProto, known: Node | None, weights: list[onnx.NodeProto]
    ) -> list[onnx.NodeProto]:
        """The operator behind the pair of its activation, which is new with the first reader, and its weights."""
        source = before.input[0]
        quantize = self._known.get((self._scope, source)) if known is None else known.proto
        if quantize is None:
            names = [self._free(f"{source}{part}") for part in ("_quantized", "_scale", "_zero_point")]
            quantize = helper.make_node(QUANTIZE, [source], names, self._free(f"{source}_{QUANTIZE}"))
            self._made.append(quantize)
            self._known[self._scope, source] = quantize
        node = copied(before)
        dequantize = self._dequantize(list(quantize.output), None, source)
        node.input[0] = dequantize.output[0]
        for index, weight in enumerate(weights, start=1):
            node.input[index] = weight.output[0]
        return [*self._made, node]

    def _dequantize(
        self, inputs: list[str], axis: int | None, carried: str, block: int = 0
    ) -> onnx.NodeProto:
        inputs = list(filter(None, inputs))
        if (known := self._known.get((self._scope, *inputs))) is not None:
            return known
        first = inputs[0].removesuffix("_quantized")
        output, name = self._free(f"{first}_dequantized"), self._free(f"{first}_DequantizeLinear")
        attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
        attributes |= {"block_size": block} if block else {}
        node = helper.make_node("DequantizeLinear", inputs, [output], name, **attributes)
        if carried:
            node.metadata_props.add(key=CARRIED, value=carried)
        self._known[self._scope, *inputs] = node
        self._made.append(node)
        return node

    def _find_only_reader(self, tensor: str) -> Node | None:
        readers = {node.index: node for node in self._model.readers(tensor)}
        is_alone = len(readers) == 1 and tensor not in {*self._model.outputs, *self._model.subgraph_reads}
        return next(iter(readers.values())) if is_alone else None


def _other_operand(node: Node, tensor: str) -> str:
    """The other operand of a node with two; empty for none."""
    others = [name for name in node.inputs if name != tensor]
    return others[0] if len(node.inputs) == 2 and len(others) == 1 else ""


def _read_replaced(node: Node, last: Node) -> onnx.NodeProto | None:
    """The node that a kernel of ours computes, from its metadata, if its outputs are those of the ``last`` one."""
    try:
        text = metadata(node.proto, REPLACED) or ""
        found = onnx.NodeProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None
    return found if tuple(found.output) == last.outputs else None
