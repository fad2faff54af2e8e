"""Removes Q/DQ from a model, made by any tool, and describes the removed pairs: the inverse of insertion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256

import onnx
from onnx import TensorProto

from qdqspec._core.units import list_text, names_text
from qdqspec.graph import Model, Node, raise_opset
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.graph.protos import (
    all_graphs,
    copied,
    copy_model,
    free_initializers,
    graphs_inside,
    map_tensors,
    metadata,
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
from qdqspec.qdq.recognize import recognize, within_reach
from qdqspec.qdq.skeleton import (
    Skeleton,
    SkeletonDiff,
    align_names,
    compare_skeletons,
    converted_like,
    find_same_nodes,
    folded_like,
)
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
    apart = strip_like(model, reference)
    if reference is None or not apart.is_reference:
        # of a model that the tool changed otherwise too, a weight may be part of that change
        apart = apart if reference is None else strip_like(model, reference, rounded_only=True)
        notes = [*apart.notes_on_model(), *apart.unlike()]
        if (before := metadata(model.proto, RAISED_FROM)) is not None:
            notes.append(f"stays at opset {opset_of(model.proto)}, to which it was raised (was {before})")
        return ChangedModel(apart.proto, tuple(notes))
    notes = [*apart.notes_on_model(), "equal to the reference"]
    converted = converted_like(reference, model)
    if (folded := folded_like(converted, model)) is not None:
        nodes = names_text(folded.missing)
        notes.append(f"with the nodes that quantizing folded into weights, {nodes}")
    if converted is not reference:
        notes.append("with the float16 tensors of the reference")
    return ChangedModel(_make_reachable(reference, model), tuple(notes))


def strip_like(model: Model, reference: Model | None, *, rounded_only: bool = False) -> StrippedModel:
    """The model without its pairs, restored from the ``reference``, the model before quantization.

    That is converted from float16 if the model was; its BatchNormalization and computed weights are folded as in
    tuning, unless fewer weights of the model are found then. See `recognize` for ``rounded_only``.
    """
    if reference is None:
        return StrippedModel(model)
    converted = converted_like(reference, model)
    folded = folded_like(converted, model)
    references = [converted] if folded is None else [folded.model, converted]
    found = (StrippedModel(model, each, rounded_only=rounded_only) for each in references)
    return min(found, key=lambda apart: len(apart.found.dequantized))


class StrippedModel:
    """A model without its Q/DQ pairs, which it holds with their places.

    ``activations`` replaces the reference if only nodes have to be restored: see `recognize`, also for
    ``rounded_only``. The ``stripped`` model is the ``proto`` in the flat form; ``found`` what was recognized.
    """

    def __init__(
        self,
        model: Model,
        reference: Model | None = None,
        *,
        activations: Model | None = None,
        rounded_only: bool = False,
    ) -> None:
        self._reference = reference
        self._expected = None if reference is None else _raise_to_opset_of(model, reference)
        self.found = recognize(model, self._expected, activations=activations, rounded_only=rounded_only)
        self.model = self.found.model
        # by name; None if the layer had none
        self._biases = biases_before(self.model, self.found.removed)
        self.stripped = Model(self._build(), path=model.path)

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model without the pairs."""
        # weights in bodies are where their integers were
        replaced = {weight: integers for integers, weight in self.found.place.items()}
        return self.stripped.close_bodies(self.stripped.flat, replaced)

    # ---- compared with the reference -----------------------------------------------------------------

    @cached_property
    def difference(self) -> SkeletonDiff:
        """The differences from the reference, except in the values of weights that it does not have."""
        assert self._expected is not None
        names = align_names(self._expected, self.stripped)
        mine = Skeleton(self.stripped, names, others=self.found.dequantized)
        return compare_skeletons(Skeleton(self._expected), mine)

    @property
    def is_reference(self) -> bool:
        """Whether it has the nodes, weights, functions and interface of the reference."""
        return not (self.found.dequantized or self.difference.differs or self._reordered)

    @cached_property
    def _reordered(self) -> tuple[str, ...]:
        """What a comparison by names does not find."""
        assert self._expected is not None
        mine, its = (
            {"inputs": m.inputs, "outputs": m.outputs, "functions": tuple(m.proto.functions)}
            for m in (self.stripped, self._expected)
        )
        return tuple(f"other {what}, or in another order" for what in mine if mine[what] != its[what])

    def unlike(self) -> tuple[str, ...]:
        """Notes on differences from the reference."""
        if self._expected is None:
            return ()
        found, notes = self.difference, []
        if found.removed:
            why = "the quantizing tool removed them"
            notes.append(f"not like the reference, which has more nodes, {names_text(found.removed)}: {why}")
        if found.added:
            why = "the quantizing tool added or renamed them"
            notes.append(f"not like the reference, which lacks nodes, {names_text(found.added)}: {why}")
        if changes := (*found.changed, *found.constants, *found.interface, *self._reordered):
            notes.append(f"not like the reference, {list_text(changes, 3)}: the quantizing tool changed this")
        return tuple(notes)

    # ---- nodes and readers by their names in the reference -------------------------------------------

    @cached_property
    def _kept(self) -> dict[str, Node]:
        """The nodes of the model that the stripped one has too, by their names."""
        products = branches_of(self.model).keys() - self.stripped.by_name.keys()
        origins = (origin for origin, proto in self._nodes() if proto.name not in products)
        pairs = zip(origins, self.stripped.nodes, strict=True)
        return {origin.name: node for origin, node in pairs if origin is not None}

    @cached_property
    def known_as(self) -> dict[str, str]:
        """The names of the nodes of the stripped model in the reference, where nameless nodes have other numbers."""
        known = {} if self._reference is None else find_same_nodes(self._reference, self.stripped)
        return {node.name: known.get(node.name, node.name) for node in self.stripped.nodes}

    @cached_property
    def names(self) -> dict[str, str]:
        """The names in the reference of the nodes that the model and the stripped one have."""
        return {name: self.known_as[node.name] for name, node in self._kept.items()}

    @cached_property
    def _raised(self) -> tuple[RaisedInputs, frozenset[str]] | None:
        """The inputs after the opset of the reference was raised, and the nodes that this added to the model."""
        if self._reference is None or self._expected is self._reference or self._expected is None:
            return None
        before, after = (find_same_nodes(each, self.stripped) for each in (self._reference, self._expected))
        added = (name for name, node in self._kept.items() if node.name in after.keys() - before.keys())
        inputs = RaisedInputs(self._reference, [node.proto for node in self.stripped.nodes], is_raised=True)
        return inputs, frozenset(added)

    def ends(self, tensor: str, end: Consumer) -> tuple[Consumer, ...]:
        """The consumers of a tensor for one of a pair: several if raising the opset replaced their nodes."""
        if end.is_output:
            return (end,)
        inputs, added = self._raised or (None, ())
        replaced = inputs.replaced(tensor) if inputs is not None and end.node in added else ()
        return replaced or (Consumer(self.names[end.node], end.input),)

    # ---- the model -----------------------------------------------------------------------------------

    def _build(self) -> onnx.ModelProto:
        """The model without the pairs, in the flat form."""
        found, model = self.found, self.model
        proto = copy_model(model.flat, but={"node", "initializer", "value_info", "input"})
        graph = proto.graph
        graph.node.extend(proto for _, proto in self._nodes())
        graph.initializer.extend(self._initializers())
        inputs = [i for i in model.flat.graph.input if i.name not in found.dropped]
        reference = self._expected
        if reference is not None and any(i.name in found.floats for i in reference.proto.graph.input):
            names = {i.name for i in inputs} | found.floats.keys()  # restored weights are graph inputs too
            inputs = [i for i in reference.proto.graph.input if i.name in names]
        graph.input.extend(inputs)
        if found.floats.keys() - {i.name for i in inputs}:
            free_initializers(proto)
        vanished = {out for index in found.removed for out in model.nodes[index].outputs}
        vanished |= found.dropped | found.alias.keys()
        vanished -= found.floats.keys() | {model.nodes[i].outputs[0] for i in found.relus}
        vanished -= set(model.outputs)  # the pair that made an output is removed, the output is not
        graph.value_info.extend(v for v in model.flat.graph.value_info if v.name not in vanished)
        foreign = [node for node in model.nodes if node.domain == DOMAIN]
        is_unused = all(node.index in found.removed for node in foreign)
        is_unused = is_unused and all(f.domain != DOMAIN for f in model.proto.functions)
        if is_unused and any(is_pair_op(node.proto) for node in foreign):
            refill(proto.opset_import, [o for o in proto.opset_import if o.domain != DOMAIN])
        return restored(proto, found.originals, model.path)

    def _nodes(self) -> Iterator[tuple[Node | None, onnx.NodeProto]]:
        """The nodes of the result, each with the node of the model that it was; restored ones are new."""
        found = self.found
        for node in self.model.nodes:
            if node.index in found.relus:
                read = self.found.now(found.relus[node.index])
                yield None, onnx.helper.make_node("Relu", [read], list(node.outputs), f"{node.name}_Relu")
            elif node.index in found.exact:
                revived = found.exact[node.index]
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
            bias = self._biases.get(name)
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
        is_added = bias_name in self._biases and self._biases[bias_name] is None
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
        for tensor in self.model.flat.graph.initializer:
            if tensor.name in self._biases:
                before = self._biases[tensor.name]
                yield from () if before is None else (before,)
            elif tensor.name not in self.found.dropped:
                yield tensor
            elif tensor.name in self.found.place:
                yield self.found.float_weight(self.found.place[tensor.name])
        yield from (self.found.float_weight(name) for name in self.found.floats if name not in placed)
        yield from self.found.restored_constants()

    def notes_on_model(self) -> Iterator[str]:
        """Notes for the reader: on nodes, functions and weights."""
        yield from self.notes
        found = self.found
        bodies = (body for node in self.model.nodes for body in graphs_inside(node.proto))
        graphs = (graph for body in bodies for graph in all_graphs(body))
        for holder in (*graphs, *self.model.proto.functions):
            if any(node.op_type in QDQ_OPS for node in holder.node):
                what = "a function, or a body of another operator than If, Loop, Scan"
                yield f"not stripped, Q/DQ in '{holder.name}': {what}"
        if found.originals:
            yield f"taken from the reference, {names_text(found.originals)}"
        if found.dequantized:
            cures = (
                "give the original as reference to restore them",
                "the reference has no such weight, or none of which they are roundings",
            )
            weights = names_text(found.dequantized)
            yield f"dequantized, not equal to the original weights, {weights}: {cures[self._expected is not None]}"
        if found.exact:
            nodes = names_text(node.name for node in found.exact.values())
            yield f"removed by the quantizing tool and taken from the reference, {nodes}"

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on nodes that are kept, and on inserted ones."""
        found = self.found
        notes = [f"not removed, {names_text(nodes)}: {reason}" for reason, nodes in found.left.items()]
        kept = [node for node in self.model.nodes if node.index not in found.removed]
        kernels = [node for node in kept if node.op_type.startswith(INTEGER_KERNELS)]
        if kernels:
            kinds = ", ".join(dict.fromkeys(node.op_type for node in kernels))
            what = "not Q/DQ, but operators that compute in integers themselves"
            names = names_text(node.name for node in kernels)
            notes.append(f"{what}, {kinds}, {names}: left as they are")
        if foreign := [node.name for node in kept if node.domain == DOMAIN]:
            notes.append(f"operators of domain trt, {names_text(foreign)}: left as they are")
        if found.relus:
            notes.append(
                f"a Relu was inserted where a zero point cuts off negative values, {names_text(found.relus.values())}: "
                "the quantizing tool may have removed one, or a Clip; the original with `--reference` restores the "
                "removed node"
            )
        return tuple(notes)

    @cached_property
    def pairs(self) -> tuple[FoundPair, ...]:
        """The pairs that were removed, in graph order; several readers of the same integers are one pair."""
        found: dict[tuple[str, str], list[FoundPair]] = {}
        made: dict[str, FoundPair] = {}  # by the output of the DequantizeLinear
        for node in self.model.nodes:
            scale = makes_scale(self.model, node.outputs[0])
            if is_op(node, "DequantizeLinear") and node.index in self.found.removed and not scale:
                pair = made[node.outputs[0]] = _describe_pair(self, node, made)
                alike = found.setdefault((pair.quantized, pair.tensor), [])
                for index, known in enumerate(alike):
                    if known.same(pair):
                        ends, nodes = {*known.ends, *pair.ends}, (*known.nodes, *pair.nodes)
                        alike[index] = replace(known, ends=tuple(sorted(ends)), nodes=nodes)
                        break
                else:
                    alike.append(pair)
        return tuple(pair for alike in found.values() for pair in alike)


def _raise_to_opset_of(model: Model, reference: Model) -> Model:
    """The reference with its opset raised to the model's, as the quantizing tool did."""
    if metadata(model.proto, RAISED_FROM) is not None:
        return Model(raised(reference.proto, opset_of(model.proto)), path=reference.path)
    if opset_of(model.proto) > opset_of(reference.proto):
        return Model(raise_opset(reference.proto, opset_of(model.proto)), path=reference.path)
    return reference


def _make_reachable(owner: Model, reader: Model) -> onnx.ModelProto:
    return map_tensors(owner.proto, lambda tensor: within_reach(tensor, owner, reader))


# ---- the removed pairs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPair:
    """One quantized tensor and its readers.

    ``tensor`` and ``ends`` are names of the model without Q/DQ, ``quantized`` (the integers) and ``nodes``
    (the DequantizeLinear nodes) those of the model with it. A weight is ``stored`` if it has no
    QuantizeLinear. It has no ``numbers`` if they are computed when the model runs.
    """

    tensor: str
    # including a graph output that it makes, under the name of the tensor; none if only another pair reads it
    ends: tuple[Consumer, ...]
    quantized: str
    nodes: tuple[str, ...]
    weight: bool
    stored: bool
    numbers: QuantParams | None
    computed: str = ""  # digest of the nodes that compute the numbers: equal for pairs that compute the same
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
        """Whether both compute the same."""
        if self.numbers is None or other.numbers is None:
            return self.computed == other.computed
        return self.numbers.same(other.numbers)


def _describe_pair(apart: StrippedModel, node: Node, made: Mapping[str, FoundPair]) -> FoundPair:
    model, after = apart.model, node.outputs[0]
    quantize = model.producer.get(node.inputs[0])
    stored = quantize is None or not is_op(quantize, "QuantizeLinear")
    earlier = None if quantize is None or stored else made.get(quantize.inputs[0])
    tensor = after if node.index in apart.found.relus else apart.found.now(after)
    numbers, _ = read_params(model, node, None if stored else quantize)
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
        computed="" if numbers else _digest(apart, node if stored else quantize, node),
        bias=str((bias_record(node) or {}).get("shift", "")),
        earlier=earlier,
    )


def _digest(apart: StrippedModel, *nodes: Node | None) -> str:
    """A digest of the scales and zero points of Q and DQ: of constants, and of nodes that only these need."""
    model = apart.model

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
