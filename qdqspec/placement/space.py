"""The search space: the units of a model with the labels of each, and the placement of each choice of labels.

Given one label per unit, `resolve` returns the Q/DQ pairs. If two formats meet on one edge, the reader's pair
is inserted: its kernel requires it, and the producer outputs float on that edge. A reader with only its
weight quantized reads floats if the producer can output floats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace

from qdqspec.backends.base import Capabilities
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.placement.forms import Form, format_choices
from qdqspec.placement.pair_edges import PairEdges
from qdqspec.placement.rules import apply_rules
from qdqspec.placement.units import Edge, Unit, UnitFinder, with_results
from qdqspec.types import Consumer, Kind, Label, Placement, QuantizeRules, Region, Site, kind_of


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
        self.choices = format_choices(self.rules, capabilities)
        self.finder = UnitFinder(model, capabilities, self.rules, self.choices)
        known = None if like is None else {unit.id: unit for unit in like.stages[""]}
        found = tuple(self.finder.find(allowed, known))
        self.stages: dict[str, tuple[Unit, ...]] = apply_rules(model, found, capabilities.rules)
        *_, found = self.stages.values()
        self._denied = frozenset(denied)
        self._closed = self._denied | (
            {n.name for n in model.nodes} - set(allowed) if allowed is not None else set()
        )
        self._set_units(map(self._apart, found))
        self.labels: tuple[Label, ...] = ("fp", *self._labels())

    def _set_units(self, units: Iterable[Unit]) -> None:
        """Set the units that have a form, and what is derived from them: units by id (the name of their first node),
        the unit's id by node name, and the edges of pairs."""
        self.units: tuple[Unit, ...] = tuple(unit for unit in units if unit.forms)
        self.by_id = {unit.id: unit for unit in self.units}
        self.unit_of = {node: unit.id for unit in self.units for node in unit.nodes}
        self._edges = PairEdges(self.model, self.by_id, self.result_edges)

    def _labels(self) -> Iterator[Label]:
        """The labels of each format; dynamic ones where a unit has one."""
        offered = {label for unit in self.units for label in unit.labels}
        for choice in self.choices:
            yield from (label for label in choice.labels if kind_of(label) != "dynamic" or label in offered)

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
        ends = {end for site in placement.sites for end in site.consumers if end.node in self._closed}
        if ends and (outside := sorted(ends - self._offered())):
            raise PlacementError(
                f"the placement quantizes what node '{outside[0].node}' reads, which patterns: keeps in floating point",
                where=self.model.where,
                cure="leave it out, or allow the node",
            )
        return placement

    def _offered(self) -> frozenset[Consumer]:
        """All inputs that some choice quantizes."""
        edges = (end for unit in self.units for _, end in (*unit.edges, *self.result_edges(unit)))
        sites = (
            site for unit in self.units for form in unit.forms for site in (*form.constants, *form.biases)
        )
        return frozenset((*edges, *(end for site in sites for end in site.consumers)))

    def result_edges(self, unit: Unit) -> tuple[Edge, ...]:
        """The edges after a unit that are quantized under ``in+out``: the readers of its outputs, and ``out_edges``."""
        ends = ((tensor, end) for tensor in unit.outputs for end in self.model.ends(tensor))
        return (*(edge for edge in ends if edge[1].node not in self._denied), *unit.out_edges)

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
