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

from qdqspec.graph.dynamic_kernels import ATTENTION, CARRIED, IMPORTS, LSTM, LSTM_INPUTS, QUANTIZE, REPLACED
from qdqspec.graph.flat import free_name, names_in
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    copied,
    metadata,
    padded_inputs,
    refill,
    trimmed_inputs,
    without_unread,
)

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
    """Examines every node; replacements are recorded in ``_instead`` and ``_removed``, by the index of the node."""

    def __init__(self, model: Model, reference: Model | None) -> None:
        self._model = model
        self._reference = reference
        self._constants = model.constants
        self._free = partial(free_name, taken=names_in(model.flat.graph))
        self._instead: dict[int, list[onnx.NodeProto]] = {}
        self._removed: set[int] = set()
        self._changed: dict[str, TensorProto] = {}  # initializers
        self._made: list[onnx.NodeProto] = []  # halves of pairs for the node that is looked at, of this scope
        self._scope = ""
        self._known: dict[tuple[str, ...], onnx.NodeProto] = {}  # by scope and inputs: halves of pairs so far

    def proto(self) -> onnx.ModelProto:
        flat = self._model.flat
        for node in self._model.nodes:
            self._scope, self._made = node.scope, []
            if node.op_type in (QUANTIZE, "DequantizeLinear") and is_default(node):
                self._known.setdefault((self._scope, *node.inputs), node.proto)
            if new := self._raise_node(node.proto):
                self._instead[node.index] = new
        if not self._instead:
            return flat
        old = [self._model.nodes[i].proto for i in (*self._instead, *self._removed)]
        nodes = [
            new
            for node in self._model.nodes
            for new in self._instead.get(node.index, () if node.index in self._removed else (node.proto,))
        ]
        # without products of scales, transposed weights, and biases in integers, which only the kernels read
        proto = without_unread(flat, nodes, (name for node in old for name in node.input))
        for tensor in proto.graph.initializer:
            tensor.CopyFrom(self._changed.get(tensor.name, tensor))
        kernels = [node for node in old if node.domain == CONTRIBUTED]
        foreign = all(metadata(node, REPLACED) is None for node in kernels)
        ours = any(metadata(node, IMPORTS) is not None for node in kernels)
        if kernels and (foreign or ours) and all(node.domain != CONTRIBUTED for node in proto.graph.node):
            # the domain was imported for the kernels alone
            refill(proto.opset_import, [o for o in proto.opset_import if o.domain != CONTRIBUTED])
        return proto

    def _raise_node(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type == "MatMulInteger" and is_default(node):
            return self._product(node)
        if node.op_type == "ConvInteger" and is_default(node):
            return self._convolution(node)
        if node.op_type == LSTM and node.domain == CONTRIBUTED:
            return self._lstm(node)
        if node.op_type == ATTENTION and node.domain == CONTRIBUTED:
            return self._attention(node)
        if node.op_type == "Sum" and metadata(node, REPLACED) is not None:  # it was an Add
            add = copied(node)
            add.op_type = "Add"
            refill(add.metadata_props, [prop for prop in node.metadata_props if prop.key != REPLACED])
            return [add]
        if node.op_type == "Gather" and is_default(node) and node.input[0] in self._constants:
            return self._gather(node)
        return []

    # ---- MatMulInteger ----------------------------------------------------------------------------

    def _product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """MatMul or Gemm on dequantized operands, in the place of the first node of the chain."""
        quantize = self._find_quantizer(node.input[0], *node.input[2:3])
        steps = self._follow_chain(node)
        stored, is_transposed = self._find_stored(node.input[1], [1, 0])
        if quantize is None or stored is None or len(steps) < 2:
            return []
        scale = self._find_weight_scale(steps, quantize.output[1])
        if scale not in self._constants:
            return []
        dims = self._constants[stored].dims
        is_single = list(self._constants[scale].dims) in ([], [1])
        if not is_single and (len(dims) != 2 or len(self._constants[scale].dims) != 1):
            return []
        count, before = 2, self._find_original(node, quantize, steps[1])
        if before is None and len(steps) > count:
            count, before = 3, self._find_original(node, quantize, steps[2])
        if before is None:
            count, before = 2, self._guess_original("MatMul", [quantize.input[0], ""], steps[1], node)
        if attribute_of(before, "transB", 0) and not is_transposed:
            self._transpose(stored, [1, 0])
        elif is_transposed and not attribute_of(before, "transB", 0):
            return []
        self._removed.update(self._model.producer[step.output[0]].index for step in steps[:count])
        axis = None if is_single else int(not attribute_of(before, "transB", 0))
        weight = self._dequantize([stored, scale, *node.input[3:4]], axis, before.input[1])
        return self._feed_operator(before, quantize, [weight])

    def _find_original(
        self, node: onnx.NodeProto, quantize: onnx.NodeProto, last: onnx.NodeProto
    ) -> onnx.NodeProto | None:
        """The node that was replaced by a chain that ends here, from its metadata or the reference.

        A tool that has no integer kernel for Gemm makes a product and a sum of it, with the weight transposed.
        """
        known = _read_replaced(node, last)
        if known is not None:
            return known
        found = None if self._reference is None else self._reference.producer.get(last.output[0])
        if found is None or found.op_type != "Gemm" or found.inputs[0] != quantize.input[0]:
            return None
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        same = all(attribute_of(found.proto, name, value) == value for name, value in plain.items())
        bias = found.input_at(2)
        fits = bool(bias) == (last.op_type == "Add") and (not bias or bias in last.input)
        return found.proto if same and fits else None

    def _guess_original(
        self, op_type: str, inputs: list[str], last: onnx.NodeProto, kernel: onnx.NodeProto, domain: str = ""
    ) -> onnx.NodeProto:
        """The operator that a kernel of another tool computes, up to the ``last`` node; weights have no name here.

        It is the reference's node, if that is equal except for its weights, its name and the order of attributes.
        """
        name = kernel.name.removesuffix("_quant")
        node = helper.make_node(op_type, inputs, last.output, name, domain=domain)
        node.attribute.extend(kernel.attribute)
        found = None if self._reference is None else self._reference.producer.get(node.output[0])
        if found is None or found.op_type != op_type or len(found.inputs) != len(inputs):
            return node
        own, other = (sorted(a.SerializeToString() for a in n.attribute) for n in (node, found.proto))
        same = zip(found.inputs, inputs, strict=True)
        is_same = own == other and all(one == mine or not mine for one, mine in same)
        return found.proto if is_same else node

    def _transpose(self, stored: str, perm: list[int]) -> None:
        values = numpy_helper.to_array(self._constants[stored]).transpose(perm)
        self._changed[stored] = numpy_helper.from_array(np.array(values, order="C"), stored)

    def _find_quantizer(self, tensor: str, zero_point: str = "") -> onnx.NodeProto | None:
        """The node that found the range of an operand at run time."""
        found = self._find_maker(tensor)
        if found is None or found.op_type != QUANTIZE or not is_default(found):
            return None
        return found if [found.output[0], found.output[2]] == [tensor, zero_point] else None

    def _follow_chain(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes behind a product of integers, each the only reader of the one before: to float, scales, a bias."""
        steps: list[onnx.NodeProto] = []
        for op_type in ("Cast", "Mul", "Add"):
            follower = self._find_only_reader((steps[-1] if steps else node).output[0])
            if follower is None or follower.op_type != op_type or not is_default(follower):
                break
            if op_type == "Cast" and attribute_of(follower, "to", 0) != TensorProto.FLOAT:
                break
            steps.append(follower)
        return steps

    def _find_weight_scale(self, steps: Sequence[onnx.NodeProto], scale: str) -> str:
        """The factor of the activation's scale in the product of scales of a chain; empty for none."""
        maker = self._find_maker(self._find_other_operand(steps[1], steps[0].output[0]) or "")
        if maker is None or maker.op_type != "Mul":
            return ""
        return self._find_other_operand(maker, scale) or ""

    def _find_stored(self, tensor: str, perm: list[int]) -> tuple[str | None, bool]:
        """The stored integers behind an operand, and whether they are transposed in between."""
        if tensor in self._constants:
            return tensor, False
        maker = self._find_maker(tensor)
        if maker is None or maker.op_type != "Transpose" or maker.input[0] not in self._constants:
            return None, False
        return (maker.input[0], True) if attribute_of(maker, "perm", None) == perm else (None, False)

    # ---- ConvInteger ------------------------------------------------------------------------------

    def _convolution(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Conv on dequantized operands with the bias that was split off, in place of the first node of the chain."""
        quantize = self._find_quantizer(node.input[0], *node.input[2:3])
        steps = self._follow_chain(node)
        if quantize is None or len(steps) < 2:
            return []
        scale = self._find_weight_scale(steps, quantize.output[1])
        numbers = [node.input[1], scale, *node.input[3:4]]
        # a node for a constant that the tool did not see as one
        maker = self._find_quantizer(node.input[1], *node.input[3:4])
        weight = self._constants.get(node.input[1] if maker is None else maker.input[0])
        known = self._constants.get(scale)
        is_single = bool(maker) if known is None else list(known.dims) in ([], [1])
        if weight is None or not is_single or (maker is not None and numbers != list(maker.output)):
            return []
        bias = None
        has_own_sum = self._reference is not None and steps[1].output[0] in self._reference.producer
        if len(steps) > 2 and not has_own_sum:
            bias = self._find_bias(self._find_other_operand(steps[2], steps[1].output[0]), list(weight.dims))
        steps = steps if bias else steps[:2]
        inputs = [quantize.input[0], "", *([bias] if bias else [])]
        before = self._guess_original("Conv", inputs, steps[-1], node)
        self._removed.update(self._model.producer[step.output[0]].index for step in steps)
        return self._feed_operator(before, quantize, [self._dequantize(numbers, None, before.input[1])])

    def _find_bias(self, tensor: str | None, weight: list[int]) -> str | None:
        """The constant that an operand gives the shape of a bias."""
        shape: list[int] = []
        while (maker := self._find_maker(tensor or "")) is not None and maker.op_type == "Reshape":
            if (to := self._constants.get(maker.input[1])) is not None:
                shape = numpy_helper.to_array(to).tolist()
            tensor = maker.input[0]
        found = self._constants.get(tensor or "")
        wanted = [1, weight[0], *[1] * (len(weight) - 2)]
        is_bias = found is not None and list(found.dims) == weight[:1]
        return tensor if is_bias and shape in (wanted, [1, -1, *wanted[2:]]) else None

    # ---- DynamicQuantizeLSTM ----------------------------------------------------------------------

    def _lstm(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        numbers = list(node.input[LSTM_INPUTS:])
        found = [self._find_stored(node.input[i], _TRANSPOSED) for i in (1, 2)]
        if len(numbers) < 4 or any(stored is None for stored, _ in found):
            return []
        if not all(name in self._constants for name in numbers):
            return []
        before = _read_replaced(node, node)
        if before is None:
            inputs = trimmed_inputs([node.input[0], "", "", *node.input[3:LSTM_INPUTS]], least=3)
            before = self._guess_original("LSTM", inputs, node, node)
        weights = []
        for index, (found_weight, is_transposed) in enumerate(found):
            stored, (scale, zero) = str(found_weight), numbers[2 * index : 2 * index + 2]
            if not is_transposed:
                self._transpose(stored, _TRANSPOSED)
            directions, rows, depth = (self._changed.get(stored) or self._constants[stored]).dims
            shape: tuple[int, ...] = (directions,)
            axis, block, blocks = 0, 0, 1
            if (
                len(self._constants[scale].dims) > 1
            ):  # one for each row; of two directions, only blocks are these
                shape, axis = (rows,), 1
                if directions > 1:
                    shape, axis, block, blocks = (directions, rows, 1), 2, _ROW_BLOCK, -(-depth // _ROW_BLOCK)
            for name in (scale, zero):
                values = numpy_helper.to_array(self._constants[name]).reshape(shape)
                values = np.repeat(values, blocks, axis=-1) if blocks > 1 else values
                self._changed[name] = numpy_helper.from_array(np.array(values, order="C"), name)
            weights.append(self._dequantize([stored, scale, zero], axis, before.input[1 + index], block))
        return self._feed_operator(before, None, weights)

    # ---- QAttention -------------------------------------------------------------------------------

    def _attention(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Attention on dequantized operands; one whose input has a stored scale is unchanged."""
        data, stored, bias, data_scale, scale, mask, data_zero, zero, past = padded_inputs(node, 9)
        quantize = self._find_quantizer(data, data_zero)
        is_known = all(name in self._constants for name in (stored, scale, zero) if name)
        if quantize is None or data_scale != quantize.output[1] or not is_known:
            return []
        before = _read_replaced(node, node)
        if before is None:
            inputs = trimmed_inputs([quantize.input[0], "", bias, mask, past])
            before = self._guess_original("Attention", inputs, node, node, CONTRIBUTED)
        axis = None if list(self._constants[scale].dims) in ([], [1]) else 1
        weight = self._dequantize([stored, scale, zero], axis, before.input[1])
        return self._feed_operator(before, quantize, [weight])

    # ---- Gather -----------------------------------------------------------------------------------

    def _gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A Gather of dequantized values in the place of the DequantizeLinear of gathered integers."""
        after = self._find_only_reader(node.output[0])
        if after is None or after.op_type != "DequantizeLinear" or after.input[0] != node.output[0]:
            return []
        numbers = list(after.input[1:])
        if not all(name in self._constants for name in numbers) or attribute_of(after, "block_size", 0):
            return []
        axis = None
        if any(list(self._constants[name].dims) not in ([], [1]) for name in numbers):
            indices, rank = self._model.shape(node.input[1]), len(self._constants[node.input[0]].dims)
            if indices is None:
                return []
            # in the place of this axis of the table, the result has the axes of the indices
            first = attribute_of(node, "axis", 0) % rank
            axis = attribute_of(after, "axis", 1) % (rank - 1 + len(indices))
            if first <= axis < first + len(indices):
                return []
            axis -= len(indices) - 1 if axis >= first else 0
        self._removed.add(self._model.producer[after.output[0]].index)
        weight = self._dequantize([node.input[0], *numbers], axis, "")
        gather = copied(node)
        gather.name = node.name.removesuffix("_quant")
        gather.input[0], gather.output[0] = weight.output[0], after.output[0]
        return [*self._made, gather]

    # ---- pairs ------------------------------------------------------------------------------------

    def _feed_operator(
        self, before: onnx.NodeProto, quantize: onnx.NodeProto | None, weights: list[onnx.NodeProto]
    ) -> list[onnx.NodeProto]:
        """The operator behind the pair of its activation, which is new with the first reader, and its weights."""
        source = before.input[0]
        quantize = quantize or self._known.get((self._scope, source))
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

    def _find_maker(self, tensor: str) -> onnx.NodeProto | None:
        found = self._model.producer.get(tensor)
        return None if found is None else found.proto

    def _find_only_reader(self, tensor: str) -> onnx.NodeProto | None:
        readers = {node.index: node.proto for node in self._model.readers(tensor)}
        is_alone = len(readers) == 1 and tensor not in {*self._model.outputs, *self._model.subgraph_reads}
        return next(iter(readers.values())) if is_alone else None

    def _find_other_operand(self, node: onnx.NodeProto, tensor: str) -> str | None:
        """The other operand of a node with two."""
        others = [name for name in node.input if name != tensor]
        return others[0] if len(node.input) == 2 and len(others) == 1 else None


def _read_replaced(node: onnx.NodeProto, last: onnx.NodeProto) -> onnx.NodeProto | None:
    """The node that a kernel of ours computes, from its metadata, if its outputs are those of the ``last`` one."""
    try:
        text = metadata(node, REPLACED) or ""
        found = onnx.NodeProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None
    return found if list(found.output) == list(last.output) else None
