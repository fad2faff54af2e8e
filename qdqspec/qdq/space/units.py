"""Units: groups of nodes that get one label. An operator, the nodes fused into it, and its quantized parts by format.

The backend's capabilities determine what fuses, and how a format is stored. `qdqspec.graph.ops` has the properties of
operators; weights and biases of nodes, and the axes of their channels or blocks, are found here.

A placement rule of a backend (`Capabilities.rules`) is a constraint on pairs beyond single operators: it takes the
units of a model and returns them with pairs moved or removed. Some runtimes need both sides of a residual Add
quantized, others the skip side only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from qdqspec._core.config import hooks
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import (
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
from qdqspec.qdq.quantize.formats import BIAS_FORMAT, RUN_TIME, NumberFormat, number_format
from qdqspec.types import HALVES, Consumer, Kind, Label, QuantizeRules, Site, label_of

# The axis of a weight's output channels, for any rank; Gemm's depends on its attributes.
WEIGHT_AXES = {"Conv": 0, "ConvTranspose": 1}
RECURRENT = frozenset({"LSTM"})
_PAST = 4  # the first input of a fused attention that concerns earlier keys and values, or a bias of scores
_BLOCKED_RANKS = (2, 3)


def weight_input(model: Model, node: Node) -> int | None:
    """The index of a constant float weight of a linear operator, or ``None``."""
    index = WEIGHT_INPUT.get(node.op_type)
    if index is None or node.input_at(index) not in model.constants:
        return None
    return index


def weight_inputs(model: Model, node: Node) -> tuple[int, ...]:
    """The indexes of the constant weights of a linear operator, an LSTM (input, hidden state) or a fused attention.

    The kernel of the last needs a bias.
    """
    if is_fused_attention(node):
        return (1,) if node.input_at(1) in model.constants and node.input_at(2) else ()
    if node.op_type in RECURRENT:
        found = tuple(index for index in (1, 2) if node.inputs[index] in model.constants)
        return found if len(found) == len((1, 2)) else ()
    index = weight_input(model, node)
    return () if index is None else (index,)


def channel_axis(model: Model, node: Node, index: int) -> int | None:
    """The axis of a weight's output channels; ``None`` if only one scale for all is possible."""
    rank = len(model.constants[node.inputs[index]].dims)
    if node.op_type == "ConvTranspose" and node.attributes.get("group", 1) != 1:
        return None
    if node.op_type in WEIGHT_AXES:
        return WEIGHT_AXES[node.op_type]
    if node.op_type == "Gemm":
        return 0 if node.attributes.get("transB", 0) else 1
    if node.op_type in RECURRENT:  # a scale for each row of one direction, or for each of two directions
        return 1 if model.constants[node.inputs[index]].dims[0] == 1 else 0
    return 1 if rank == 2 else None


def summed_axis(model: Model, node: Node, index: int) -> int | None:
    """The axis of a two-dimensional weight that products are summed over; ``None`` for others."""
    if len(model.constants[node.inputs[index]].dims) != 2:
        return None
    return 1 if node.op_type == "Gemm" and node.attributes.get("transB", 0) else 0


def dynamic_misfit(model: Model, tensor: str, fmt: NumberFormat, axis: int | None) -> str | None:
    """The reason against dynamic quantization of an activation in blocks along an axis, or ``None``.

    The operators of `qdqspec.graph.trt` take two or three dimensions, the blocked one a constant of the build and a
    whole number of blocks. Blocks here are along the last one, which products are summed over.
    """
    shape = model.shape(tensor)
    if shape is None or len(shape) not in _BLOCKED_RANKS:
        have = "an unknown number" if shape is None else len(shape)
        return f"{fmt.name} activations are quantized in 2 or 3 dimensions, and it has {have}"
    if axis is not None and axis != len(shape) - 1:
        return f"{fmt.name} activations come in blocks along the last axis, not along {axis}"
    if not shape[-1] or shape[-1] % fmt.block:
        have = "not known" if not shape[-1] else str(shape[-1])
        return f"{fmt.name} comes in whole blocks of {fmt.block}, and its last dimension is {have}"
    return None


def is_dynamic_linear(model: Model, node: Node) -> bool:
    """Whether a kernel with ranges found at run time computes this operator, as its attributes and types are.

    Source: ONNX, DynamicQuantizeLinear (float32 only), MatMulInteger; ``com.microsoft``, DynamicQuantizeLSTM, which has
    no attribute ``layout``, and QAttention, which takes equal sizes of queries, keys and values. Earlier keys and
    values are not covered.
    """
    weights = weight_inputs(model, node)
    real = all(model.elem_type(node.inputs[index]) == TensorProto.FLOAT for index in (0, *weights))
    if not weights or not real:
        return False
    if is_fused_attention(node) and any(node.inputs[_PAST:]):
        return False
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "layout": 0, "do_rotary": 0, "qkv_hidden_sizes": None}
    return all(node.attributes.get(name, value) == value for name, value in plain.items())


def bias_input(model: Model, node: Node, channels: int) -> int | None:
    """The index of a constant bias with ``channels`` numbers that a Gemm adds, or an Add after a MatMul.

    A bias that is broadcast otherwise, from one value or over rows, is not supported by integer kernels.
    """
    for index in (2,) if node.op_type == "Gemm" else (0, 1):
        constant = model.constants.get(node.input_at(index))
        if constant is not None and list(constant.dims) == [channels]:
            return index
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """A format of a case, as its backend stores it.

    ``name`` is the prefix of the kind in labels, ``""`` for the case's first format. ``activation`` and
    ``weight`` are names of `qdqspec.qdq.quantize.formats`; without an activation, only weights are quantized.
    ``dynamic`` is true where the backend has kernels that find the ranges of activations at run time.
    """

    format: str
    name: str
    weight: str
    activation: str | None
    dynamic: bool = False

    @property
    def block(self) -> int:
        """Number of elements of a weight that share a scale along the summed axis; 0 for scales per channel."""
        return number_format(self.weight).block

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels that any unit may have in this format."""
        kinds: tuple[Kind, ...] = ("in+out", "in-only", *(("dynamic",) if self.dynamic else ()))
        return tuple(label_of(self.name, kind) for kind in kinds)

    def reads(self, kind: Kind) -> str | None:
        """The format of the activations that an operator with a label of this kind reads; none where it reads float."""
        if kind == "dynamic":
            return RUN_TIME
        return None if kind in ("fp", "weight-only") else self.activation


def format_choices(rules: QuantizeRules, capabilities: Capabilities) -> tuple[FormatChoice, ...]:
    """The formats of a case that the backend supports, in the case's order; of those stored alike, the first.

    A case of one format gets it, whether the backend lists it or not: the caller has verified it.
    """
    known = [name for name in rules.formats if name in capabilities.formats] or [rules.formats[0]]
    found: dict[tuple[str, str | None], FormatChoice] = {}
    for name in known:
        weight = capabilities.weights.get(name, name)
        blocked = number_format(weight).block
        activation = capabilities.activations.get(name, None if blocked else name)
        if activation is not None and not blocked and rules.activations != "auto":
            activation = rules.activations
        choice = FormatChoice(
            format=name,
            name=name if found else "",
            weight=weight,
            activation=activation,
            dynamic=name in capabilities.dynamic,
        )
        found.setdefault((weight, activation), choice)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The quantized parts of a unit in one format: its kinds of labels, its constants and int32 biases."""

    choice: FormatChoice
    kinds: tuple[Kind, ...]
    constants: tuple[Site, ...]
    biases: tuple[Site, ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels of a unit in this format."""
        return tuple(label_of(self.choice.name, kind) for kind in self.kinds)

    @property
    def halves(self) -> tuple[Label, ...]:
        """The labels that quantize constants alone and activations alone; none if it has only one of them."""
        has_both = self.choice.activation is not None and self.constants and self.kinds != ("dynamic",)
        return tuple(label_of(self.choice.name, kind) for kind in HALVES) if has_both else ()

    @property
    def full(self) -> Label:
        """The label that quantizes most: the kinds are in that order."""
        return self.labels[0]

    def without(self, unwanted: Kind) -> Form:
        """The form without one kind; an int32 bias is removed with ``in-only``, the only kind that needs it."""
        kinds = tuple(kind for kind in self.kinds if kind != unwanted)
        return replace(self, kinds=kinds, biases=() if unwanted == "in-only" else self.biases)


Edge: TypeAlias = tuple[str, Consumer]

# operators whose integer kernels need a constant weight
NEEDS_WEIGHT = frozenset({"Conv", "ConvTranspose", "Gemm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator with the nodes fused into it.

    ``forms`` are its quantized parts in each format. The other fields apply to all of them: ``edges`` are its
    activation inputs (none if only weights can be quantized), ``outputs`` the tensors that get a pair if it
    outputs integers, and ``out_edges`` single edges that do. ``labels`` begins with ``fp``; ``halves`` are
    further labels that are not part of the search space unless requested.
    """

    id: str
    op_type: str
    nodes: tuple[str, ...]
    forms: tuple[Form, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[str, ...]
    out_edges: tuple[Edge, ...] = ()
    labels: tuple[Label, ...] = field(init=False)

    def __post_init__(self) -> None:
        labels = [label for form in self.forms for label in form.labels]
        object.__setattr__(self, "labels", ("fp", *labels))

    @property
    def full(self) -> Label:
        """The label that quantizes most of it, in its first format."""
        return self.forms[0].full

    def full_in(self, name: str) -> Label:
        """The label that quantizes most of it in a format, by its name in labels; ``fp`` if it has none."""
        return next((form.full for form in self.forms if form.choice.name == name), "fp")

    @property
    def halves(self) -> tuple[Label, ...]:
        """The labels that quantize its constants alone, or its activations alone."""
        return tuple(label for form in self.forms for label in form.halves)

    def form_of(self, label: Label) -> Form:
        """The form of a label other than ``fp``."""
        return next(form for form in self.forms if label in (*form.labels, *form.halves))


def with_results(unit: Unit, outputs: tuple[str, ...], out_edges: tuple[Edge, ...] = ()) -> Unit:
    """The unit with other results. Without any it cannot output integers."""
    forms = unit.forms
    if not outputs and not out_edges:
        forms = tuple(form for form in (form.without("in+out") for form in forms) if form.kinds)
    return replace(unit, outputs=outputs, out_edges=out_edges, forms=forms)


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
        self.sizing = setters_of_sizes(model)

    def find(self, allowed: Collection[str] | None) -> Iterator[Unit]:
        """The units in graph order, of ``allowed`` nodes (all if ``None``)."""
        taken: set[str] = set()
        for node in self._model.nodes:
            if node.name in taken or (allowed is not None and node.name not in allowed):
                continue
            unit = self._make_unit(node)
            if unit is not None:
                taken.update(unit.nodes)
                yield unit

    def _make_unit(self, node: Node) -> Unit | None:
        if node.name in self.sizing:
            return None
        shape = self._find_shape(node) if self._is_computed(node.op_type) else None
        forms = tuple([form for form in self._find_forms(node, shape) if form.kinds])
        if not forms:
            return None
        whole = shape is not None and any(form.choice.activation for form in forms)
        gives = any("in+out" in form.kinds for form in forms)
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=tuple([n.name for n in shape.chain]) if shape and whole else (node.name,),
            forms=forms,
            edges=shape.edges if shape and whole else (),
            outputs=shape.outputs if shape and gives else (),
        )

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

    def _find_shape(self, node: Node) -> _Shape | None:
        """The format-independent parts; ``None`` if the operator, or one of its operands, is never quantized."""
        if is_fused_attention(node):
            return self._with_one_edge(node)
        if node.op_type in NEVER or not is_default(node):
            return None
        if node.op_type in RECURRENT:
            return self._with_one_edge(node)
        if node.op_type in self._needs_weight and weight_input(self._model, node) is None:
            return None
        indexes, inputs, known = data_inputs(node), node.inputs, self._model.constants
        for index in indexes:
            if not is_float(self._model, inputs[index]):
                return None
        constants = tuple([index for index in indexes if inputs[index] in known])
        if constants and not all(self.has_range(node, index) for index in constants):
            return None
        edges = tuple([(inputs[i], Consumer(node.name, i)) for i in indexes if i not in constants])
        if not edges or not self.of_shapes.isdisjoint(node.outputs):
            return None
        chain = tuple(self.chain(node))
        outputs = tuple([t for t in chain[-1].outputs if self._can_quantize(t, node)])
        return _Shape(chain=chain, edges=edges, constants=constants, outputs=outputs)

    def _with_one_edge(self, node: Node) -> _Shape | None:
        """An LSTM or a fused attention with constant weights: its input and these weights."""
        if not weight_inputs(self._model, node) or not is_float(self._model, node.inputs[0]):
            return None
        edges = ((node.inputs[0], Consumer(node.name, 0)),)
        return _Shape(chain=(node,), edges=edges, constants=weight_inputs(self._model, node), outputs=())

    def has_range(self, node: Node, index: int) -> bool:
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

    def _can_quantize(self, tensor: str, head: Node) -> bool:
        """Whether a tensor can be integer at its producer: all readers must accept that."""
        ends = self._model.ends(tensor) if tensor else ()
        read = (self.may_end(head) if end.is_output else reads_data(self._model, end) for end in ends)
        accepted = bool(ends) and all(read)
        return accepted and tensor not in self._model.captured and is_float(self._model, tensor)

    def may_end(self, head: Node) -> bool:
        """Whether a graph output of this operator, with the nodes fused into it, may be quantized.

        By default: if the operator is weighted and no integer kernel outputs floats. A Conv at the end of a
        model would otherwise run in floating point, and often takes most of the time.
        """
        if self._outputs != "auto":
            return self._outputs
        kinds = {k for choice in self._choices for k in self._capabilities.kinds(choice.format, head.op_type)}
        return head.op_type in WEIGHT_INPUT and "in-only" not in kinds


Units: TypeAlias = tuple[Unit, ...]
PlacementRule: TypeAlias = Callable[[Model, Units], Units]


def apply_rules(model: Model, units: Units, rules: Mapping[str, hooks.Hook]) -> dict[str, Units]:
    """The units after each of these rules, by its name, and under the empty name those before all of them.

    A unit without any label left is still among them. Raises `ConfigError` for a rule that cannot be imported.
    """
    stages = {"": units}
    for name, hook in rules.items():
        rule: PlacementRule = hooks.load(hook)
        units = stages[name] = rule(model, units)
    return stages


def excluded_by_rule(stages: Mapping[str, Units]) -> dict[str, str]:
    """By node, the first rule after which no label is left; ``stages`` is the result of `apply_rules`."""
    (_, units), *rest = stages.items()
    excluded: dict[str, str] = {}
    left = {node for unit in units for node in unit.nodes}
    for name, after in rest:
        if after != units:
            kept = {node for unit in after if unit.forms for node in unit.nodes}
            excluded |= dict.fromkeys(left - kept, name)
            left &= kept
        units = after
    return excluded
