"""What may be chosen: the units of a model with the labels each may carry, and what a choice comes to.

Given one label a unit, `resolve` says where the Q/DQ pairs stand. Where two formats meet on one edge, the reader's
pair stands: its kernel cannot run without, and the maker hands out floats there. A reader of which the weight alone is
quantized wants floats, and gets them where the maker can give floats. May import floors 0 to 2; knows nothing of
search or measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from qdqspec.backends.base import Capabilities
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.placement.forms import format_choices
from qdqspec.placement.rules import apply_rules
from qdqspec.placement.units import Edge, Unit, UnitFinder, with_results
from qdqspec.quantize.formats import number_format
from qdqspec.registry import did_you_mean
from qdqspec.types import Consumer, Label, Placement, QuantizeRules, Region, Site, kind_of

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

    @property
    def tensor(self) -> str:
        """The tensor that the pair stands on."""
        return self._key[0]

    def site(self, ends: int) -> Site:
        """The site that these consumers read."""
        known = self._sites.get(ends)
        if known is None:
            tensor, fmt, axis, owner = self._key
            consumers = tuple(end for i, end in enumerate(self._ends) if ends >> i & 1)
            known = Site(tensor=tensor, consumers=consumers, format=fmt, axis=axis, weight=owner is not None)
            self._sites[ends] = known
        return known


class _Cover(NamedTuple):
    """What a unit covers under a label: what it reads so, and what it makes so; consumers are bits of a number.

    ``floats`` is what it wants to read in float, its weight alone being quantized. ``yields`` tells that it can do
    without the pairs on what it makes.
    """

    read: tuple[tuple[_Stand, int], ...]
    made: tuple[tuple[_Stand, int], ...]
    floats: tuple[tuple[str, int], ...]
    yields: bool


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
        self.choices = format_choices(self.rules, capabilities)
        self.labels: tuple[Label, ...] = (
            "fp",
            *(label for choice in self.choices for label in choice.labels),
        )
        finder = UnitFinder(model, capabilities, self.rules, self.choices)
        found = apply_rules(model, tuple(finder.find(allowed)), capabilities.rules)
        self._denied = frozenset(denied)
        self.units: tuple[Unit, ...] = tuple(unit for unit in map(self._apart, found) if unit.forms)

    def _apart(self, unit: Unit) -> Unit:
        """The unit less the outputs that only denied nodes read: these read floating point."""
        outputs = tuple(
            t for t in unit.outputs if any(e.node not in self._denied for e in self.model.ends(t))
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
        """Activations that any choice may quantize: what calibration must know."""
        return frozenset(
            tensor
            for unit in self.units
            for tensor in (*unit.outputs, *(edge[0] for edge in (*unit.edges, *unit.out_edges)))
        )

    def known(self, tensors: Collection[str]) -> SchemeSpace:
        """The same space less what touches an activation without a calibrated range."""
        smaller = SchemeSpace.__new__(SchemeSpace)
        smaller.__dict__.update({k: v for k, v in self.__dict__.items() if k not in _OF_UNITS})
        known = (_known(unit, tensors) for unit in self.units)
        smaller.units = tuple(unit for unit in known if unit.forms)
        return smaller

    def resolve(self, labels: Mapping[str, Label]) -> Placement:
        """Where the pairs stand when each unit carries its label; units not named stay ``fp``.

        Raises `PlacementError` for a unit that is none, or a label that it does not offer.
        """
        chosen = sorted((name, label) for name, label in labels.items() if label != "fp")
        covers = [self._covers.get(choice) or self._cover(*choice) for choice in chosen]
        covered: dict[_Stand, int] = {}
        for cover in covers:
            for stand, ends in cover.read:
                covered[stand] = covered.get(stand, 0) | ends
        claims = _Claims(covers) if self._meet else None
        for cover in covers:
            for stand, ends in cover.made if claims is None else claims.left(cover):
                covered[stand] = covered.get(stand, 0) | ends
        sites = frozenset([stand.site(ends) for stand, ends in covered.items()])
        return Placement(sites=sites, labels=tuple(chosen))

    @cached_property
    def _meet(self) -> bool:
        """Whether a maker and a reader may want different pairs on one edge."""
        return len({choice.activation for choice in self.choices}) > 1

    @cached_property
    def _covers(self) -> dict[tuple[str, Label], _Cover]:
        """What each unit covers under each label, found when first asked for."""
        return {}

    @cached_property
    def _stands(self) -> dict[_Key, _Stand]:
        return {}

    def _cover(self, name: str, label: Label) -> _Cover:
        unit = self._offering(name, label)
        form = unit.form_of(label)
        made = self.result_edges(unit) if kind_of(label) == "in+out" else ()
        biases = form.biases if kind_of(label) == "in-only" else ()
        owned = [*((site, "") for site in form.constants), *((site, unit.id) for site in biases)]
        fmt = form.choice.activation
        activations = [(tensor, self._activation(tensor, end, fmt)) for tensor, end in unit.edges]
        self._covers[name, label] = _Cover(
            read=(
                *(stand for _, stand in activations if fmt is not None),
                *(self._covered((s.tensor, s.format, s.axis, owner), s.consumers) for s, owner in owned),
            ),
            made=tuple(self._activation(tensor, end, fmt) for tensor, end in made),
            floats=tuple((tensor, ends) for tensor, (_, ends) in activations if fmt is None),
            yields="in-only" in form.kinds,
        )
        return self._covers[name, label]

    def _offering(self, name: str, label: Label) -> Unit:
        """The unit of that name, which must offer the label."""
        unit = self.by_id.get(name)
        if unit is None:
            near = did_you_mean(name, tuple(self.by_id))
            raise PlacementError(f"'{name}' is no unit that can be labelled{near}", where=self.model.where)
        if label not in unit.labels:
            raise PlacementError(
                f"unit '{name}' cannot be '{label}'{did_you_mean(label, unit.labels)}",
                where=self.model.where,
                cure=f"it can be {', '.join(unit.labels)}",
            )
        return unit

    def _activation(self, tensor: str, end: Consumer, fmt: str | None) -> tuple[_Stand, int]:
        """An edge in a format of activations; blocks of one run along the last axis, that products sum over."""
        blocked = fmt is not None and number_format(fmt).block
        axis = len(self.model.shape(tensor) or ()) - 1 if blocked else None
        return self._covered((tensor, fmt or "", axis, None), [end])

    def _covered(self, key: _Key, ends: Iterable[Consumer]) -> tuple[_Stand, int]:
        if key not in self._stands:
            self._stands[key] = _Stand(key, self.model.ends(key[0]))
        stand = self._stands[key]
        return stand, sum(1 << stand.place[end] for end in ends)

    def result_edges(self, unit: Unit) -> tuple[Edge, ...]:
        """The edges after a unit that are quantized under ``in+out``: all that read its outputs, and others."""
        ends = ((tensor, end) for tensor in unit.outputs for end in self.model.ends(tensor))
        return (*(edge for edge in ends if edge[1].node not in self._denied), *unit.out_edges)

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """Every unit that offers the label gets it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self, name: str = "") -> dict[str, Label]:
        """Every unit quantized as far as it can be, in the format of that name in labels.

        In the case's first format, units that do not offer it take the next one that they do.
        """
        full = {unit.id: unit.full_in(name) if name else unit.full for unit in self.units}
        return {unit: label for unit, label in full.items() if label != "fp"}


def _known(unit: Unit, tensors: Collection[str]) -> Unit:
    """The unit with what of it was calibrated: without its edges, weights alone are left."""
    if not all(tensor in tensors for tensor, _ in unit.edges):
        alone = tuple(form for form in unit.forms if form.choice.activation is None)
        return replace(unit, edges=(), outputs=(), out_edges=(), forms=alone)
    outputs = tuple(tensor for tensor in unit.outputs if tensor in tensors)
    return with_results(unit, outputs, tuple(edge for edge in unit.out_edges if edge[0] in tensors))


class _Claims:
    """What readers want on edges that others make, where that need not be the same."""

    def __init__(self, covers: Iterable[_Cover]) -> None:
        self._read: dict[str, dict[_Stand, int]] = {}
        self._floats: dict[str, int] = {}
        for cover in covers:
            for stand, ends in cover.read:
                claims = self._read.setdefault(stand.tensor, {})
                claims[stand] = claims.get(stand, 0) | ends
            for tensor, ends in cover.floats:
                self._floats[tensor] = self._floats.get(tensor, 0) | ends

    def left(self, maker: _Cover) -> Iterator[tuple[_Stand, int]]:
        """What is left to a maker: what no reader wants in another format, or in float where the maker can yield."""
        for stand, ends in maker.made:
            for other, theirs in self._read.get(stand.tensor, {}).items():
                ends &= -1 if other is stand else ~theirs
            ends &= ~self._floats.get(stand.tensor, 0) if maker.yields else -1
            if ends:
                yield stand, ends
