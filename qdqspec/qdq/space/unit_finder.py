"""Finds the units of a model for one backend: operators, the nodes fused into them, and their quantized parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx

from qdqspec.graph.model import Model, Node
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
)
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.quantize.formats import BIAS_FORMAT, number_format
from qdqspec.qdq.space.units import (
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
    summed_axis,
    weight_input,
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
        is_sizing = node.name in self._sizing
        forms = () if is_sizing else tuple([form for form in self._find_forms(node, known) if form.kinds])
        if not forms:
            return shape if isinstance(shape, str) else f"{node.op_type}: {self._explain_no_label(node)}"
        whole = known is not None and any(form.choice.activation for form in forms)
        gives = any("in+out" in form.kinds for form in forms)
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=tuple([n.name for n in known.chain]) if known and whole else (node.name,),
            forms=forms,
            edges=known.edges if known and whole else (),
            outputs=known.outputs if known and gives else (),
        )

    def _explain_no_label(self, node: Node) -> str:
        """The reason why no kernel computes an operator whose operands may be integers."""
        made = (tensor for tensor in self.chain(node)[-1].outputs if tensor)
        reasons = [why for tensor in made if (why := self.why_float(tensor, node))]
        if not reasons and node.op_type in self._capabilities.integer_bias:
            return "its bias is not one constant a channel, which integer kernels need"
        return reasons[0] if reasons else OTHER_PAIRS

    def _find_forms(self, node: Node, shape: _Shape | None) -> Iterator[Form]:
        """The quantized parts of an operator, format by format. An int32 bias has the scale of only one of them."""
        taken = False
        for choice in self._choices:
            if choice.block:
                form = self._make_blocked_form(node, choice, shape)
            else:
                form = None if shape is None else self._make_plain_form(node, choice, shape)
            if form is not None:
                yield form.without("in-only") if form.biases and taken else form
                taken = taken or bool(form.biases)

    def _make_plain_form(self, node: Node, choice: FormatChoice, shape: _Shape) -> Form:
        """Activations with one scale per tensor, weights with one per channel or tensor."""
        biases = self._find_biases(shape.chain)
        floats = biases is not None and not (
            node.op_type in self._capabilities.bare and self._is_followed(shape)
        )
        possible = {"in+out": bool(shape.outputs), "in-only": floats}
        kinds = [
            kind for kind in self._capabilities.kinds(choice.format, node.op_type) if self._permits(kind)
        ]
        if "dynamic" in kinds:
            weights = weight_inputs(self._model, node)
            possible["dynamic"] = shape.constants == weights and is_dynamic_linear(self._model, node)
        return Form(
            choice=choice,
            kinds=tuple(kind for kind in kinds if possible[kind]),
            constants=tuple(self._make_constant_site(node, index, choice) for index in shape.constants),
            biases=biases or (),
        )

    def _is_followed(self, shape: _Shape) -> bool:
        """Whether an activation function directly follows the operator, not at the end of the graph."""
        behind = shape.chain[1:2]
        ends = any(tensor in self._model.output_ends for node in behind for tensor in node.outputs)
        return any(node.op_type in self._capabilities.absorbs for node in behind) and not ends

    def _make_blocked_form(self, node: Node, choice: FormatChoice, shape: _Shape | None) -> Form | None:
        """The weight in blocks; if the format has activations too, the data operand as well."""
        index = weight_input(self._model, node) if is_default(node) else None
        if index is None or not is_float(self._model, node.inputs[index]):
            return None
        axis = summed_axis(self._model, node, index)
        whole = axis is not None and self._model.constants[node.inputs[index]].dims[axis] % choice.block == 0
        if not whole or axis not in self._capabilities.blocked_axes.get(node.op_type, ()):
            return None
        if choice.activation and not self._comes_in_blocks(node, choice.activation, shape):
            return None
        if not self._permits("in-only"):
            return None
        site = replace(self._make_constant_site(node, index, choice), axis=axis)
        return Form(choice=choice, kinds=("in-only",), constants=(site,))

    def _comes_in_blocks(self, node: Node, name: str, shape: _Shape | None) -> bool:
        """Whether the only data operand can be quantized dynamically, along the axis that products are summed over."""
        if shape is None or len(shape.edges) != 1 or node.attributes.get("transA", 0):
            return False
        return dynamic_misfit(self._model, shape.edges[0][0], number_format(name), None) is None

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
        model, op_type = self._model, node.op_type
        indexes, inputs = data_inputs(node), node.inputs
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
        """The node, the bias after a MatMul, and the activation functions that are fused into its kernel."""
        chain = [node]
        while (follower := self._find_sole_reader(chain[-1])) is not None:
            is_bias = len(chain) == 1 and self._is_bias(node, follower)
            if not is_bias and not self._is_absorbed(chain[-1], follower):
                break
            chain.append(follower)
        return chain

    def _is_bias(self, head: Node, follower: Node) -> bool:
        if head.op_type != "MatMul" or head.op_type not in self._capabilities.integer_bias:
            return False
        channels = self._count_channels(head)
        is_added = follower.op_type == "Add" and channels > 0
        return is_added and bias_input(self._model, follower, channels) is not None

    def _is_absorbed(self, last: Node, follower: Node) -> bool:
        return (
            follower.op_type in self._capabilities.absorbs
            and follower.inputs[0] == last.outputs[0]
            and all(tensor in self._model.constants for tensor in follower.inputs[1:] if tensor)
        )

    def _find_sole_reader(self, node: Node) -> Node | None:
        """The only node that reads the only output, if there is no other reader."""
        if len(node.outputs) != 1:
            return None
        model, output = self._model, node.outputs[0]
        ends = model.consumers.get(output, ())
        if len(ends) != 1 or output in model.output_ends or output in model.captured:
            return None
        return model.by_name[ends[0].node]

    def why_float(self, tensor: str, head: Node) -> str:
        """The reason why a tensor cannot be integer at its producer for all its readers; empty if it can."""
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
        if len(readers) < len(ends) and not self._may_end(head):
            return f"it makes a graph output, and {NOT_ASKED}"
        return ""

    def _may_end(self, head: Node) -> bool:
        """Whether a graph output of this operator, with the nodes fused into it, may be quantized.

        By default: if the operator is weighted and no integer kernel outputs floats. A Conv at the end of a
        model would otherwise run in floating point, and often takes most of the time.
        """
        if self._outputs != "auto":
            return self._outputs
        kinds = {k for choice in self._choices for k in self._capabilities.kinds(choice.format, head.op_type)}
        return head.op_type in WEIGHT_INPUT and "in-only" not in kinds
