"""Operators that compute in integers with ranges found at run time, made of a Q/DQ form of the same computation.

In the Q/DQ form a DynamicQuantizeLinear and a DequantizeLinear are the pair of an activation, a DequantizeLinear
behind stored integers is the weight, and the operator itself is unchanged: MatMul, Gemm, LSTM, or Attention of domain
``com.microsoft``. Runtimes have kernels for another form of the same:

- ``DynamicQuantizeLinear > MatMulInteger > Cast > Mul``, and ``Add`` for the bias of a Gemm, all standard ONNX
  operators, fused into ``DynamicQuantizeMatMul`` or ``MatMulIntegerToFloat``;
- ``DynamicQuantizeLSTM`` of domain ``com.microsoft``, which quantizes its input and hidden state itself;
- ``DynamicQuantizeLinear > QAttention`` of the same domain;
- ``DynamicQuantizeLinear > ConvInteger > Cast > Mul`` of a Conv, which `with_pairs` reads and `with_kernels` does not
  make.

A float sum of two tensors that a LayerNormalization reads becomes ``Sum``, which computes the same: an ``Add`` is fused
with the normalization into SkipLayerNormalization, which takes 2 to 30 times the time of both (docs/decisions/0019).

`with_kernels` replaces the first form by the second, `with_pairs` the second by the first. The node that was replaced
is metadata of the new one, so that names and attributes return exactly. `with_pairs` is for models of other tools too:
``quantize_dynamic`` writes the same kernels under other names, and stores the weights of a DynamicQuantizeLSTM
transposed. An embedding that it quantizes is a Gather of integers before the DequantizeLinear.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.flat import free_name, names_in, scopes_of
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default, is_fused_attention
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    copied,
    copy_model,
    metadata,
    names_read_inside,
    padded_inputs,
    refill,
    values_of_constants,
)

QUANTIZE = "DynamicQuantizeLinear"
LSTM = "DynamicQuantizeLSTM"
ATTENTION = "QAttention"
REPLACED = "qdqspec.replaced"  # node metadata: the node of the float model that this one computes, encoded
IMPORTS = "qdqspec.imports"  # node metadata: the domain that the model imports for this node only

CARRIED = "qdqspec.tensor"  # node metadata of inserted nodes: the tensor whose values the node carries

_INTEGERS = (TensorProto.INT8, TensorProto.UINT8)
_LSTM_INPUTS = 8  # of ONNX's operator; scales and zero points follow them
_LINEAR = ("MatMul", "Gemm")
# Size of the blocks in which a weight of two directions has a scale for each row: all blocks of a row have the same
# scale. It is the largest of a format of integers, so that a row has few.
_ROW_BLOCK = 256


def with_kernels(flat: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model, with integer kernels for operators behind dynamic pairs and stored weights.

    Operators that no kernel computes, and those with a float operand, keep their pairs.
    """
    return _Lowering(flat).proto()


def encoded(message: onnx.NodeProto | TensorProto) -> str:
    """A node or tensor as text for the metadata of a node."""
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode("ascii")


def constants_of(graph: onnx.GraphProto) -> Mapping[str, TensorProto]:
    """The initializers, and the outputs of Constant nodes."""
    return {t.name: t for t in graph.initializer} | dict(values_of_constants(graph.node))


class _Lowering:
    def __init__(self, flat: onnx.ModelProto) -> None:
        self._flat = flat
        graph = flat.graph
        self._producer = {name: node for node in graph.node for name in node.output if name}
        self._constants = constants_of(graph)
        self._free = partial(free_name, taken=names_in(graph))
        self._added: list[TensorProto] = []
        self._unread: set[str] = set()  # what only the operators replaced may have read
        self._imports = {opset.domain for opset in flat.opset_import}
        self._normalized = {
            node.input[0] for node in graph.node if node.op_type == "LayerNormalization" and is_default(node)
        }

    def proto(self) -> onnx.ModelProto:
        nodes = [new for node in self._flat.graph.node for new in self._lower_node(node)]
        if not self._unread:
            return self._flat
        nodes = self._sweep_pairs(nodes)
        read = {name for node in nodes for name in (*node.input, *names_read_inside(node))}
        read |= {output.name for output in self._flat.graph.output}
        proto = copy_model(self._flat, but={"node", "initializer"})
        proto.graph.node.extend(nodes)
        kept = (t for t in self._flat.graph.initializer if t.name in read or t.name not in self._unread)
        proto.graph.initializer.extend((*kept, *self._added))
        if CONTRIBUTED not in self._imports and any(node.domain == CONTRIBUTED for node in nodes):
            proto.opset_import.append(helper.make_opsetid(CONTRIBUTED, 1))
        return proto

    def _lower_node(self, node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        if self._is_fused_slowly(node):
            found = copied(node)
            found.op_type = "Sum"
            found.metadata_props.add(key=REPLACED, value=encoded(node))
            return (found,)
        is_known = is_default(node) and node.op_type in (*_LINEAR, "LSTM")
        pair = self._find_dynamic_pair(node) if is_known or is_fused_attention(node) else None
        if pair is None:
            return (node,)
        if is_fused_attention(node):
            weight = self._find_weight(node, 1)
            return (node,) if weight is None else self._attention(node, pair, weight)
        if node.op_type == "LSTM":
            weights = [self._find_weight(node, index) for index in (1, 2)]
            fits = all(weight is not None and self._rows(weight) for weight in weights)
            return self._lstm(node, pair) if fits and not attribute_of(node, "layout", 0) else (node,)
        return self._make_linear(node, pair) if self._fits_linear(node) else (node,)

    def _is_fused_slowly(self, node: onnx.NodeProto) -> bool:
        """Whether it adds two computed float tensors for a normalization."""
        if node.op_type != "Add" or not is_default(node) or node.output[0] not in self._normalized:
            return False
        makers = map(self._producer.get, node.input)
        return not any(name in self._constants for name in node.input) and not any(
            maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
        )

    def _find_dynamic_pair(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The DynamicQuantizeLinear behind the first operand."""
        after = self._producer.get(node.input[0])
        if after is None or after.op_type != "DequantizeLinear":
            return None
        found = self._producer.get(after.input[0])
        return found if found is not None and found.op_type == QUANTIZE else None

    def _find_weight(self, node: onnx.NodeProto, index: int) -> onnx.NodeProto | None:
        """The DequantizeLinear of stored 8-bit integers, with one scale a tensor or channel, of LSTM also in blocks."""
        found = self._producer.get(node.input[index])
        if found is None or found.op_type != "DequantizeLinear":
            return None
        if attribute_of(found, "block_size", 0) and node.op_type != "LSTM":
            return None
        known = all(name in self._constants for name in found.input if name)
        return found if known and self._constants[found.input[0]].data_type in _INTEGERS else None

    def _fits_linear(self, node: onnx.NodeProto) -> bool:
        weight = self._find_weight(node, 1)
        if weight is None:
            return False
        dims = self._constants[weight.input[0]].dims
        channels = len(dims) - 1
        if node.op_type == "Gemm":
            plain = attribute_of(node, "alpha", 1.0) == 1 and attribute_of(node, "beta", 1.0) == 1
            if not plain or attribute_of(node, "transA", 0):
                return False
            channels = 0 if attribute_of(node, "transB", 0) else 1
        scales = self._constants[weight.input[1]]
        single = int(np.prod(scales.dims)) == 1
        return single or (len(dims) == 2 and attribute_of(weight, "axis", 1) in (channels, channels - 2))

    def _rows(self, weight: onnx.NodeProto) -> tuple[int, ...]:
        """The shape of the kernel's scales: one a direction, or one a direction and row; empty for another one."""
        directions, rows, _ = self._constants[weight.input[0]].dims
        if attribute_of(weight, "block_size", 0):
            return (directions, rows) if self._has_equal_blocks(weight) else ()
        count, axis = int(np.prod(self._constants[weight.input[1]].dims)), attribute_of(weight, "axis", 1)
        if count == 1 or (axis == 0 and count == directions):
            return (directions,)
        return (1, rows) if (directions, axis, count) == (1, 1, rows) else ()

    def _has_equal_blocks(self, weight: onnx.NodeProto) -> bool:
        """Whether blocks along the last axis have the same scale and zero point in each row."""
        if attribute_of(weight, "axis", 1) not in (2, -1):
            return False
        numbers = (numpy_helper.to_array(self._constants[name]) for name in weight.input[1:])
        return all((values == values[..., :1]).all() for values in numbers)

    def _make_linear(self, node: onnx.NodeProto, pair: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        weight = self._producer[node.input[1]]
        integers, scale = weight.input[0], weight.input[1]
        if node.op_type == "Gemm" and attribute_of(node, "transB", 0):
            yield self._node("Transpose", node, "_weight", [integers], perm=[1, 0])
            integers = self._last
        zero_points = [pair.output[2], *weight.input[2:3]]
        product = self._node("MatMulInteger", node, "", [pair.output[0], integers, *zero_points])
        self._note_replaced(product, node, pair, (weight,))
        yield product
        yield self._node("Cast", node, "_cast", [self._last], to=TensorProto.FLOAT)
        real = self._last
        yield self._node("Mul", node, "_scale", [pair.output[1], scale])
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        result = self._node("Mul", node, "_scaled", [real, self._last])
        last = result
        yield result
        if bias:
            last = self._node("Add", node, "_bias", [result.output[0], bias])
            yield last
        last.output[0] = node.output[0]
        self._unread.update((node.input[0], node.input[1], *weight.input))

    def _lstm(self, node: onnx.NodeProto, pair: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        numbers: list[str] = []
        stored: list[str] = []
        weights = tuple(self._producer[node.input[index]] for index in (1, 2))
        for part, weight in zip(("W", "R"), weights, strict=True):
            yield self._node("Transpose", node, f"_{part}", [weight.input[0]], perm=[0, 2, 1])
            stored.append(self._last)
            numbers += self._make_lstm_numbers(node, weight, part)
        others = [*node.input[3:], *[""] * (_LSTM_INPUTS - len(node.input))]
        kernel = self._node(LSTM, node, "", [pair.input[0], *stored, *others, *numbers], domain=CONTRIBUTED)
        refill(kernel.output, node.output)
        kernel.attribute.extend(a for a in node.attribute if a.name != "layout")
        self._note_replaced(kernel, node, pair, weights)
        if CONTRIBUTED not in self._imports:
            kernel.metadata_props.add(key=IMPORTS, value=CONTRIBUTED)
        yield kernel
        self._unread.update((*node.input[:3], *(name for weight in weights for name in weight.input)))

    def _attention(
        self, node: onnx.NodeProto, pair: onnx.NodeProto, weight: onnx.NodeProto
    ) -> Iterator[onnx.NodeProto]:
        bias, mask, past = padded_inputs(node, 5)[2:]
        stored, scale, zero = padded_inputs(weight, 3)
        data, data_scale, data_zero = pair.output
        inputs = _trim([data, stored, bias, data_scale, scale, mask, data_zero, zero, past])
        kernel = self._node(ATTENTION, node, "", inputs, domain=CONTRIBUTED)
        refill(kernel.output, node.output)
        kernel.attribute.extend(node.attribute)
        self._note_replaced(kernel, node, pair, (weight,))
        yield kernel
        self._unread.update((*node.input[:2], *weight.input))

    def _make_lstm_numbers(self, node: onnx.NodeProto, weight: onnx.NodeProto, part: str) -> list[str]:
        """Scales and zero points as the kernel takes them."""
        shape = self._rows(weight)
        scale = numpy_helper.to_array(self._constants[weight.input[1]])
        kind = helper.tensor_dtype_to_np_dtype(self._constants[weight.input[0]].data_type)
        given = weight.input[2:3]
        zero = numpy_helper.to_array(self._constants[given[0]]) if given else np.zeros((), kind)
        names = []
        if attribute_of(weight, "block_size", 0):
            scale, zero = (values[..., :1] if values.ndim else values for values in (scale, zero))
        for values, what in ((scale, "scale"), (zero, "zero_point")):
            name = self._free(f"{node.name or node.output[0]}_{part}_{what}")
            values = np.broadcast_to(values.reshape(-1), shape) if values.size == 1 else values.reshape(shape)
            self._added.append(numpy_helper.from_array(np.array(values, order="C"), name))
            names.append(name)
        return names

    def _node(
        self, op_type: str, origin: onnx.NodeProto, part: str, inputs: list[str], **more: Any
    ) -> onnx.NodeProto:
        """A node in the place of ``origin``; without a ``part`` it has its name."""
        name = self._free(f"{origin.name or origin.output[0]}{part}") if part else origin.name
        self._last = self._free(f"{origin.output[0] or origin.name}{part or '_integers'}")
        return helper.make_node(op_type, inputs, [self._last], name=name, **more)

    def _note_replaced(
        self,
        kernel: onnx.NodeProto,
        node: onnx.NodeProto,
        pair: onnx.NodeProto,
        weights: Iterable[onnx.NodeProto],
    ) -> None:
        """Note in the metadata which node the kernel replaces, by the names of the float model."""
        original = copied(node)
        original.input[0] = pair.input[0]
        for index, weight in enumerate(weights, start=1):
            original.input[index] = metadata(weight, CARRIED) or weight.output[0]  # the float weight
        kernel.metadata_props.add(key=REPLACED, value=encoded(original))

    def _sweep_pairs(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The nodes less the pairs that nothing reads any more."""
        outputs = {output.name for output in self._flat.graph.output}
        read = Counter(name for node in nodes for name in (*node.input, *names_read_inside(node)))
        kept = []
        for node in reversed(nodes):
            is_pair = node.op_type in ("DequantizeLinear", QUANTIZE) and is_default(node)
            if is_pair and not any(read[name] or name in outputs for name in node.output):
                read.subtract(node.input)
                self._unread.update(node.input)
                continue
            kept.append(node)
        return kept[::-1]


_STORED = frozenset({
    TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT4, TensorProto.UINT4,
})  # fmt: skip
_KERNELS = frozenset({"ConvInteger", "MatMulInteger", ATTENTION, LSTM})
_CONVERTED = ("Cast", "Mul", "Add")  # behind a product of integers: to float, with the scales, and a bias
_TRANSPOSED = [0, 2, 1]


def with_pairs(model: Model, reference: Model | None = None) -> Model:
    """The model with Q/DQ pairs in the place of kernels with dynamic ranges; itself where it has none.

    A kernel that is used otherwise, with computed weights for example, is unchanged. The ``reference``, the model
    before quantization, shows where another tool split a Gemm.
    """
    if not any(n.op_type in _KERNELS or _is_gather(model, n.proto) or _is_sum(n.proto) for n in model.nodes):
        return model
    proto = _Raising(model.flat, reference, model.shape).proto()
    return model if proto is model.flat else Model(proto, path=model.path)


def _is_gather(model: Model, node: onnx.NodeProto) -> bool:
    constant = model.constants.get(node.input[0]) if node.op_type == "Gather" else None
    return constant is not None and constant.data_type in _STORED


def _is_sum(node: onnx.NodeProto) -> bool:
    """Whether it was an Add before kernels were written."""
    return node.op_type == "Sum" and metadata(node, REPLACED) is not None


class _Raising:
    """Examines every node; replacements are recorded in ``_instead`` and ``_removed``, by the index of the node."""

    def __init__(
        self,
        flat: onnx.ModelProto,
        reference: Model | None,
        shape: Callable[[str], tuple[int | None, ...] | None],
    ) -> None:
        self._flat = flat
        self._reference = reference
        self._shape = shape
        self._nodes = flat.graph.node
        self._free = partial(free_name, taken=names_in(flat.graph))
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
            new = self._raise_node(node)
            if new:
                self._instead[index] = new
        if not self._instead:
            return self._flat
        nodes = [
            new
            for i, node in enumerate(self._nodes)
            for new in self._instead.get(i, () if i in self._removed else (node,))
        ]
        touched = {name for i in (*self._removed, *self._instead) for name in self._nodes[i].input}
        read = set(self._outputs)
        kept = list[onnx.NodeProto]()
        for node in reversed(nodes):
            if touched.isdisjoint(node.output) or not read.isdisjoint(node.output):
                kept.append(node)
                read.update((*node.input, *names_read_inside(node)))
            else:  # only the kernels read it: products of scales, transposed weights, biases in integers
                touched.update(node.input)
        proto = copy_model(self._flat, but={"node", "initializer"})
        proto.graph.node.extend(reversed(kept))
        proto.graph.initializer.extend(
            self._changed.get(t.name, t)
            for t in self._flat.graph.initializer
            if t.name in read or t.name not in touched
        )
        unused = self._find_unused_domain(kept)
        refill(proto.opset_import, [o for o in proto.opset_import if o.domain != unused])
        return proto

    def _find_unused_domain(self, nodes: Iterable[onnx.NodeProto]) -> str | None:
        """The domain that was imported for the kernels alone."""
        kernels = [node for i in self._instead for node in (self._nodes[i],) if node.domain == CONTRIBUTED]
        foreign = all(metadata(node, REPLACED) is None for node in kernels)
        ours = any(metadata(node, IMPORTS) is not None for node in kernels)
        others = any(node.domain == CONTRIBUTED for node in nodes)
        return CONTRIBUTED if kernels and (foreign or ours) and not others else None

    def _raise_node(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type == "MatMulInteger" and is_default(node):
            return self._product(node)
        if node.op_type == "ConvInteger" and is_default(node):
            return self._convolution(node)
        if node.op_type == LSTM and node.domain == CONTRIBUTED:
            return self._lstm(node)
        if node.op_type == ATTENTION and node.domain == CONTRIBUTED:
            return self._attention(node)
        if _is_sum(node):
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
        steps = self._follow_chain(node, *_CONVERTED)
        stored, is_transposed = self._find_stored(node.input[1], [1, 0])
        if quantize is None or stored is None or len(steps) < len(("Cast", "Mul")):
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
            count, name = 2, node.name.removesuffix("_quant")
            before = helper.make_node("MatMul", [quantize.input[0], ""], list(steps[1].output), name=name)
            before = self._prefer_original(before)
        if attribute_of(before, "transB", 0) and not is_transposed:
            self._transpose(stored, [1, 0])
        elif is_transposed and not attribute_of(before, "transB", 0):
            return []
        self._removed.update(self._producer[step.output[0]] for step in steps[:count])
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
        has_bias = len(found.inputs) > len("AB") and bool(found.inputs[2])
        fits = (
            same and has_bias == (last.op_type == "Add") and (not has_bias or found.inputs[2] in last.input)
        )
        return found.proto if fits else None

    def _prefer_original(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The reference's node, if it is equal except for its weight, its name and the order of attributes."""
        found = None if self._reference is None else self._reference.producer.get(node.output[0])
        if found is None or found.op_type != node.op_type or len(found.inputs) != len(node.input):
            return node
        others = zip(found.inputs, node.input, strict=True)
        attributes = (sorted(a.SerializeToString() for a in n.attribute) for n in (found.proto, node))
        is_same = (
            all(one == other or not other for one, other in others) and len(set(map(tuple, attributes))) == 1
        )
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

    def _follow_chain(self, node: onnx.NodeProto, *op_types: str) -> list[onnx.NodeProto]:
        """Nodes of these types behind a node, each the only reader of the one before; a Cast is one to float32."""
        steps: list[onnx.NodeProto] = []
        for op_type in op_types:
            tensor = (steps[-1] if steps else node).output[0]
            readers = self._readers.get(tensor, ())
            follower = self._nodes[readers[0]] if len(readers) == 1 and tensor not in self._outputs else None
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
        steps = self._follow_chain(node, *_CONVERTED)
        if quantize is None or len(steps) < len(("Cast", "Mul")):
            return []
        scale = self._find_weight_scale(steps, quantize.output[1])
        numbers = [node.input[1], scale, *node.input[3:4]]
        # a node for a constant that the tool did not see as one
        maker = self._find_quantizer(node.input[1], *node.input[3:4])
        weight = self._constants.get(node.input[1] if maker is None else maker.input[0])
        is_single = (
            list(self._constants[scale].dims) in ([], [1]) if scale in self._constants else bool(maker)
        )
        if weight is None or not is_single or (maker is not None and numbers != list(maker.output)):
            return []
        bias = None
        has_own_sum = self._reference is not None and steps[1].output[0] in self._reference.producer
        if len(steps) == len(_CONVERTED) and not has_own_sum:
            bias = self._find_bias(self._find_other_operand(steps[2], steps[1].output[0]), list(weight.dims))
        steps = steps if bias else steps[:2]
        inputs = [quantize.input[0], "", *([bias] if bias else [])]
        name = node.name.removesuffix("_quant")
        before = helper.make_node("Conv", inputs, list(steps[-1].output), name)
        before.attribute.extend(node.attribute)
        before = self._prefer_original(before)
        self._removed.update(self._producer[step.output[0]] for step in steps)
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
        numbers = list(node.input[_LSTM_INPUTS:])
        found = [self._find_stored(node.input[i], _TRANSPOSED) for i in (1, 2)]
        if len(numbers) < 4 or any(stored is None for stored, _ in found):
            return []
        if not all(name in self._constants for name in numbers):
            return []
        before = _read_replaced(node, node)
        if before is None:
            inputs = _trim([node.input[0], "", "", *node.input[3:_LSTM_INPUTS]], least=3)
            before = helper.make_node("LSTM", inputs, list(node.output), node.name.removesuffix("_quant"))
            before.attribute.extend(node.attribute)
        weights = []
        for index, (stored, transposed) in enumerate(found):
            scale, zero = numbers[2 * index : 2 * index + 2]
            weights.append(
                self._rows(str(stored), scale, zero, before.input[1 + index], transposed=transposed)
            )
        return self._feed_operator(before, None, weights)

    def _rows(self, stored: str, scale: str, zero: str, carried: str, *, transposed: bool) -> onnx.NodeProto:
        """The dequantized weight of an LSTM, in the shape of ONNX's operator."""
        if not transposed:
            self._transpose(stored, _TRANSPOSED)
        directions, rows, depth = (self._changed.get(stored) or self._constants[stored]).dims
        shape: tuple[int, ...] = (directions,)
        axis = block = 0
        blocks = 1
        if len(self._constants[scale].dims) > 1:  # one for each row; of two directions, only blocks are these
            shape, axis = (rows,), 1
            if directions > 1:
                shape, axis, block, blocks = (directions, rows, 1), 2, _ROW_BLOCK, -(-depth // _ROW_BLOCK)
        for name in (scale, zero):
            values = numpy_helper.to_array(self._constants[name]).reshape(shape)
            values = np.repeat(values, blocks, axis=-1) if blocks > 1 else values
            self._changed[name] = numpy_helper.from_array(np.array(values, order="C"), name)
        return self._dequantize([stored, scale, zero], axis, carried, block)

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
            inputs = _trim([quantize.input[0], "", bias, mask, past])
            name = node.name.removesuffix("_quant")
            before = helper.make_node("Attention", inputs, list(node.output), name, domain=CONTRIBUTED)
            before.attribute.extend(node.attribute)
            before = self._prefer_original(before)
        axis = None if list(self._constants[scale].dims) in ([], [1]) else 1
        return self._feed_operator(
            before, quantize, [self._dequantize([stored, scale, zero], axis, before.input[1])]
        )

    # ---- Gather -----------------------------------------------------------------------------------

    def _gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A Gather of dequantized values in the place of the DequantizeLinear of gathered integers."""
        readers = self._readers.get(node.output[0], ())
        if len(readers) != 1 or node.output[0] in self._outputs:
            return []
        after = self._nodes[readers[0]]
        numbers = list(after.input[1:])
        if after.op_type != "DequantizeLinear" or after.input[0] != node.output[0]:
            return []
        if not all(name in self._constants for name in numbers) or attribute_of(after, "block_size", 0):
            return []
        axis = None
        if any(list(self._constants[name].dims) not in ([], [1]) for name in numbers):
            axis = self._find_table_axis(node, attribute_of(after, "axis", 1))
            if axis is None:
                return []
        self._removed.add(readers[0])
        weight = self._dequantize([node.input[0], *numbers], axis, "")
        gather = copied(node)
        gather.name = node.name.removesuffix("_quant")
        gather.input[0], gather.output[0] = weight.output[0], after.output[0]
        return [*self._pop_made(), gather]

    def _find_table_axis(self, gather: onnx.NodeProto, axis: int) -> int | None:
        """The axis of a Gather's table that is an axis of its result; ``None`` for one of the indices, or unknown."""
        indices, rank = self._shape(gather.input[1]), len(self._constants[gather.input[0]].dims)
        if indices is None:
            return None
        first = attribute_of(gather, "axis", 0) % rank  # in its place the result has the axes of the indices
        axis %= rank - 1 + len(indices)
        if axis < first:
            return axis
        return axis - len(indices) + 1 if axis >= first + len(indices) else None

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
        return [*self._pop_made(), node]

    def _pop_made(self) -> list[onnx.NodeProto]:
        """The nodes of pairs that were made for the current operator."""
        made, self._made = self._made, []
        return made

    def _dequantize(
        self, inputs: list[str], axis: int | None, carried: str, block: int = 0
    ) -> onnx.NodeProto:
        inputs = list(filter(None, inputs))
        if (known := self._known.get((self._scope, *inputs))) is not None:
            return known
        first = inputs[0].removesuffix("_quantized")
        node = helper.make_node(
            "DequantizeLinear",
            inputs,
            [self._free(f"{first}_dequantized")],
            self._free(f"{first}_DequantizeLinear"),
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

    def _find_maker(self, tensor: str) -> onnx.NodeProto | None:
        index = self._producer.get(tensor)
        return None if index is None else self._nodes[index]

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


def _trim(inputs: list[str], least: int = 0) -> list[str]:
    """The inputs without omitted ones at the end, at ``least`` so many."""
    while len(inputs) > least and not inputs[-1]:
        inputs.pop()
    return inputs
