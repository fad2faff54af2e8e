"""What may be chosen: the units of a model with the labels each may carry, and what a choice comes to.

Given one label a unit, `resolve` says where the Q/DQ pairs stand. May import floors 0 to 2; knows nothing of
search or measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model
from qdqspec.placement.rules import apply_rules
from qdqspec.placement.units import Unit, UnitFinder, with_results
from qdqspec.types import Consumer, Label, Placement, QuantizeRules, Region, Site

# Tensor, format, axis; and for a constant the unit that a bias belongs to, or "".
_Key = tuple[str, str, int | None, str | None]


_OF_UNITS = frozenset({"by_id", "unit_of", "_covers"})  # what is found out of units, and kept


class _Stand:
    """Where a pair can stand: a tensor in one format. Its sites differ in the consumers that read the pair.

    Sites are made once and compare by identity in large placements; sets of consumers are bits of a number.
    """

    __slots__ = ("_ends", "_key", "_sites", "place")

    def __init__(self, key: _Key, ends: tuple[Consumer, ...]) -> None:
        self._key = key
        self._ends = ends
        self._sites: dict[int, Site] = {}
        self.place = {end: i for i, end in enumerate(ends)}

    def site(self, ends: int) -> Site:
        """The site that these consumers read."""
        known = self._sites.get(ends)
        if known is None:
            tensor, fmt, axis, owner = self._key
            consumers = tuple(end for i, end in enumerate(self._ends) if ends >> i & 1)
            known = Site(tensor=tensor, consumers=consumers, format=fmt, axis=axis, weight=owner is not None)
            self._sites[ends] = known
        return known


class SchemeSpace:
    """All placements of one model that the backend can use and the spec allows.

    Units are made of ``allowed`` nodes (all where it is ``None``); ``denied`` ones read nothing quantized.
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
        self.activation = _activation_format(self.rules, capabilities)
        weight = capabilities.weights.get(self.rules.format, self.rules.format)
        finder = UnitFinder(model, capabilities, self.rules, self.activation, weight)
        found = apply_rules(model, tuple(finder.find(allowed)), capabilities.rules)
        self._denied = frozenset(denied)
        self.units: tuple[Unit, ...] = tuple(unit for unit in map(self._apart, found) if len(unit.labels) > 1)

    def _apart(self, unit: Unit) -> Unit:
        """The unit less the outputs that only denied nodes read: these read floating point."""
        outputs = tuple(
            t for t in unit.outputs if any(e.node not in self._denied for e in self.model.consumers[t])
        )
        out_edges = tuple(edge for edge in unit.out_edges if edge[1].node not in self._denied)
        if (outputs, out_edges) == (unit.outputs, unit.out_edges):
            return unit
        return with_results(unit, outputs, out_edges)

    @cached_property
    def by_id(self) -> dict[str, Unit]:
        """Units by their id, the name of their first node."""
        return {unit.id: unit for unit in self.units}

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """Unit id by node name, for the nodes that belong to one."""
        return {node: unit.id for unit in self.units for node in unit.nodes}

    @property
    def bias_sources(self) -> dict[Consumer, tuple[Site, Site]]:
        """For the consumer of each int32 bias, the sites of the activation and the weight of its product."""
        return {
            bias.consumers[0]: (
                Site(tensor=unit.edges[0][0], consumers=(unit.edges[0][1],), format=self.activation),
                unit.constants[0],
            )
            for unit in self.units
            for bias in unit.biases
        }

    @property
    def tensors(self) -> frozenset[str]:
        """Activations that any choice may quantize: what calibration must know."""
        return frozenset(
            tensor
            for unit in self.units
            for tensor in (*unit.outputs, *(edge[0] for edge in (*unit.edges, *unit.out_edges)))
        )

    def known(self, tensors: Collection[str]) -> SchemeSpace:
        """The same space less the units that touch an activation without a calibrated range."""
        smaller = SchemeSpace.__new__(SchemeSpace)
        smaller.__dict__.update({k: v for k, v in self.__dict__.items() if k not in _OF_UNITS})
        units = []
        for unit in self.units:
            if all(tensor in tensors for tensor, _ in unit.edges):
                outputs = tuple(t for t in unit.outputs if t in tensors)
                out_edges = tuple(edge for edge in unit.out_edges if edge[0] in tensors)
                smaller_unit = with_results(unit, outputs, out_edges)
                if len(smaller_unit.labels) > 1:
                    units.append(smaller_unit)
        smaller.units = tuple(units)
        return smaller

    def resolve(self, labels: Mapping[str, Label]) -> Placement:
        """Where the pairs stand when each unit carries its label; units not named stay ``fp``."""
        covered: dict[_Stand, int] = {}
        chosen = sorted((name, label) for name, label in labels.items() if label != "fp")
        for choice in chosen:
            for stand, ends in self._covers.get(choice) or self._cover(*choice):
                covered[stand] = covered.get(stand, 0) | ends
        sites = frozenset([stand.site(ends) for stand, ends in covered.items()])
        return Placement(sites=sites, labels=tuple(chosen))

    @cached_property
    def _covers(self) -> dict[tuple[str, Label], tuple[tuple[_Stand, int], ...]]:
        """What each unit covers under each label, found when first asked for."""
        return {}

    @cached_property
    def _stands(self) -> dict[_Key, _Stand]:
        return {}

    def _cover(self, name: str, label: Label) -> tuple[tuple[_Stand, int], ...]:
        unit = self.by_id[name]
        edges = (*unit.edges, *(self.result_edges(unit) if label == "in+out" else ()))
        biases = unit.biases if label == "in-only" else ()
        owned = [*((site, "") for site in unit.constants), *((site, unit.id) for site in biases)]
        self._covers[name, label] = (
            *(self._covered((tensor, self.activation, None, None), [end]) for tensor, end in edges),
            *(self._covered((s.tensor, s.format, s.axis, owner), s.consumers) for s, owner in owned),
        )
        return self._covers[name, label]

    def _covered(self, key: _Key, ends: Iterable[Consumer]) -> tuple[_Stand, int]:
        if key not in self._stands:
            self._stands[key] = _Stand(key, self.model.consumers[key[0]])
        stand = self._stands[key]
        return stand, sum(1 << stand.place[end] for end in ends)

    def result_edges(self, unit: Unit) -> tuple[tuple[str, Consumer], ...]:
        """The edges after a unit that are quantized under ``in+out``: all that read its outputs, and others."""
        ends = ((tensor, end) for tensor in unit.outputs for end in self.model.consumers[tensor])
        return (*(edge for edge in ends if edge[1].node not in self._denied), *unit.out_edges)

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """Every unit that offers the label gets it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self) -> dict[str, Label]:
        """Every unit quantized as far as it can be."""
        return {unit.id: unit.full for unit in self.units}


def _activation_format(rules: QuantizeRules, capabilities: Capabilities) -> str:
    if rules.activations != "auto":
        return rules.activations
    return capabilities.activations.get(rules.format, rules.format)
