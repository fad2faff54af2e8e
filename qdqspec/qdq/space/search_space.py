"""The search space: the units of a model with the labels of each, and the placement of each choice of labels.

Given one label per unit, `SchemeSpace.resolve` gives the Q/DQ pairs, by `PairEdges`. `project` is the inverse for
placements of other tools and models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.quantize.formats import RUN_TIME
from qdqspec.qdq.space.pair_edges import PairEdges
from qdqspec.qdq.space.unit_finder import UnitFinder
from qdqspec.qdq.space.units import (
    Edge,
    Form,
    Unit,
    apply_rules,
    edges_after,
    edges_before,
    format_choices,
    weight_input,
    with_results,
)
from qdqspec.types import Consumer, Kind, Label, Placement, QuantizeRules, Region, Site, kind_of, label_of


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
        found = tuple(self.finder.find(allowed))
        self.stages: dict[str, tuple[Unit, ...]] = apply_rules(model, found, capabilities.rules)
        *_, found = self.stages.values()
        outside = {n.name for n in model.nodes} - set(allowed) if allowed is not None else set()
        self._closed = frozenset(denied) | outside
        self._denied = frozenset((*denied, *self._quantized_unasked(found)))
        self.units = tuple(map(self._drop_denied_outputs, found))
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
        self._edges = PairEdges(self.model, self.by_id, self.result_edges, self._capabilities)

    def _drop_denied_outputs(self, unit: Unit) -> Unit:
        """The unit without outputs that only denied nodes read, because denied nodes read floating point."""
        outputs = tuple(
            t for t in unit.outputs if any(e.node not in self._denied for e in self.model.ends(t))
        )
        out_edges = tuple(edge for edge in unit.out_edges if edge[1].node not in self._denied)
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
        smaller.units = tuple(_keep_calibrated(unit, tensors) for unit in self.units)
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
        """The edges without pairs: before units with only a quantized weight, and before float products."""
        alone = (self.by_id[name] for name, form in quantized.items() if form.choice.activation is None)
        yield from (edge for unit in alone for edge in self._edges.float_edges(unit))
        yield from self._edges.float_products(quantized)

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """The label for each unit that offers it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self, name: str = "") -> dict[str, Label]:
        """Each unit quantized as far as possible, in the format with that name in labels.

        In the case's first format, units that do not offer it get the next one that they do.
        """
        full = {unit.id: unit.full_in(name) if name else unit.full for unit in self.units}
        return {unit: label for unit, label in full.items() if label != "fp"}


def _drop_ranges(form: Form) -> Form:
    """The form with the kinds that need no calibrated range: weights alone, and ranges found at run time."""
    if form.choice.activation is None:
        return form
    kinds: tuple[Kind, ...] = ("dynamic",) if "dynamic" in form.kinds else ()
    return replace(form, kinds=kinds, biases=())


def _keep_calibrated(unit: Unit, tensors: Collection[str]) -> Unit:
    """The unit with its calibrated parts: if an edge is not calibrated, only forms without static ranges remain."""
    if not all(tensor in tensors for tensor, _ in unit.edges):
        alone = tuple(form for form in map(_drop_ranges, unit.forms) if form.kinds)
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
    forms = {unit.id: form for unit in space.units if (form := _choose_form(unit, covered)) is not None}
    floats = {end for _, end in space.float_edges(forms)}
    found = {
        name: _choose_label(space, space.by_id[name], form, covered, floats) for name, form in forms.items()
    }
    return {name: label for name, label in found.items() if label != "fp"}


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


def _choose_label(
    space: SchemeSpace, unit: Unit, form: Form, covered: Mapping[Consumer, str], floats: Collection[Consumer]
) -> Label:
    """``in+out`` if all readers of the results are quantized; readers of floats do not count."""
    has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
    results = [end for _, end in space.result_edges(unit)]
    quantized = [end for end in results if end in covered]
    is_result_covered = bool(quantized) and all(end in covered or end in floats for end in results)
    wanted: Kind = "in+out" if is_result_covered and not has_integer_bias else "in-only"
    if {covered.get(end) for _, end in unit.edges} == {RUN_TIME} and "dynamic" in form.kinds:
        wanted = "dynamic"
    kind = wanted if wanted in form.kinds else "in-only"
    return label_of(form.choice.name, kind) if kind in form.kinds else "fp"
