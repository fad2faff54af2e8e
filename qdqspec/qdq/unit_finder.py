"""Finds the units of a model for one backend: operators, the nodes fused into them, and their quantized parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx

from qdqspec.graph import Model, Node
from qdqspec.graph.ops import (
    FLOATS,
    NEVER,
    WEIGHT_INPUT,
    data_inputs,
    is_default,
    is_float,
    is_fused_attention,
    made_of_shapes,
    reads_data,
    setters_of_sizes,
    summed_axis,
    weight_input,
)
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.formats import BIAS_FORMAT, number_format
from qdqspec.qdq.units import (
    NEEDS_WEIGHT,
    RECURRENT,
    Edge,
    Form,
    FormatChoice,
    Unit,
    bias_input,
    channel_axis,
    dynamic_misfit,
    is_dynamic_linear,
    weight_inputs,
)
from qdqspec.types import Consumer, Kind, QuantizeRules, Site

UNKNOWN = "an unknown type"
COMPUTED = "computed from shapes or constants alone"
SIZING = "its values set the size of a tensor, which quantization would change"
NOT_ASKED = "the spec must request it: quantize: {outputs: true}"
OTHER_PAIRS = "the compiler needs other pairs around it"
_FLOATS = frozenset(onnx.TensorProto.DataType.Name(kind) for kind in FLOATS)
_RECURRENT_FLOAT = frozenset({"GRU", "RNN"})


def type_name(model: Model, tensor: str) -> str:
    """The element type of a tensor, for readers."""
    known = model.elem_type(tensor)
    return UNKNOWN if not known else str(onnx.TensorProto.DataType.Name(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The format-independent parts of an operator: its chain, activation edges, constant operands, outputs."""

    chain: tuple[Node, ...]
    edges: tuple[Edge, ...]
    constants: tuple[int, ...]  # inputs
    outputs: tuple[str, ...]


class UnitFinder:
    """Finds the units of a model for one backend, in the formats that a case may choose among."""

    def __init__(
        self,
        model: Model,
        capabilities: Capabilities,
        rules: QuantizeRules,
        choices: tuple[FormatChoice, ...],
    ) -> None:
        self._model = model
        self._capabilities = capabilities
        self._per_channel = rules.weights == "per-channel"
        self._choices = choices
        self._outputs = rules.outputs
        self._allowed_kinds = rules.labels
        self._needs_weight = NEEDS_WEIGHT | capabilities.constant_weight
        self._is_computed = cache(lambda op_type: any(self._computes(op_type, choice) for choice in choices))
        self.of_shapes = made_of_shapes(model)
        self._sizing = setters_of_sizes(model)

    def find(self, allowed: Collection[str] | None) -> Iterator[Unit]:
        """The units in graph order, of ``allowed`` nodes (all if ``None``)."""
        taken: set[str] = set()
        for node in self._model.nodes:
            if node.name in taken or (allowed is not None and node.name not in allowed):
                continue
            unit = self.examine(node)
            if not isinstance(unit, str):
                taken.update(unit.nodes)
                yield unit

    def examine(self, node: Node) -> Unit | str:
        """The unit of an operator, or the reason why it has no label."""
        shape = self._find_shape(node)
        known = None if isinstance(shape, str) or not self._is_computed(node.op_type) else shape
        forms: list[Form] = []
        for choice in self._choices if node.name not in self._sizing else ():
            if choice.block:
                form = self._make_blocked_form(node, choice, known)
            else:
                form = None if known is None else self._make_plain_form(node, choice, known)
            if form is not None and form.biases and any(other.biases for other in forms):
                form = form.without("in-only")  # an int32 bias has the scale of only one format
            if form is not None and form.kinds:
                forms.append(form)
        if isinstance(shape, str) and not forms:
            return shape
        if not forms:  # no kernel computes it, although its operands may be integers
            made = (tensor for tensor in self.chain(node)[-1].outputs if tensor)
            why = next((reason for tensor in made if (reason := self.why_float(tensor, node))), OTHER_PAIRS)
            if why == OTHER_PAIRS and node.op_type in self._capabilities.integer_bias:
                why = "its bias is not one constant a channel, which integer kernels need"
            return f"{node.op_type}: {why}"
        whole = known if any(form.choice.activation for form in forms) else None
        gives = any("in+out" in form.kinds for form in forms)
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=tuple([n.name for n in whole.chain]) if whole else (node.name,),
            forms=tuple(forms),
            edges=whole.edges if whole else (),
            outputs=known.outputs if known and gives else (),
        )

    def _make_plain_form(self, node: Node, choice: FormatChoice, shape: _Shape) -> Form:
        """Activations with one scale per tensor, weights with one per channel or tensor."""
        can, biases = self._capabilities, self._find_biases(shape.chain)
        behind = shape.chain[1:2]
        ends = any(tensor in self._model.output_ends for node in behind for tensor in node.outputs)
        is_followed = any(node.op_type in can.absorbs for node in behind) and not ends
        possible = {
            "in+out": bool(shape.outputs),
            "in-only": biases is not None and not (node.op_type in can.bare and is_followed),
        }
        kinds = [kind for kind in can.kinds(choice.format, node.op_type) if self._permits(kind)]
        if "dynamic" in kinds:
            weights = weight_inputs(self._model, node)
            possible["dynamic"] = shape.constants == weights and is_dynamic_linear(self._model, node)
        return Form(
            choice=choice,
            kinds=tuple(kind for kind in kinds if possible[kind]),
            constants=tuple(self._make_constant_site(node, index, choice) for index in shape.constants),
            biases=biases or (),
        )

    def _make_blocked_form(self, node: Node, choice: FormatChoice, shape: _Shape | None) -> Form | None:
        """The weight in blocks; if the format has activations too, the data operand as well.

        There can be one data operand, quantized dynamically along the axis that products are summed over.
        """
        index = weight_input(self._model, node) if is_default(node) else None
        if index is None or not self._permits("in-only") or not is_float(self._model, node.inputs[index]):
            return None
        dims, axis = self._model.constants[node.inputs[index]].dims, summed_axis(node)
        allowed = self._capabilities.blocked_axes.get(node.op_type, ())
        if len(dims) != 2 or dims[axis] % choice.block or axis not in allowed:
            return None
        if choice.activation:
            if shape is None or len(shape.edges) != 1 or node.attributes.get("transA", 0):
                return None
            fmt = number_format(choice.activation)
            if dynamic_misfit(self._model, shape.edges[0][0], fmt, None) is not None:
                return None
        site = replace(self._make_constant_site(node, index, choice), axis=axis)
        return Form(choice=choice, kinds=("in-only",), constants=(site,))

    def _computes(self, op_type: str, choice: FormatChoice) -> bool:
        """Whether the backend computes an operator in that format, its activations included."""
        if choice.activation is None:
            return False
        if choice.block:
            return bool(self._capabilities.blocked_axes.get(op_type))
        return bool(self._capabilities.kinds(choice.format, op_type))

    def _permits(self, kind: Kind) -> bool:
        """Whether the rules let units have labels of this kind."""
        return not self._allowed_kinds or kind in self._allowed_kinds

    def _find_shape(self, node: Node) -> _Shape | str:
        """The format-independent parts; or why the operator, or one of its operands, is never quantized."""
        op_type = node.op_type
        if not self.of_shapes.isdisjoint(node.outputs):
            return COMPUTED
        is_recurrent = op_type in RECURRENT and is_default(node)
        if (is_recurrent or is_fused_attention(node)) and self._is_computed(op_type):
            return self._with_one_edge(node)
        if op_type in _RECURRENT_FLOAT and self._is_computed("LSTM"):
            return f"{op_type}: there is no integer kernel of it, as DynamicQuantizeLSTM is of LSTM"
        if not is_default(node):
            return f"{node.domain}:{op_type}: an operator that the backend does not know"
        if op_type in NEVER:
            return f"{op_type}: never quantized by itself"
        return self._find_operands(node)

    def _find_operands(self, node: Node) -> _Shape | str:
        model, op_type, inputs = self._model, node.op_type, node.inputs
        indexes = data_inputs(node)
        types = [type_name(model, inputs[index]) for index in indexes]
        other = [name for name in types if name not in _FLOATS]
        if other and UNKNOWN not in other and len(other) == len(types):
            return f"{op_type}: no floating point input of 16 or 32 bits"
        if node.name in self._sizing:
            return SIZING
        if not self._is_computed(op_type) and op_type not in self._capabilities.blocked_axes:
            return f"{op_type}: the backend runs it in floating point only"
        if other:
            what = "element type not known" if UNKNOWN in other else f"an input holds {other[0]}"
            return f"{op_type}: {what}"
        if op_type in self._needs_weight and weight_input(model, node) is None:
            return f"{op_type}: its weight is computed, and integer kernels need a constant one"
        constants = tuple([index for index in indexes if inputs[index] in model.constants])
        edges = tuple([(inputs[i], Consumer(node.name, i)) for i in indexes if i not in constants])
        if not edges:
            return f"{op_type}: all its inputs are constants"
        if not all(self._has_range(node, index) for index in constants):
            why = "one of its constants is empty, infinite or not a number, so that it has no scale"
            return f"{op_type}: {why}"
        chain = tuple(self.chain(node))
        outputs = tuple([t for t in chain[-1].outputs if t and not self.why_float(t, node)])
        return _Shape(chain=chain, edges=edges, constants=constants, outputs=outputs)

    def _with_one_edge(self, node: Node) -> _Shape | str:
        """An LSTM or a fused attention with constant weights, its input and these weights; or why it has no kernel."""
        is_lstm, weights = node.op_type in RECURRENT, weight_inputs(self._model, node)
        if not weights:
            lstm = "its weights W and R are computed from inputs, and DynamicQuantizeLSTM needs constant ones"
            return f"{node.op_type}: {lstm if is_lstm else 'QAttention needs a constant weight, and a bias'}"
        if not is_dynamic_linear(self._model, node):
            lstm = "DynamicQuantizeLSTM takes float32 only, and no attribute layout"
            other = (
                "QAttention takes float32, equal sizes of queries, keys and values, and here no earlier ones"
            )
            return f"{node.op_type}: {lstm if is_lstm else other}"
        edges = ((node.inputs[0], Consumer(node.name, 0)),)
        return _Shape(chain=(node,), edges=edges, constants=weights, outputs=())

    def _has_range(self, node: Node, index: int) -> bool:
        """Whether a constant has elements, and all are finite: an attention mask contains minus infinity.

        Weights are not read here: non-finite values in one are an error of the model, reported when it is
        quantized.
        """
        constant = node.inputs[index]
        if 0 in self._model.constants[constant].dims:
            return False
        if index == weight_input(self._model, node):
            return True
        return bool(np.isfinite(self._model.array(constant).astype(np.float32, copy=False)).all())

    def _make_constant_site(self, node: Node, index: int, choice: FormatChoice) -> Site:
        """The site of a constant operand: the weight in the format for weights, others in that for activations."""
        is_weight = index in weight_inputs(self._model, node)
        return Site(
            tensor=node.inputs[index],
            consumers=(Consumer(node.name, index),),
            format=choice.weight if is_weight else choice.activation or choice.weight,
            axis=channel_axis(self._model, node, index) if is_weight and self._per_channel else None,
            weight=True,
        )

    def _find_biases(self, chain: tuple[Node, ...]) -> tuple[Site, ...] | None:
        """The bias that must be int32 for a float output; ``None`` if there is one that cannot be."""
        head = chain[0]
        if head.op_type not in self._capabilities.integer_bias:
            return ()
        adder = next((node for node in chain[1:] if node.op_type == "Add"), None)
        owner = head if head.op_type == "Gemm" else adder
        if owner is None or (owner is head and not head.input_at(2)):
            return ()
        index = bias_input(self._model, owner, self._count_channels(head))
        if index is None:
            return None
        site = Site(
            tensor=owner.inputs[index],
            consumers=(Consumer(owner.name, index),),
            format=BIAS_FORMAT,
            axis=0 if self._per_channel else None,
            weight=True,
        )
        return (site,)

    def _count_channels(self, head: Node) -> int:
        """Output channels of a Gemm or MatMul with a constant weight; 0 without one."""
        weight = weight_input(self._model, head)
        axis = channel_axis(self._model, head, weight) if weight is not None else None
        return 0 if weight is None or axis is None else self._model.constants[head.inputs[weight]].dims[axis]

    def chain(self, node: Node) -> list[Node]:
        """The node, the bias after a MatMul, and the activation functions that are fused into its kernel.

        Each is the only reader of the only output of the one before.
        """
        model, can, chain = self._model, self._capabilities, [node]
        while len(chain[-1].outputs) == 1:
            output = chain[-1].outputs[0]
            ends = model.consumers.get(output, ())
            if len(ends) != 1 or output in model.output_ends or output in model.captured:
                break
            reader = model.by_name[ends[0].node]
            is_bias = False
            if len(chain) == 1 and (node.op_type, reader.op_type) == ("MatMul", "Add"):
                channels = self._count_channels(node) if "MatMul" in can.integer_bias else 0
                is_bias = channels > 0 and bias_input(model, reader, channels) is not None
            is_absorbed = reader.op_type in can.absorbs and reader.inputs[0] == output
            others_are_constant = all(tensor in model.constants for tensor in reader.inputs[1:] if tensor)
            if not is_bias and not (is_absorbed and others_are_constant):
                break
            chain.append(reader)
        return chain

    def why_float(self, tensor: str, head: Node) -> str:
        """The reason why a tensor cannot be integer at its producer for all its readers; empty if it can.

        By default a graph output may be quantized if the operator is weighted and no integer kernel outputs floats: a
        Conv at the end of a model would otherwise run in floating point, and often takes most of the time.
        """
        model, ends = self._model, self._model.ends(tensor)
        readers = [end for end in ends if not end.is_output]
        if not is_float(model, tensor):
            return f"its output is of {type_name(model, tensor)}"
        if tensor in model.captured:
            return "a body of If, Loop or Scan reads its output"
        if not ends:
            return "no node reads its output"
        if any(model.by_name[end.node].is_marker for end in readers):
            return "it makes an output of a body of If, Loop or Scan"
        if not all(reads_data(model, end) for end in readers):
            return "its output is read as a bound, a scale or a shape"
        may_end = self._outputs
        if may_end == "auto" and len(readers) < len(ends):
            kinds = {k for c in self._choices for k in self._capabilities.kinds(c.format, head.op_type)}
            may_end = head.op_type in WEIGHT_INPUT and "in-only" not in kinds
        if len(readers) < len(ends) and not may_end:
            return f"it makes a graph output, and {NOT_ASKED}"
        return ""
