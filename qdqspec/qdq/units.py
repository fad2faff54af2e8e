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
from typing import TypeAlias

from onnx import TensorProto

from qdqspec._core import hooks
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import data_inputs, is_fused_attention, weight_input
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.formats import RUN_TIME, NumberFormat, number_format
from qdqspec.types import HALVES, Consumer, Kind, Label, QuantizeRules, Site, label_of

# The axis of a weight's output channels, for any rank; Gemm's depends on its attributes.
WEIGHT_AXES = {"Conv": 0, "ConvTranspose": 1}
RECURRENT = frozenset({"LSTM"})
_PAST = 4  # the first input of a fused attention that concerns earlier keys and values, or a bias of scores
_BLOCKED_RANKS = (2, 3)


def weight_inputs(model: Model, node: Node) -> tuple[int, ...]:
    """The indexes of the constant weights of a linear operator, an LSTM (input, hidden state) or a fused attention.

    The kernel of the last needs a bias.
    """
    if is_fused_attention(node):
        return (1,) if node.input_at(1) in model.constants and node.input_at(2) else ()
    if node.op_type in RECURRENT:
        return (1, 2) if all(node.inputs[index] in model.constants for index in (1, 2)) else ()
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
    ``weight`` are names of `qdqspec.qdq.formats`; without an activation, only weights are quantized.
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

    def without(self, unwanted: Kind) -> Form:
        """The form without one kind; an int32 bias is removed with ``in-only``, the only kind that needs it."""
        kinds = tuple(kind for kind in self.kinds if kind != unwanted)
        return replace(self, kinds=kinds, biases=() if unwanted == "in-only" else self.biases)


Edge: TypeAlias = tuple[str, Consumer]


def data_edges(model: Model, node: Node) -> list[Edge]:
    """The edges of activations that a node reads."""
    inputs = ((node.inputs[index], Consumer(node.name, index)) for index in data_inputs(node))
    return [edge for edge in inputs if edge[0] not in model.constants]


def edges_before(model: Model, edge: Edge, moved_past: Collection[str]) -> Iterator[Edge]:
    """This edge, and all earlier edges from which the runtime would move a pair to it."""
    waiting, known = [edge], {edge}
    while waiting:
        yield (edge := waiting.pop())
        node = model.producer.get(edge[0])
        if node is not None and node.op_type in moved_past:
            before = data_edges(model, node)
            waiting += [found for found in before if found not in known]
            known.update(before)


def edges_after(model: Model, edge: Edge, moved_past: Collection[str]) -> Iterator[Edge]:
    """The edge, and those after operators that pairs are moved past until they are on it: with one reader each."""
    yield edge
    end = edge[1]
    while not end.is_output and end.input == 0 and (node := model.by_name[end.node]).op_type in moved_past:
        ends = model.ends(node.outputs[0])
        if len(ends) != 1:
            return
        (end,) = ends
        yield node.outputs[0], end


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
        """The label that quantizes most of it, in its first format: the kinds are in that order."""
        return self.forms[0].labels[0]

    def full_in(self, name: str) -> Label:
        """The label that quantizes most of it in a format, by its name in labels; ``fp`` if it has none."""
        return next((form.labels[0] for form in self.forms if form.choice.name == name), "fp")

    @property
    def halves(self) -> tuple[Label, ...]:
        """The labels that quantize its constants alone, or its activations alone."""
        return tuple(label for form in self.forms for label in form.halves)

    def form_of(self, label: Label) -> Form:
        """The form of a label other than ``fp``."""
        return next(form for form in self.forms if label in (*form.labels, *form.halves))

    def with_results(self, outputs: tuple[str, ...], out_edges: tuple[Edge, ...] = ()) -> Unit:
        """The unit with other results. Without any it cannot output integers."""
        forms = self.forms
        if not outputs and not out_edges:
            forms = tuple(form for form in (form.without("in+out") for form in forms) if form.kinds)
        return replace(self, outputs=outputs, out_edges=out_edges, forms=forms)


Units: TypeAlias = tuple[Unit, ...]
PlacementRule: TypeAlias = Callable[[Model, Units], Units]


def apply_rules(model: Model, units: Units, rules: Mapping[str, hooks.Hook]) -> tuple[Units, dict[str, str]]:
    """The units after these rules, and by node the name of the first rule after which no label is left.

    A unit without any label left is still among them. Raises `ConfigError` for a rule that cannot be imported.
    """
    excluded: dict[str, str] = {}
    for name, hook in rules.items():
        rule: PlacementRule = hooks.load(hook)
        before, units = units, rule(model, units)
        left, kept = (
            {node for unit in each if unit.forms for node in unit.nodes} for each in (before, units)
        )
        excluded |= dict.fromkeys(left - kept, name)
    return units, excluded
