"""The search space: the units of a model with the labels of each, and the placement of each choice of labels.

Given one label per unit, `SchemeSpace.resolve` gives the Q/DQ pairs. A pair can be inserted on an edge (a tensor and
its reader) in one format. If two formats meet on an edge, the reader's pair is inserted: its kernel requires it, and
the producer outputs float on that edge. `SchemeSpace.project` is the inverse for placements of other tools and models.

A reader with only its weight quantized reads floats if the producer can output floats. Some runtimes need that: there
a producer that can output integers only stays in float, and no pair is put before operators that the runtime would
move pairs past to that reader. A unit whose weight the runtime would quantize itself, because its inputs and results
have pairs, is ``in+out``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import PlacementError
from qdqspec.graph import Model, Node, fold_weights, with_integer_kernels
from qdqspec.graph.ops import CONTROL, is_constant_node, is_default, is_float, weight_input
from qdqspec.graph.regions import Judged, flow_of
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.formats import BIAS_FORMAT, RUN_TIME, number_format
from qdqspec.qdq.unit_finder import COMPUTED, NOT_ASKED, OTHER_PAIRS, UnitFinder, type_name
from qdqspec.qdq.units import (
    Edge,
    Form,
    Unit,
    apply_rules,
    data_edges,
    edges_after,
    edges_before,
    format_choices,
)
from qdqspec.types import Consumer, Kind, Label, Placement, QuantizeRules, Region, Site, kind_of, label_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """A label of a unit, and its pairs, each with one reader."""

    unit: str
    label: Label
    reads: tuple[Site, ...]
    makes: tuple[Site, ...]  # omitted if the reader needs otherwise
    floats: frozenset[Edge]  # without a pair
    yields: bool  # whether it can output float instead


class SchemeSpace:
    """All placements of one model that the backend can use and the spec allows.

    Units are made of ``allowed`` nodes (all if ``None``); ``denied`` ones read nothing quantized.
    """

    def __init__(
        self,
        model: Model,
        capabilities: Capabilities,
        *,
        allowed: Collection[str] | None = None,
        denied: Collection[str] = frozenset(),
        rules: QuantizeRules | None = None,
        regions: tuple[Region, ...] = (),
    ) -> None:
        self.model = model
        self.regions = regions
        self.rules = rules or QuantizeRules()
        self._capabilities = capabilities
        self.choices = format_choices(self.rules, capabilities)
        self.finder = UnitFinder(model, capabilities, self.rules, self.choices)
        # the rule that excludes a node, by the node
        found, self.excluded = apply_rules(model, tuple(self.finder.find(allowed)), capabilities.rules)
        outside = {n.name for n in model.nodes} - set(allowed) if allowed is not None else set()
        self._closed = frozenset(denied) | outside
        self._denied = frozenset((*denied, *self._quantized_unasked(found)))
        units = []
        for unit in found:  # without outputs that only denied nodes read, because these read floating point
            outputs = [t for t in unit.outputs if any(e.node not in self._denied for e in model.ends(t))]
            out_edges = tuple(edge for edge in unit.out_edges if edge[1].node not in self._denied)
            units.append(unit.with_results(tuple(outputs), out_edges))
        self.units = tuple(units)
        offered = {label for unit in self.units for label in unit.labels}
        known_labels = (label for choice in self.choices for label in choice.labels)
        # of each format; dynamic ones where a unit has one
        named = (label for label in known_labels if kind_of(label) != "dynamic" or label in offered)
        self.labels: tuple[Label, ...] = ("fp", *named)

    def _quantized_unasked(self, units: Iterable[Unit]) -> Iterator[str]:
        """The excluded nodes that the runtime would quantize, because all readers of their results have pairs.

        The operators before them that a pair would be moved past are included.
        """
        model, completes, past = self.model, self._capabilities.completes, self._capabilities.moved_past
        nodes = [n for name in self._closed if (n := model.by_name[name]).op_type in completes]
        read = {edge for unit in units for edge in unit.edges} if nodes else set()
        for node in (n for n in nodes if weight_input(model, n) is not None):
            result = self.finder.chain(node)[-1].outputs[0]
            ends = [edges_after(model, (result, end), past) for end in model.ends(result)]
            if ends and all(not read.isdisjoint(found) for found in ends):
                data = node.inputs[0], Consumer(node.name, 0)
                yield from (end.node for _, end in edges_before(model, data, past))

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units with a form. ``by_id`` has them by the name of their first node, ``unit_of`` their ids by node."""
        return self._units

    @units.setter
    def units(self, units: Iterable[Unit]) -> None:
        self._units = tuple(unit for unit in units if unit.forms)
        self.by_id = {unit.id: unit for unit in self.units}
        self.unit_of = {node: unit.id for unit in self.units for node in unit.nodes}
        self._choice = cache(self._make_choice)
        self._join = cache(join_readers)  # large placements compare sites by identity
        for name in ("_products", "_completions"):  # those of other units
            self.__dict__.pop(name, None)

    @property
    def bias_sources(self) -> dict[Consumer, tuple[Site, Site]]:
        """For the consumer of each int32 bias, the sites of the activation and the weight of its product."""
        found = {}
        for unit in self.units:
            for form in unit.forms:
                for bias in form.biases:
                    tensor, end = unit.edges[0]
                    data = Site(tensor=tensor, consumers=(end,), format=form.choice.activation or "")
                    found[bias.consumers[0]] = data, form.constants[0]
        return found

    @property
    def tensors(self) -> frozenset[str]:
        """Activations that any choice may quantize, which calibration must cover."""
        return frozenset(
            tensor
            for unit in self.units
            for tensor in (*unit.outputs, *(edge[0] for edge in (*unit.edges, *unit.out_edges)))
        )

    def known(self, tensors: Collection[str]) -> SchemeSpace:
        """The same space without labels that need an activation without a calibrated range."""
        units = []
        for unit in self.units:
            if all(tensor in tensors for tensor, _ in unit.edges):
                outputs = tuple(tensor for tensor in unit.outputs if tensor in tensors)
                out_edges = tuple(edge for edge in unit.out_edges if edge[0] in tensors)
                units.append(unit.with_results(outputs, out_edges))
                continue
            forms = []  # weights alone, and ranges found at run time
            for form in unit.forms:
                if form.choice.activation is None:
                    forms.append(form)
                elif "dynamic" in form.kinds:
                    forms.append(replace(form, kinds=("dynamic",), biases=()))
            edges = unit.edges if any("dynamic" in form.kinds for form in forms) else ()
            units.append(replace(unit, edges=edges, outputs=(), out_edges=(), forms=tuple(forms)))
        smaller = copy(self)
        smaller.units = tuple(units)
        return smaller

    def resolve(self, labels: Mapping[str, Label]) -> Placement:
        """The placement if each unit has its label; units not named stay ``fp``.

        Raises `PlacementError` for an unknown unit, or a label that it does not offer.
        """
        choices = [self._choice(unit, label) for unit, label in sorted(labels.items()) if label != "fp"]
        if self._capabilities.carriers:
            choices = self._before_floats(choices)
        floats = self._float_products({choice.unit for choice in choices})
        covered = _cover_edges(choices, floats)
        added = {}
        for one, places in self._completions:
            lacks_pair = any(site.weight and site not in covered for site in one.reads)
            if lacks_pair and not any(map(covered.isdisjoint, places)):
                added[one.unit] = one
        if added:
            every = {choice.unit: choice for choice in choices} | added
            choices = [every[unit] for unit in sorted(every)]
            covered = _cover_edges(choices, floats)
        sites = frozenset(map(self._join, group_sites(self.model, covered)))
        return Placement(sites=sites, labels=tuple((choice.unit, choice.label) for choice in choices))

    def project(self, placement: Placement) -> tuple[Placement, tuple[str, ...]]:
        """The placement of the labels derived from the sites, and the tensors of other pairs, except biases.

        A placement of the space itself is unchanged.
        """
        own = self.resolve(labels_of(self, placement))
        covered = {end for site in own.sites for end in site.consumers}
        others = (site for site in placement.ordered if site.format != BIAS_FORMAT)
        return own, tuple(
            dict.fromkeys(site.tensor for site in others if not covered.issuperset(site.consumers))
        )

    def permitted(self, placement: Placement) -> Placement:
        """The placement, from any source, if it quantizes nothing that the spec excludes.

        Raises `PlacementError` naming the first excluded node. Nodes without filters are not checked.
        """
        outside = {end for site in placement.sites for end in site.consumers if end.node in self._closed}
        for unit in self.units if outside else ():  # what some choice quantizes is allowed
            outside.difference_update(end for _, end in (*unit.edges, *self.result_edges(unit)))
            for site in (site for form in unit.forms for site in (*form.constants, *form.biases)):
                outside.difference_update(site.consumers)
        if outside:
            raise PlacementError(
                f"the placement quantizes an input of node '{min(outside).node}', "
                "which patterns: keeps in floating point",
                where=self.model.where,
                cure="leave it out, or allow the node",
            )
        return placement

    def result_edges(self, unit: Unit) -> tuple[Edge, ...]:
        """The edges after a unit that are quantized under ``in+out``: the readers of its outputs, and ``out_edges``."""
        ends = ((tensor, end) for tensor in unit.outputs for end in self.model.ends(tensor))
        return (*(edge for edge in ends if edge[1].node not in self._denied), *unit.out_edges)

    def float_edges(self, quantized: Mapping[str, Form]) -> Iterator[Edge]:
        """The edges without pairs: before units with only a quantized weight, and before float products."""
        alone = (self.by_id[name] for name, form in quantized.items() if form.choice.activation is None)
        yield from (edge for unit in alone for edge in self._edges_before(unit))
        yield from self._float_products(quantized)

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """The label for each unit that offers it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self, name: str = "") -> dict[str, Label]:
        """Each unit quantized as far as possible, in the format with that name in labels.

        In the case's first format, units that do not offer it get the next one that they do.
        """
        full = {unit.id: unit.full_in(name) if name else unit.full for unit in self.units}
        return {unit: label for unit, label in full.items() if label != "fp"}

    # ---- which pairs follow from labels ----------------------------------------------------------

    def _before_floats(self, choices: list[_Choice]) -> list[_Choice]:
        """The choices without those of units that quantize an edge which is to be float, and cannot omit its pair."""
        while True:
            floats = self._float_products({choice.unit for choice in choices}).union(
                *(choice.floats for choice in choices)
            )
            kept = []
            for choice in choices:
                fixed = choice.reads if choice.yields else (*choice.reads, *choice.makes)
                if floats.isdisjoint(map(_edge_of, fixed)):
                    kept.append(choice)
            if len(kept) == len(choices):
                return kept
            choices = kept  # a product may now be float

    def _float_products(self, quantized: Collection[str]) -> frozenset[Edge]:
        """The edges before products of activations that are not in these units."""
        return frozenset(edge for unit, edges in self._products if unit not in quantized for edge in edges)

    @cached_property
    def _products(self) -> list[tuple[str, list[Edge]]]:
        """The unit of each product of activations, and the edges before it; none if pairs have one format only.

        A kernel would compute it from both operands as they are, and there is none for operands of two formats.
        """
        model, carriers = self.model, self._capabilities.carriers
        forms = (form for unit in self.by_id.values() for form in unit.forms if "in+out" in form.kinds)
        if not carriers or len({form.choice.activation for form in forms}) < 2:
            return []
        owner = {node: unit.id for unit in self.by_id.values() for node in unit.nodes}
        found = []
        for node in model.nodes:
            if node.op_type == "MatMul" and is_default(node) and weight_input(model, node) is None:
                own = data_edges(model, node)
                before = [found for edge in own for found in edges_before(model, edge, carriers)]
                found.append((owner.get(node.name, ""), before))
        return found

    def _edges_before(self, unit: Unit) -> Iterator[Edge]:
        """The edges without pairs if a unit reads floats: its own, and those from which pairs would move there."""
        carriers = self._capabilities.carriers
        own = data_edges(self.model, self.model.by_name[unit.id]) if carriers else unit.edges
        return (found for edge in own for found in edges_before(self.model, edge, carriers))

    def _make_choice(self, name: str, label: Label) -> _Choice:
        unit = self.by_id.get(name)
        if unit is None:
            near = did_you_mean(name, tuple(self.by_id))
            raise PlacementError(f"'{name}' is no unit that can be labelled{near}", where=self.model.where)
        offered = (*unit.labels, *unit.halves)
        if label not in offered:
            raise PlacementError(
                f"unit '{name}' cannot be '{label}'{did_you_mean(label, offered)}",
                where=self.model.where,
                cure=f"it can be {', '.join(offered)}",
            )
        form, kind = unit.form_of(label), kind_of(label)
        gives = kind == "in+out" or (kind == "activation-only" and "in+out" in form.kinds)
        fmt = form.choice.reads(kind)
        reads = [self._activation(edge, fmt) for edge in unit.edges] if fmt is not None else []
        reads += form.constants if kind != "activation-only" else ()
        reads += form.biases if kind == "in-only" else ()
        return _Choice(
            unit=unit.id,
            label=label,
            reads=tuple(reads),
            makes=tuple(self._activation(edge, fmt or "") for edge in self.result_edges(unit))
            if gives
            else (),
            floats=frozenset(self._edges_before(unit)) if fmt is None else frozenset(),
            yields="in-only" in form.kinds,
        )

    @cached_property
    def _completions(self) -> list[tuple[_Choice, list[frozenset[Site]]]]:
        """The choices ``in+out`` of units that the runtime quantizes if what they read and give is quantized.

        With each, for each edge before and after the unit, the pairs that reach it.
        """
        found = []
        model, past = self.model, self._capabilities.moved_past
        for unit in self.by_id.values():
            results = tuple(self.result_edges(unit)) if unit.op_type in self._capabilities.completes else ()
            for form in unit.forms if results else ():
                label, fmt = label_of(form.choice.name, "in+out"), form.choice.activation
                if label in form.labels and fmt is not None:
                    around = [[*edges_before(model, edge, past)] for edge in unit.edges]
                    around += [[*edges_after(model, edge, past)] for edge in results]
                    places = [frozenset(self._activation(edge, fmt) for edge in edges) for edges in around]
                    found.append((self._choice(unit.id, label), places))
        return found

    def _activation(self, edge: Edge, fmt: str) -> Site:
        """The pair of an edge in a format; blocks are along the last axis, which products are summed over."""
        blocked = bool(fmt) and number_format(fmt).block
        axis = len(self.model.shape(edge[0]) or ()) - 1 if blocked else None
        return Site(tensor=edge[0], consumers=edge[1:], format=fmt, axis=axis)


def group_sites(model: Model, singles: Iterable[Site]) -> Iterable[frozenset[Site]]:
    """The pairs with one reader each that are one site: of one tensor with equal formats, for readers in one graph.

    Kernels are fused within a graph. Each int32 bias has a scale of its own.
    """
    groups: defaultdict[tuple[object, ...], set[Site]] = defaultdict(set)
    for site in singles:
        (end,) = site.consumers
        in_main = site.weight or end.is_output or not model.has_bodies
        scope = "" if in_main else model.by_name[end.node].scope
        own = end if site.format == BIAS_FORMAT else None
        groups[site.tensor, site.format, site.axis, site.weight, scope, own].add(site)
    return map(frozenset, groups.values())


def join_readers(sites: frozenset[Site]) -> Site:
    """The site of a group with all its readers."""
    first = next(iter(sites))
    return (
        first
        if len(sites) == 1
        else replace(first, consumers=tuple(c for one in sites for c in one.consumers))
    )


def _edge_of(site: Site) -> Edge:
    return site.tensor, site.consumers[0]


def labels_of(space: SchemeSpace, *placements: Placement) -> dict[str, Label]:
    """The label of each unit that is wholly quantized: all inputs, its weight, and for integers out its outputs.

    Several placements are merged. Of the formats of a unit, it gets the one most similar to its sites;
    otherwise formats and axes are ignored and taken from the space. Readers of floats do not count for the outputs.
    """
    covered = {end: site.format for p in placements for site in p.sites for end in site.consumers}
    forms = {unit.id: form for unit in space.units if (form := _choose_form(unit, covered)) is not None}
    floats = {end for _, end in space.float_edges(forms)}
    found: dict[str, Label] = {}
    for name, form in forms.items():
        unit = space.by_id[name]
        results = [end for _, end in space.result_edges(unit)]
        is_covered = any(end in covered for end in results) and all(
            end in covered or end in floats for end in results
        )
        has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
        wanted: Kind = "in+out" if is_covered and not has_integer_bias else "in-only"
        if {covered.get(end) for _, end in unit.edges} == {RUN_TIME} and "dynamic" in form.kinds:
            wanted = "dynamic"
        kind = wanted if wanted in form.kinds else "in-only"
        if kind in form.kinds:
            found[name] = label_of(form.choice.name, kind)
    return found


def _choose_form(unit: Unit, covered: Mapping[Consumer, str]) -> Form | None:
    """The format that a unit's inputs are all quantized in; of several, the most similar one.

    That has most constants stored as in this format, then most activations, then most of both.
    """
    similar: dict[Form, tuple[int, ...]] = {}
    for form in unit.forms:
        fmt = form.choice.activation
        constants = [(end, site.format) for site in form.constants for end in site.consumers]
        activations = [] if fmt is None else [(end, fmt) for _, end in unit.edges]
        if all(end in covered for end, _ in (*constants, *activations)):
            same = (sum(covered[end] == stored for end, stored in ends) for ends in (constants, activations))
            similar[form] = *same, len(constants) + len(activations)
    return max(similar, key=similar.__getitem__, default=None)


def _cover_edges(choices: list[_Choice], floats: frozenset[Edge]) -> set[Site]:
    """The pairs of edges that are read quantized, and of those made quantized if no reader needs otherwise.

    A reader may need another format, or float if the producer can omit its pair. ``floats`` are more edges that are to
    be float.
    """
    covered = {site for choice in choices for site in choice.reads}
    wanted = {_edge_of(site): site for site in covered}
    floats = floats.union(*(choice.floats for choice in choices)).difference(wanted)
    for choice in choices:
        for site in choice.makes:
            edge = _edge_of(site)
            if wanted.get(edge, site) == site and not (choice.yields and edge in floats):
                covered.add(site)
    return covered


# ---- reasons against operators and graph outputs, for `qdqspec inspect` ----------------------------------


def judge(
    model: Model,
    capabilities: Capabilities,
    *,
    backend: str,
    note: str = "",
    rules: QuantizeRules | None = None,
) -> Judged:
    """The nodes of a model that a backend's search may quantize, and the reasons against the others.

    The model is converted from float16 and folded first, as in tuning. ``note`` is a remark about the backend, which
    one on the conversion follows.
    """
    rules = rules or QuantizeRules()
    base, conversion = with_integer_kernels(model, quantizes_half=capabilities.quantizes_half)
    added = base.by_name.keys() - model.by_name.keys()  # casts
    folded = fold_weights(base)
    missing = frozenset(folded.missing)
    carried = flow_of(folded.model).carried
    space = SchemeSpace(folded.model, capabilities, rules=rules)
    # Folding renumbers nodes without a name: they are matched by their order. Constant nodes may be folded too.
    ours_left = (node for node in model.nodes if node.name not in missing and not is_constant_node(node))
    theirs_left = (n for n in folded.model.nodes if not is_constant_node(n) and n.name not in added)
    left = zip(ours_left, theirs_left, strict=True)
    reasons = {
        ours.name: _explain_node(space, theirs, carried) for ours, theirs in left if not ours.is_marker
    }
    reasons |= {
        name: f"{model.by_name[name].op_type}: folded into the operator before it" for name in folded.removed
    }
    reasons |= dict.fromkeys(folded.computed, COMPUTED)
    offered = {tensor for unit in space.units for tensor in unit.outputs}
    asked = SchemeSpace(folded.model, capabilities, rules=replace(rules, outputs=True))
    outputs = {
        tensor: "" if tensor in offered else _explain_output(asked, tensor, carried) or NOT_ASKED
        for tensor in folded.model.outputs
    }
    note = "; ".join(filter(None, (note, conversion)))
    return Judged(backend=backend, note=note, reasons=reasons, outputs=outputs)


def _explain_node(space: SchemeSpace, node: Node, carried: frozenset[int]) -> str:
    """The reason why a node is not offered; empty if it is."""
    if node.name in space.by_id:
        return ""
    op_type = node.op_type
    if node.index in carried:
        return COMPUTED
    if op_type in CONTROL:
        return f"{op_type}: control flow; the nodes of its bodies count by themselves"
    if node.name in space.unit_of:
        return f"{op_type}: quantized together with the operator before it"
    if rule := space.excluded.get(node.name):
        return f"{op_type}: rule {rule} leaves it in float"
    found = space.finder.examine(node)
    return found if isinstance(found, str) else f"{op_type}: {OTHER_PAIRS}"


def _explain_output(space: SchemeSpace, tensor: str, carried: frozenset[int]) -> str:
    """The reason why a graph output stays float; empty if it may be quantized."""
    model, maker = space.model, space.model.producer.get(tensor)
    if any(tensor in unit.outputs for unit in space.units):
        return ""
    if maker is None or tensor in model.constants:
        return "no node computes it"
    if not is_float(model, tensor):
        return f"it holds {type_name(model, tensor)}"
    if maker.name not in space.unit_of:
        return _explain_node(space, maker, carried)
    why = space.finder.why_float(tensor, model.by_name[space.unit_of[maker.name]])
    return why or f"{maker.op_type}: the backend runs it with a float output only"
