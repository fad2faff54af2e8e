"""Removes Q/DQ from a model, made by any tool, and describes the removed pairs: the inverse of insertion.

Pairs are recognized by structure, never by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256

import onnx
from onnx import TensorProto

from qdqspec._core.units import names_text
from qdqspec.graph import QDQ_OPS, Model, Node, closed, converted_like, folded_like, raise_opset, tensor_bytes
from qdqspec.graph.protos import (
    all_graphs,
    copied,
    copy_model,
    free_initializers,
    graphs_inside,
    map_tensors,
    metadata,
    names_read_inside,
    opset_of,
    refill,
    rename_tensors,
    with_value,
)
from qdqspec.graph.trt import DOMAIN, is_pair_op
from qdqspec.qdq.equalize import branches_of, restored
from qdqspec.qdq.formats import QuantParams
from qdqspec.qdq.insert import RAISED_FROM, ChangedModel, RaisedInputs, raised
from qdqspec.qdq.pair_numbers import is_op, makes_scale, read_params
from qdqspec.qdq.pairs import BIAS_INPUT, bias_record, biases_before
from qdqspec.qdq.recognize import Recognition, find_same_node, recognize, within_reach
from qdqspec.types import Consumer

# operators that compute in integers, by the beginnings of their types
INTEGER_KERNELS = (
    "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4",
    "MatMulInteger", "MatMulNBits", "QAttention", "QEmbedLayerNormalization", "QGemm", "QLinear", "QMoE", "QOrdered",
)  # fmt: skip


def strip_qdq(model: Model, reference: Model | None = None) -> ChangedModel:
    """The float model of a model with Q/DQ pairs.

    Float weights behind Q and DQ are restored bit for bit; integer ones dequantized as float, or from the
    ``reference`` (the model before quantization) bit for bit. Models from `insert_qdq` are restored byte for
    byte, except that a raised opset stays raised. If the result has the nodes, weights and interface of the
    reference, as it is or as tuning prepares it, the reference itself is returned: tools reorder, raise the opset,
    and drop what nothing reads. Pairs that cannot be removed are kept and noted. External data of the reference
    may be outside the folder of ``model``: `save_model` includes it.
    """
    if reference is None:
        return _strip(model, None)[0]
    converted = converted_like(reference, model)
    restored_types = () if converted is reference else ("with the float16 tensors of the reference",)
    stripped, is_equal = _strip(model, converted)
    notes = stripped.notes
    if not is_equal and (folded := folded_like(converted, model)) is not None:
        other, is_equal = _strip(model, folded.model)
        nodes = f"with the nodes that quantizing folded into weights, {names_text(folded.missing)}"
        notes = (*other.notes, nodes)
    if is_equal:
        return ChangedModel(_make_reachable(reference, model), (*notes, *restored_types))
    # of a model that the tool changed otherwise too, a weight may be part of that change
    return _strip(model, converted, rounded_only=True)[0]


def _strip(model: Model, reference: Model | None, *, rounded_only: bool = False) -> tuple[ChangedModel, bool]:
    """Strip as `strip_qdq` without folding; also state whether the result is the reference.

    With ``rounded_only`` the reference restores only weights of which the integers are roundings.
    """
    expected = None if reference is None else _raise_to_opset_of(model, reference)
    found = recognize(model, expected, rounded_only=rounded_only)
    work = _Stripping(found)
    proto = work.build()
    if found.model.has_bodies:  # weights in bodies are where their integers were
        proto = closed(proto, {weight: integers for integers, weight in found.place.items()})
    notes = [*work.notes()]
    if reference is not None and expected is not None:
        if _have_same_parts(proto, _make_reachable(expected, model), model):
            return ChangedModel(_make_reachable(reference, model), (*notes, "equal to the reference")), True
        weights = found.weights
        notes += unlike(Model(proto, path=model.path), expected, weights.dequantized) or (
            ["not like the reference in names, attributes, types or shapes"] * (not weights.dequantized)
        )
    if (before := metadata(model.proto, RAISED_FROM)) is not None:
        notes.append(f"stays at opset {opset_of(model.proto)}, to which it was raised (was {before})")
    return ChangedModel(proto, tuple(notes)), False


def unlike(stripped: Model, reference: Model, others: Collection[str] = ()) -> tuple[str, ...]:
    """Notes on nodes that only one of two models has, on nodes with other attributes, and on constants, except
    ``others``, with other values.
    """
    mine, its = (
        {node.name for node in model.nodes if node.op_type not in QDQ_OPS and not node.is_marker}
        for model in (stripped, reference)
    )
    changed = []
    for name, tensor in stripped.constants.items():
        known = reference.constants.get(name)
        if known is not None and tensor != known and name not in others:
            values = tensor_bytes(tensor, stripped.folder), tensor_bytes(known, reference.folder)
            changed += [name] * (values[0] != values[1])
    notes = []
    if lost := [node.name for node in reference.nodes if node.name in its - mine]:
        why = "the quantizing tool removed them"
        notes.append(f"not like the reference, which has more nodes, {names_text(lost)}: {why}")
    if added := [node.name for node in stripped.nodes if node.name in mine - its]:
        why = "the quantizing tool added or renamed them"
        notes.append(f"not like the reference, which lacks nodes, {names_text(added)}: {why}")
    if changed:
        why = "the quantizing tool changed them"
        notes.append(f"not like the reference, which has other values, {names_text(changed)}: {why}")
    compared = (node for node in stripped.nodes if node.op_type != "Constant" and not node.is_marker)
    kept = ((node, find_same_node(reference, node)) for node in compared)
    if other := [node.name for node, there in kept if there and node.attributes != there.attributes]:
        why = "the quantizing tool changed them"
        notes.append(f"not like the reference, which has other attributes, {names_text(other)}: {why}")
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class StrippedModel:
    """A model, its version without Q/DQ, the names there of the nodes that both have, and notes on other nodes.

    Names are those of the reference; ``known_as`` has them by the names of the stripped model, which numbers nameless
    nodes otherwise if it has other constants.
    Raising the opset of the reference made the nodes ``added`` of the model, in place of some that ``raised`` knows.
    """

    found: Recognition
    stripped: Model
    names: dict[str, str]
    known_as: dict[str, str]
    notes: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()
    raised: RaisedInputs | None = None

    def ends(self, tensor: str, end: Consumer) -> tuple[Consumer, ...]:
        """The consumers of a tensor for one of a pair: several if raising the opset replaced their nodes."""
        if end.is_output:
            return (end,)
        replaced = self.raised.replaced(tensor) if self.raised and end.node in self.added else ()
        return replaced or (Consumer(self.names[end.node], end.input),)


def strip_with_parts(
    model: Model,
    reference: Model | None = None,
    *,
    activations: Model | None = None,
    rounded_only: bool = False,
) -> StrippedModel:
    """Strip a model as `strip_qdq` does, and return the removed parts with their places.

    ``activations`` replaces the reference if only nodes have to be restored: see `recognize`, also for
    ``rounded_only``.
    """
    expected = None if reference is None else _raise_to_opset_of(model, reference)
    found = recognize(model, expected, activations=activations, rounded_only=rounded_only)
    work = _Stripping(found)
    stripped = Model(work.build(), path=model.path)
    products = branches_of(model).keys() - stripped.by_name.keys()
    origins = (origin for origin, proto in work.nodes() if proto.name not in products)
    pairs = zip(origins, stripped.nodes, strict=True)
    kept = {origin.name: node for origin, node in pairs if origin is not None}
    known_as = {node.name: (find_same_node(reference, node) or node).name for node in stripped.nodes}
    names = {name: known_as[node.name] for name, node in kept.items()}
    notes = tuple(work.notes_on_nodes())
    if reference is None or expected is reference:
        return StrippedModel(found, stripped, names, known_as, notes)
    only_raised = (n for n, node in kept.items() if not find_same_node(reference, node))
    added = (n for n in only_raised if find_same_node(expected, kept[n]))
    raised_inputs = RaisedInputs(reference, [node.proto for node in stripped.nodes], is_raised=True)
    return StrippedModel(found, stripped, names, known_as, notes, frozenset(added), raised_inputs)


class _Stripping:
    """Builds the model without the pairs found, and the notes."""

    def __init__(self, found: Recognition) -> None:
        self.found = found
        self.biases = biases_before(found.model, found.removed)  # by name; None if the layer had none

    def build(self) -> onnx.ModelProto:
        """The model without the pairs, in the flat form."""
        found, model = self.found, self.found.model
        proto = copy_model(model.flat, but={"node", "initializer", "value_info", "input"})
        graph = proto.graph
        graph.node.extend(proto for _, proto in self.nodes())
        graph.initializer.extend(self._initializers())
        inputs = [i for i in model.flat.graph.input if i.name not in found.dropped]
        reference = found.weights.reference
        if reference is not None and any(i.name in found.floats for i in reference.proto.graph.input):
            names = {i.name for i in inputs} | found.floats.keys()  # restored weights are graph inputs too
            inputs = [i for i in reference.proto.graph.input if i.name in names]
        graph.input.extend(inputs)
        if found.floats.keys() - {i.name for i in inputs}:
            free_initializers(proto)
        vanished = {out for index in found.removed for out in model.nodes[index].outputs}
        vanished |= found.dropped | found.alias.keys()
        vanished -= found.floats.keys() | {model.nodes[i].outputs[0] for i in found.restorer.relus}
        vanished -= set(model.outputs)  # the pair that made an output is removed, the output is not
        graph.value_info.extend(v for v in model.flat.graph.value_info if v.name not in vanished)
        foreign = [node for node in model.nodes if node.domain == DOMAIN]
        is_unused = all(node.index in found.removed for node in foreign)
        is_unused = is_unused and all(f.domain != DOMAIN for f in model.proto.functions)
        if is_unused and any(is_pair_op(node.proto) for node in foreign):
            refill(proto.opset_import, [o for o in proto.opset_import if o.domain != DOMAIN])
        return restored(proto, found.weights.restored)

    def nodes(self) -> Iterator[tuple[Node | None, onnx.NodeProto]]:
        """The nodes of the result, each with the node of the model that it was; restored ones are new."""
        restorer = self.found.restorer
        for node in self.found.model.nodes:
            if node.index in restorer.relus:
                read = self.found.now(restorer.relus[node.index])
                yield None, onnx.helper.make_node("Relu", [read], list(node.outputs), f"{node.name}_Relu")
            elif node.index in restorer.exact:
                revived = restorer.exact[node.index]
                before = copied(self._node(node))
                names = [revived.inputs[0] if o == revived.outputs[0] else o for o in before.output]
                refill(before.output, names)
                yield node, before
                yield None, revived.proto
            elif node.index not in self.found.removed:
                yield node, self._node(node)

    def _node(self, node: Node) -> onnx.NodeProto:
        """The node with its tensors renamed, without an added bias; a Constant node with what it had before."""
        found = self.found
        if node.op_type == "Constant":
            name = node.outputs[0]
            bias = self.biases.get(name)
            if bias is not None:
                return with_value(node.proto, bias)
            weight = found.place.get(name) if name in found.dropped else None
            if weight is None and name not in found.alias:
                return node.proto
            changed = copied(node.proto)
            rename_tensors(changed, found.now)
            if weight is not None:
                changed = with_value(changed, found.float_weight(weight))
                changed.output[0] = weight
            return changed
        bias_name = node.input_at(BIAS_INPUT)
        is_added = bias_name in self.biases and self.biases[bias_name] is None
        is_renamed = any(name in found.alias for name in (*node.inputs, *node.outputs, *node.body_reads))
        if not (is_renamed or is_added):
            return node.proto
        changed = copied(node.proto)
        rename_tensors(changed, found.now)
        if is_added:
            del changed.input[BIAS_INPUT:]
        return changed

    def _initializers(self) -> Iterator[TensorProto]:
        placed = {self.found.place[name] for name in self.found.dropped if name in self.found.place}
        for tensor in self.found.model.flat.graph.initializer:
            if tensor.name in self.biases:
                before = self.biases[tensor.name]
                yield from () if before is None else (before,)
            elif tensor.name not in self.found.dropped:
                yield tensor
            elif tensor.name in self.found.place:
                yield self._float(self.found.place[tensor.name])
        yield from (self._float(name) for name in self.found.floats if name not in placed)
        if self.found.restorer.reference is not None:
            constants = self.found.restorer.reference.constants
            yield from (_named(constants[name], name) for name in sorted(self.found.restorer.constants()))

    def _float(self, name: str) -> TensorProto:
        """The restored weight as an initializer."""
        return _named(self.found.float_weight(name), name)

    def notes(self) -> Iterator[str]:
        """Notes for the reader."""
        yield from self.notes_on_nodes()
        bodies = (body for node in self.found.model.nodes for body in graphs_inside(node.proto))
        graphs = (graph for body in bodies for graph in all_graphs(body))
        for holder in (*graphs, *self.found.model.proto.functions):
            if any(node.op_type in QDQ_OPS for node in holder.node):
                what = "a function, or a body of another operator than If, Loop, Scan"
                yield f"not stripped, Q/DQ in '{holder.name}': {what}"
        if self.found.weights.restored:
            yield f"taken from the reference, {names_text(self.found.weights.restored)}"
        if self.found.weights.dequantized:
            known = self.found.weights.reference is not None
            cures = (
                "give the original as reference to restore them",
                "the reference has no such weight, or none of which they are roundings",
            )
            weights = names_text(self.found.weights.dequantized)
            yield f"dequantized, not equal to the original weights, {weights}: {cures[known]}"
        if self.found.restorer.exact:
            nodes = [node.name for node in self.found.restorer.exact.values()]
            yield f"removed by the quantizing tool and taken from the reference, {names_text(nodes)}"

    def notes_on_nodes(self) -> Iterator[str]:
        """Notes on nodes that are kept, on inserted ones, and on pairs that did more than rounding."""
        for reason, nodes in self.found.left.items():
            yield f"not removed, {names_text(nodes)}: {reason}"
        if self.found.rescaled:
            yield (
                f"removed although they rescale values, pairs of {names_text(self.found.rescaled)}: a "
                "DequantizeLinear has other numbers than its QuantizeLinear"
            )
        kept = [node for node in self.found.model.nodes if node.index not in self.found.removed]
        kernels = [node for node in kept if node.op_type.startswith(INTEGER_KERNELS)]
        if kernels:
            kinds = ", ".join(dict.fromkeys(node.op_type for node in kernels))
            what = "not Q/DQ, but operators that compute in integers themselves"
            yield f"{what}, {kinds}, {names_text([n.name for n in kernels])}: left as they are"
        if foreign := [node.name for node in kept if node.domain == DOMAIN]:
            yield f"operators of domain trt, {names_text(foreign)}: left as they are"
        if self.found.restorer.relus:
            yield (
                "a Relu was inserted where a zero point cuts off negative values, "
                f"{names_text(self.found.restorer.relus.values())}: the quantizing tool may have removed one, or a "
                "Clip; the original with `--reference` restores the removed node"
            )


def _named(tensor: TensorProto, name: str) -> TensorProto:
    """The tensor with this name: the value of a Constant node may have any."""
    if tensor.name == name:
        return tensor
    named = copied(tensor)
    named.name = name
    return named


def _raise_to_opset_of(model: Model, reference: Model) -> Model:
    """The reference with its opset raised to the model's, as the quantizing tool did."""
    if metadata(model.proto, RAISED_FROM) is not None:
        return Model(raised(reference.proto, opset_of(model.proto)), path=reference.path)
    if opset_of(model.proto) > opset_of(reference.proto):
        return Model(raise_opset(reference.proto, opset_of(model.proto)), path=reference.path)
    return reference


def _have_same_parts(one: onnx.ModelProto, other: onnx.ModelProto, reader: Model) -> bool:
    """Whether two models have the same nodes and weights, in any order, and the same interface.

    Equal tensors may be stored in different fields, or one may refer to a file. Tools drop what nothing reads.
    """
    left, right = one.graph, other.graph
    mine, its = ({t.name: t for t in graph.initializer} for graph in (left, right))
    is_same_interface = left.input == right.input and left.output == right.output
    if not is_same_interface or one.functions != other.functions or not mine.keys() <= its.keys():
        return False
    read = {output.name for output in right.output}
    for node in right.node:
        read.update((*node.input, *names_read_inside(node)))
    if not read.isdisjoint(its.keys() - mine.keys()):
        return False
    for name, tensor in mine.items():
        same = its[name]
        if tensor != same and (
            (tensor.data_type, list(tensor.dims)) != (same.data_type, list(same.dims))
            or tensor_bytes(tensor, reader.folder) != tensor_bytes(same, reader.folder)
        ):
            return False
    nodes = (sorted(node.SerializeToString(deterministic=True) for node in g.node) for g in (left, right))
    return next(nodes) == next(nodes)


def _make_reachable(owner: Model, reader: Model) -> onnx.ModelProto:
    return map_tensors(owner.proto, lambda tensor: within_reach(tensor, owner, reader))


# ---- the removed pairs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPair:
    """One quantized tensor and its readers.

    ``tensor`` and ``ends`` are names of the model without Q/DQ, ``quantized`` (the integers) and ``nodes``
    (the DequantizeLinear nodes) those of the model with it. A weight is ``stored`` if it has no
    QuantizeLinear. Without ``numbers``, ``problem`` is why they are unknown.
    """

    tensor: str
    # including a graph output that it makes, under the name of the tensor; none if only another pair reads it
    ends: tuple[Consumer, ...]
    quantized: str
    nodes: tuple[str, ...]
    weight: bool
    stored: bool
    numbers: QuantParams | None
    problem: str = ""
    unknown: str = ""  # digest of numbers that are not known: equal for pairs that compute the same
    bias: str = ""  # the shift of the bias of the layer that reads this weight
    earlier: FoundPair | None = None  # the pair whose dequantized values this one quantizes again

    @property
    def chain(self) -> tuple[FoundPair, ...]:
        """Earlier pairs on the same values, last first. A pair that the next one repeats is left out."""
        found, pair = [], self
        while (earlier := pair.earlier) is not None:
            if earlier.numbers is None or not earlier.same(pair):  # else quantizing twice equals once
                found.append(earlier)
            pair = earlier
        return tuple(found)

    def same(self, other: FoundPair) -> bool:
        """Whether both compute the same, or have no numbers for the same reason."""
        if self.numbers is None or other.numbers is None:
            return (self.problem, self.unknown) == (other.problem, other.unknown)
        return self.numbers.same(other.numbers)


def find_pairs(apart: StrippedModel) -> tuple[FoundPair, ...]:
    """The pairs that were removed, in graph order; several readers of the same integers are one pair."""
    found: dict[tuple[str, str], list[FoundPair]] = {}
    made: dict[str, FoundPair] = {}  # by the output of the DequantizeLinear
    for node in apart.found.model.nodes:
        scale = makes_scale(apart.found.model, node.outputs[0])
        if is_op(node, "DequantizeLinear") and node.index in apart.found.removed and not scale:
            pair = made[node.outputs[0]] = _describe_pair(apart, node, made)
            alike = found.setdefault((pair.quantized, pair.tensor), [])
            for index, known in enumerate(alike):
                if known.same(pair):
                    alike[index] = replace(
                        known,
                        ends=tuple(sorted({*known.ends, *pair.ends})),
                        nodes=(*known.nodes, *pair.nodes),
                    )
                    break
            else:
                alike.append(pair)
    return tuple(pair for alike in found.values() for pair in alike)


def _describe_pair(apart: StrippedModel, node: Node, made: Mapping[str, FoundPair]) -> FoundPair:
    model, after = apart.found.model, node.outputs[0]
    quantize = model.producer.get(node.inputs[0])
    stored = quantize is None or not is_op(quantize, "QuantizeLinear")
    earlier = None if quantize is None or stored else made.get(quantize.inputs[0])
    tensor = after if node.index in apart.found.restorer.relus else apart.found.now(after)
    numbers, problem = read_params(model, node, None if stored else quantize)
    # the readers that remain in the model without Q/DQ
    known = (end for end in model.ends(after) if end.is_output or end.node in apart.names)
    ends = {there for end in known for there in apart.ends(tensor, end)}
    return FoundPair(
        tensor=tensor,
        ends=tuple(sorted(ends)),
        quantized=node.inputs[0],
        nodes=(node.name,),
        weight=tensor in apart.stripped.constants,
        stored=stored,
        numbers=numbers,
        problem=problem,
        unknown="" if numbers else _digest(apart, node if stored else quantize, node),
        bias=str((bias_record(node) or {}).get("shift", "")),
        earlier=earlier,
    )


def _digest(apart: StrippedModel, *nodes: Node | None) -> str:
    """A digest of the scales and zero points of Q and DQ: of constants, and of nodes that only these need."""
    model = apart.found.model

    @cache
    def written(tensor: str) -> str:
        if (constant := model.constants.get(tensor)) is not None:
            return f"{constant.data_type} {list(constant.dims)} {model.array(tensor).tobytes().hex()}"
        now, maker = apart.found.now(tensor), model.producer.get(tensor)
        if (kept := apart.stripped.producer.get(now)) is not None:
            return f"{kept.name}:{kept.outputs.index(now)}"
        return now if maker is None else join(maker, maker.inputs, f"{maker.outputs.index(tensor)}")

    def join(node: Node, inputs: tuple[str, ...], output: str = "") -> str:
        attributes = sorted(each.SerializeToString(deterministic=True).hex() for each in node.proto.attribute)
        return sha256(f"{node.op_type} {attributes} {[*map(written, inputs)]} {output}".encode()).hexdigest()

    return " ".join(join(node, node.inputs[1:]) for node in nodes if node is not None)
