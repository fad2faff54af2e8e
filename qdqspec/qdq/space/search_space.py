"""The search space: the units of a model with the labels of each, and the placement of each choice of labels.

Given one label per unit, `SchemeSpace.resolve` gives the Q/DQ pairs. If two formats meet on one edge, the reader's pair
is inserted: its kernel requires it, and the producer outputs float on that edge. A reader with only its
weight quantized reads floats if the producer can output floats; for some runtimes a producer that cannot stays float,
and no pair is before operators that pairs move past to that reader. A unit whose weight the runtime would quantize
itself, because its inputs and results have pairs, is ``in+out``. `project` is the inverse for placements of other tools
and models.

A pair can be inserted on an edge (a tensor and its reader) in one format. The edges of a choice are computed
when it is first used and kept in columns, so that resolving takes a few operations on whole columns instead of several
for each of tens of thousands of units.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.quantize.formats import RUN_TIME, number_format
from qdqspec.qdq.space.completions import Completions, data_edges, edges_after, edges_before
from qdqspec.qdq.space.units import (
    Edge,
    Form,
    Unit,
    UnitFinder,
    apply_rules,
    format_choices,
    weight_input,
    with_results,
)
from qdqspec.types import Consumer, Kind, Label, Placement, QuantizeRules, Region, Site, kind_of, label_of

# Tensor, format, axis; the unit of a bias, or "" for another constant; the graph that reads an activation.
_Key = tuple[str, str, int | None, str | None, str]
_Numbers = npt.NDArray[np.int64]

_NOBODY, _FLOAT = -1, -2  # demands on an edge other than the numbers of edges: none, float
_WIDE = 62  # readers of one tensor: the bits of a machine integer


class _Tensor:
    """One tensor in one format. ``first`` is the number of its first edge, ``place`` the position of each reader."""

    __slots__ = ("_ends", "_key", "_sites", "first", "place")

    def __init__(self, first: int, key: _Key, ends: tuple[Consumer, ...]) -> None:
        self.first = first
        self.place = {end: i for i, end in enumerate(ends)}
        self._key = key
        self._ends = ends
        self._sites: dict[int, Site] = {}

    def site(self, ends: int) -> Site:
        """The site whose readers are the bits of a number. Made once: large placements compare sites by identity."""
        made = self._sites.get(ends)
        if made is None:
            tensor, fmt, axis, owner, _ = self._key
            consumers = tuple(end for i, end in enumerate(self._ends) if ends >> i & 1)
            made = Site(tensor=tensor, consumers=consumers, format=fmt, axis=axis, weight=owner is not None)
            self._sites[ends] = made
        return made


class PairEdges:
    """All edges of a model where a pair can be inserted, and those of each choice of a label for a unit.

    ``results`` returns the edges after a unit that are quantized if it outputs integers. ``capabilities`` names the
    ops that the runtime quantizes if what they read and give is quantized.
    """

    def __init__(
        self,
        model: Model,
        units: Mapping[str, Unit],
        results: Callable[[Unit], Iterable[Edge]],
        capabilities: Capabilities,
    ) -> None:
        self._model = model
        self._units = units
        self._results = results
        self._capabilities = capabilities
        self._known: defaultdict[Label, dict[str, int]] = defaultdict(dict)  # choices by label and unit
        self._choices: list[tuple[str, Label]] = []
        self._ranks = array("q")  # of the units of choices
        self._yields = array("b")  # whether a choice can omit the pairs on its outputs
        # Numbers of choices, each with one edge that it reads quantized, makes quantized, or reads in float.
        self._reads, self._makes, self._floats = array("q"), array("q"), array("q")
        self._tensors: dict[_Key, _Tensor] = {}
        self._firsts = array("q")  # first edges of tensors in a format
        self._bits = array("q")  # of edges: the bit within its tensor and format
        self._edges = array("q")  # of the model, for these edges
        self._edge: dict[Edge, int] = {}
        self._widest = 0

    @cached_property
    def _rank(self) -> dict[str, int]:
        """Units by name in sorted order."""
        return {name: i for i, name in enumerate(sorted(self._units))}

    def placement(self, labels: Mapping[str, Label]) -> Placement:
        """The placement if each unit has its label. Raises `PlacementError` as `SchemeSpace.resolve`."""
        known, completions = self._known, self._completions
        numbers = [known[label].get(name, -1) for name, label in labels.items() if label != "fp"]
        if -1 in numbers:
            numbers = [self._number(*choice) for choice in sorted(labels.items()) if choice[1] != "fp"]
        choices = np.array(numbers, np.int64)
        choices = self._ordered(self._before_floats(choices) if self._capabilities.carriers else choices)
        floats = self._float_products(choices)
        covered = self._covered(choices, floats)
        if completions and (added := completions.of(covered)):
            named = {self._choices[number][0] for number in added}
            kept = [number for number in choices.tolist() if self._choices[number][0] not in named]
            choices = self._ordered(np.array([*kept, *added], np.int64))
            covered = self._covered(choices, floats)
        sites = self._sites(covered)
        ordered = tuple(map(self._choices.__getitem__, choices.tolist()))
        return Placement(sites=frozenset(sites), labels=ordered, listed=sites)

    def _ordered(self, choices: _Numbers) -> _Numbers:
        """The choices in the order of their units' names."""
        return choices[np.argsort(np.asarray(self._ranks)[choices])]

    @cached_property
    def _completions(self) -> Completions:
        """The choices ``in+out`` of units that the runtime quantizes if what they read and give is quantized."""
        found, completes = Completions(), self._capabilities.completes
        for unit in self._units.values() if completes else ():
            results = tuple(self._results(unit))
            for form in unit.forms if results and unit.op_type in completes else ():
                label, fmt = label_of(form.choice.name, "in+out"), form.choice.activation
                if label in form.labels and fmt is not None:
                    constants = (
                        self._pair_edge((site.tensor, site.format, site.axis, "", ""), end)
                        for site in form.constants
                        for end in site.consumers
                    )
                    found.add(self._number(unit.id, label), self._places(unit, results, fmt), constants)
        return found

    def _places(self, unit: Unit, results: Iterable[Edge], fmt: str) -> Iterator[list[int]]:
        """For each edge before and after a unit, those that give it a pair in a format."""
        past, model = self._capabilities.moved_past, self._model
        before = (edges_before(model, edge, past) for edge in unit.edges)
        for found in (*before, *(edges_after(model, edge, past) for edge in results)):
            yield [self._activation(tensor, end, fmt) for tensor, end in found]

    def _sites(self, covered: npt.NDArray[np.bool_]) -> list[Site]:
        """The sites of all tensors in a format that have covered edges."""
        if not self._tensors:
            return []
        kind = np.object_ if self._widest > _WIDE else np.int64
        bits = np.left_shift(1, np.asarray(self._bits).astype(kind))
        ends = np.add.reduceat(np.where(covered, bits, 0), np.asarray(self._firsts)).tolist()
        return [tensor.site(some) for tensor, some in zip(self._tensors.values(), ends, strict=True) if some]

    def _covered(self, choices: _Numbers, floats: _Numbers) -> npt.NDArray[np.bool_]:
        """The edges that have a pair: those read quantized, and those made quantized if no reader needs otherwise.

        A reader may need another format, or float if the producer can omit its pair. ``floats`` are more edges that are
        to be float.
        """
        (_, reads), (makers, makes), (_, own) = self._edges_of(choices)
        edges = np.asarray(self._edges)
        wanted = np.full(len(self._edge), _NOBODY)
        wanted[own] = wanted[floats] = _FLOAT
        wanted[edges[reads]] = reads
        theirs = wanted[edges[makes]]
        stays = (theirs == _FLOAT) & ~np.asarray(self._yields).astype(np.bool_)[makers]
        covered = np.zeros(len(edges), np.bool_)
        covered[reads] = True
        covered[makes[(theirs == _NOBODY) | (theirs == makes) | stays]] = True
        return covered

    def _edges_of(self, choices: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Choices and their edges, in two rows: those read quantized, those made quantized, those read in float."""
        chosen = np.zeros(len(self._choices), np.bool_)
        chosen[choices] = True
        reads, makes, floats = (
            np.asarray(column).reshape(-1, 2) for column in (self._reads, self._makes, self._floats)
        )
        return reads[chosen[reads[:, 0]]].T, makes[chosen[makes[:, 0]]].T, floats[chosen[floats[:, 0]]].T

    def _before_floats(self, choices: _Numbers) -> _Numbers:
        """The choices without those of units that quantize an edge which is to be float, and cannot omit its pair."""
        more = self._float_products(choices)
        (readers, reads), (makers, makes), (_, floats) = self._edges_of(choices)
        is_float = np.zeros(len(self._edge), np.bool_)
        is_float[floats] = is_float[more] = True
        edges, yields = np.asarray(self._edges), np.asarray(self._yields).astype(np.bool_)
        stays = makers[is_float[edges[makes]] & ~yields[makers]]
        kept = np.setdiff1d(choices, np.concatenate([readers[is_float[edges[reads]]], stays]))
        return kept if len(kept) == len(choices) else self._before_floats(kept)  # a product may now be float

    def _float_products(self, choices: _Numbers) -> _Numbers:
        """The edges before products of activations that no choice quantizes."""
        quantized = {self._choices[number][0] for number in choices.tolist()} if self._products else ()
        found = (edges for unit, edges in self._products if unit not in quantized)
        return np.array([edge for edges in found for edge in edges], np.int64)

    @cached_property
    def _products(self) -> list[tuple[str, list[int]]]:
        """The product of activations by unit, and the edges before it, if their pairs may be of several formats.

        A kernel would compute it from both operands as they are, and there is none for operands of two formats.
        """
        return [(unit, [*map(self._model_edge, edges)]) for unit, edges in self.products()]

    def products(self) -> Iterator[tuple[str, list[Edge]]]:
        """The unit of each product of activations and its `float_edges`; none if it cannot be of two formats."""
        model, carriers = self._model, self._capabilities.carriers
        forms = (form for unit in self._units.values() for form in unit.forms if "in+out" in form.kinds)
        if not carriers or len({form.choice.activation for form in forms}) < 2:
            return
        owner = {node: unit.id for unit in self._units.values() for node in unit.nodes}
        for node in model.nodes:
            if node.op_type == "MatMul" and is_default(node) and weight_input(model, node) is None:
                own = data_edges(model, node)
                before = [found for edge in own for found in edges_before(model, edge, carriers)]
                yield owner.get(node.name, ""), before

    def float_edges(self, unit: Unit) -> Iterator[Edge]:
        """The edges without pairs if a unit reads floats: its own, and those from which pairs would move there."""
        carriers = self._capabilities.carriers
        own = data_edges(self._model, self._model.by_name[unit.id]) if carriers else unit.edges
        return (found for edge in own for found in edges_before(self._model, edge, carriers))

    def _number(self, name: str, label: Label) -> int:
        """The number of a choice, whose edges are computed on first use."""
        if name in self._known[label]:
            return self._known[label][name]
        unit = self._offering(name, label)
        form = unit.form_of(label)
        kind = kind_of(label)
        gives = kind == "in+out" or (kind == "activation-only" and "in+out" in form.kinds)
        biases = form.biases if kind == "in-only" else ()
        constants = form.constants if kind != "activation-only" else ()
        number = self._known[label][name] = len(self._choices)
        self._choices.append((name, label))
        self._ranks.append(self._rank[name])
        self._yields.append("in-only" in form.kinds)
        fmt = form.choice.reads(kind)
        if fmt is None:
            for edge in self.float_edges(unit):
                self._floats.extend((number, self._model_edge(edge)))
        else:
            for tensor, end in unit.edges:
                self._reads.extend((number, self._activation(tensor, end, fmt)))
        for site, owner in (*((site, "") for site in constants), *((site, name) for site in biases)):
            key = (site.tensor, site.format, site.axis, owner, "")
            for end in site.consumers:
                self._reads.extend((number, self._pair_edge(key, end)))
        for tensor, end in self._results(unit) if gives else ():
            self._makes.extend((number, self._activation(tensor, end, fmt or "")))
        return number

    def _offering(self, name: str, label: Label) -> Unit:
        """The unit of that name, which must offer the label."""
        unit = self._units.get(name)
        if unit is None:
            near = did_you_mean(name, tuple(self._units))
            raise PlacementError(f"'{name}' is no unit that can be labelled{near}", where=self._model.where)
        offered = (*unit.labels, *unit.halves)
        if label not in offered:
            raise PlacementError(
                f"unit '{name}' cannot be '{label}'{did_you_mean(label, offered)}",
                where=self._model.where,
                cure=f"it can be {', '.join(offered)}",
            )
        return unit

    def _activation(self, tensor: str, end: Consumer, fmt: str) -> int:
        """An edge in an activation format; blocks are along the last axis, which products are summed over."""
        blocked = bool(fmt) and number_format(fmt).block
        axis = len(self._model.shape(tensor) or ()) - 1 if blocked else None
        return self._pair_edge((tensor, fmt, axis, None, self._scope(end)), end)

    def _pair_edge(self, key: _Key, end: Consumer) -> int:
        tensor = self._tensors.get(key)
        if tensor is None:
            ends = self._model.ends(key[0])
            if self._model.has_bodies and key[3] is None:
                ends = tuple(e for e in ends if self._scope(e) == key[4])
            tensor = self._tensors[key] = _Tensor(len(self._bits), key, ends)
            self._firsts.append(tensor.first)
            self._bits.extend(range(len(ends)))
            self._edges.extend(self._model_edge((key[0], end)) for end in ends)
            self._widest = max(self._widest, len(ends))
        return tensor.first + tensor.place[end]

    def _scope(self, end: Consumer) -> str:
        """The graph of a reader; kernels are fused within one, so that a pair is for readers in one."""
        if not self._model.has_bodies or end.is_output:
            return ""
        return self._model.by_name[end.node].scope

    def _model_edge(self, edge: Edge) -> int:
        return self._edge.setdefault(edge, len(self._edge))


class SchemeSpace:
    """All placements of one model that the backend can use and the spec allows.

    Units are made of ``allowed`` nodes (all if ``None``); ``denied`` ones read nothing quantized. ``like`` is a
    space that differs only in whether graph outputs may be quantized; units that this does not concern are its own.
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
        like: SchemeSpace | None = None,
    ) -> None:
        self.model = model
        self.regions = regions
        self.rules = rules or QuantizeRules()
        self._capabilities = capabilities
        self.choices = format_choices(self.rules, capabilities)
        self.finder = UnitFinder(model, capabilities, self.rules, self.choices)
        known = None if like is None else {unit.id: unit for unit in like.stages[""]}
        found = tuple(self.finder.find(allowed, known))
        self.stages: dict[str, tuple[Unit, ...]] = apply_rules(model, found, capabilities.rules)
        *_, found = self.stages.values()
        outside = {n.name for n in model.nodes} - set(allowed) if allowed is not None else set()
        self._closed = frozenset(denied) | outside
        self._denied = frozenset((*denied, *self._quantized_unasked(found)))
        self._set_units(map(self._apart, found))
        offered = {label for unit in self.units for label in unit.labels}
        known_labels = (label for choice in self.choices for label in choice.labels)
        # of each format; dynamic ones where a unit has one
        named = (label for label in known_labels if kind_of(label) != "dynamic" or label in offered)
        self.labels: tuple[Label, ...] = ("fp", *named)

    def _quantized_unasked(self, units: Iterable[Unit]) -> Iterator[str]:
        """The closed nodes that the runtime would quantize, as units read what they give, and those before them.

        These are the operators that a pair would be moved past.
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

    def _set_units(self, units: Iterable[Unit]) -> None:
        """Set the units that have a form; index them by id (the name of their first node), and ids by node name."""
        self.units: tuple[Unit, ...] = tuple(unit for unit in units if unit.forms)
        self.by_id = {unit.id: unit for unit in self.units}
        self.unit_of = {node: unit.id for unit in self.units for node in unit.nodes}
        self._edges = PairEdges(self.model, self.by_id, self.result_edges, self._capabilities)

    def _apart(self, unit: Unit) -> Unit:
        """The unit without the outputs that only denied nodes read: these read floating point."""
        if not self._denied:
            return unit
        outputs = tuple(
            t for t in unit.outputs if any(e.node not in self._denied for e in self.model.ends(t))
        )
        out_edges = tuple(edge for edge in unit.out_edges if edge[1].node not in self._denied)
        if (outputs, out_edges) == (unit.outputs, unit.out_edges):
            return unit
        return with_results(unit, outputs, out_edges)

    @property
    def bias_sources(self) -> dict[Consumer, tuple[Site, Site]]:
        """For the consumer of each int32 bias, the sites of the activation and the weight of its product."""
        return {
            bias.consumers[0]: (
                Site(
                    tensor=unit.edges[0][0],
                    consumers=(unit.edges[0][1],),
                    format=form.choice.activation or "",
                ),
                form.constants[0],
            )
            for unit in self.units
            for form in unit.forms
            for bias in form.biases
        }

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
        smaller = copy(self)
        smaller._set_units(_known(unit, tensors) for unit in self.units)  # noqa: SLF001 - of the same class
        return smaller

    def resolve(self, labels: Mapping[str, Label]) -> Placement:
        """The placement if each unit has its label; units not named stay ``fp``.

        Raises `PlacementError` for an unknown unit, or a label that it does not offer.
        """
        return self._edges.placement(labels)

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
        """The edges without pairs before units of which only the weight is quantized, and float products."""
        alone = (self.by_id[name] for name, form in quantized.items() if form.choice.activation is None)
        yield from (edge for unit in alone for edge in self._edges.float_edges(unit))
        yield from (edge for unit, edges in self._edges.products() if unit not in quantized for edge in edges)

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """The label for each unit that offers it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self, name: str = "") -> dict[str, Label]:
        """Each unit quantized as far as possible, in the format with that name in labels.

        In the case's first format, units that do not offer it get the next one that they do.
        """
        full = {unit.id: unit.full_in(name) if name else unit.full for unit in self.units}
        return {unit: label for unit, label in full.items() if label != "fp"}


def _without_ranges(form: Form) -> Form:
    """The form with the kinds that need no calibrated range: weights alone, and ranges found at run time."""
    if form.choice.activation is None:
        return form
    kinds: tuple[Kind, ...] = ("dynamic",) if "dynamic" in form.kinds else ()
    return replace(form, kinds=kinds, biases=())


def _known(unit: Unit, tensors: Collection[str]) -> Unit:
    """The unit with its calibrated parts: if an edge is not calibrated, only forms without static ranges remain."""
    if not all(tensor in tensors for tensor, _ in unit.edges):
        alone = tuple(form for form in map(_without_ranges, unit.forms) if form.kinds)
        edges = unit.edges if any("dynamic" in form.kinds for form in alone) else ()
        return replace(unit, edges=edges, outputs=(), out_edges=(), forms=alone)
    outputs = tuple(tensor for tensor in unit.outputs if tensor in tensors)
    return with_results(unit, outputs, tuple(edge for edge in unit.out_edges if edge[0] in tensors))


def project(space: SchemeSpace, placement: Placement) -> Placement:
    """The placement of the labels derived from the sites. A placement of the space itself is unchanged."""
    return space.resolve(labels_of(space, placement))


def labels_of(space: SchemeSpace, *placements: Placement) -> dict[str, Label]:
    """The label of each unit that is wholly quantized: all inputs, its weight, and for integers out its outputs.

    Several placements are merged. Of the formats of a unit, it gets the one most similar to its sites;
    otherwise formats and axes are ignored and taken from the space.
    """
    covered = {end: site.format for p in placements for site in p.sites for end in site.consumers}
    forms = {unit.id: form for unit in space.units if (form := _form(unit, covered)) is not None}
    floats = {end for _, end in space.float_edges(forms)}
    found = {name: _label(space, space.by_id[name], form, covered, floats) for name, form in forms.items()}
    return {name: label for name, label in found.items() if label != "fp"}


def _form(unit: Unit, covered: Mapping[Consumer, str]) -> Form | None:
    """The format that a unit's inputs are all quantized in, or the most similar one."""
    fitting = [
        form
        for form in unit.forms
        if covered.keys() >= {end for end, _ in (*_constants(form), *_activations(unit, form))}
    ]
    return max(fitting, key=lambda form: _similarity(unit, form, covered), default=None)


def _label(
    space: SchemeSpace, unit: Unit, form: Form, covered: Mapping[Consumer, str], floats: Collection[Consumer]
) -> Label:
    """Integers out if all readers of its results are quantized, except those that read floats."""
    has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
    results = [end for _, end in space.result_edges(unit)]
    quantized = [end for end in results if end in covered]
    is_result_covered = bool(quantized) and all(end in covered or end in floats for end in results)
    wanted: Kind = "in+out" if is_result_covered and not has_integer_bias else "in-only"
    if {covered.get(end) for _, end in unit.edges} == {RUN_TIME} and "dynamic" in form.kinds:
        wanted = "dynamic"
    kind = wanted if wanted in form.kinds else "in-only"
    return label_of(form.choice.name, kind) if kind in form.kinds else "fp"


def _constants(form: Form) -> list[tuple[Consumer, str]]:
    """The readers of a unit's constants, and the format that stores them."""
    return [(end, site.format) for site in form.constants for end in site.consumers]


def _activations(unit: Unit, form: Form) -> list[tuple[Consumer, str]]:
    """The readers of its activations, and the format that stores them; none for weight-only formats."""
    fmt = form.choice.activation
    return [] if fmt is None else [(end, fmt) for _, end in unit.edges]


def _similarity(unit: Unit, form: Form, covered: Mapping[Consumer, str]) -> tuple[int, int, int]:
    """Sort key: number of constants stored as in this format, then of activations, then their total number."""
    ends = _constants(form), _activations(unit, form)
    constants, activations = (sum(covered[end] == stored for end, stored in group) for group in ends)
    return constants, activations, sum(map(len, ends))
