"""What may be chosen: the units of a model with the labels each may carry, and what a choice comes to.

Given one label a unit, `resolve` says where the Q/DQ pairs stand. Where two formats meet on one edge, the reader's
pair stands: its kernel cannot run without, and the maker hands out floats there. A reader of which the weight alone is
quantized wants floats, and gets them where the maker can give floats. May import floors 0 to 2; knows nothing of
search or measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
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


_OF_UNITS = frozenset({"by_id", "unit_of", "_covers", "_offered"})  # what is found out of units, and kept


class _Stand(dict[int, Site]):
    """Where a pair can stand, a tensor in one format: its sites by who reads the pair, as bits of a number.

    Sites are made once and compare by identity in large placements. ``number`` tells stands of a space apart.
    """

    __slots__ = ("_ends", "_key", "number", "place", "tensor")

    def __init__(self, number: int, key: _Key, ends: tuple[Consumer, ...]) -> None:
        self.number = number
        self.tensor = key[0]
        self.place = {end: i for i, end in enumerate(ends)}
        self._key = key
        self._ends = ends

    def __missing__(self, ends: int) -> Site:
        tensor, fmt, axis, owner = self._key
        consumers = tuple(end for i, end in enumerate(self._ends) if ends >> i & 1)
        made = Site(tensor=tensor, consumers=consumers, format=fmt, axis=axis, weight=owner is not None)
        return self.setdefault(ends, made)


class _Cover(NamedTuple):
    """What a unit covers under a label: what it reads so, what it makes so, and both, as stands with consumers.

    Stands are meant by their number. ``floats`` is what it wants to read in float, its weight alone being quantized.
    ``yields`` tells that it can do without the pairs on what it makes.
    """

    read: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int], ...]
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
        self._closed = self._denied | (
            {n.name for n in model.nodes} - set(allowed) if allowed is not None else set()
        )
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
        chosen = [choice for choice in sorted(labels.items()) if choice[1] != "fp"]
        known = self._covers
        covers = [known.get(choice) or self._cover(*choice) for choice in chosen]
        stands = list(self._stands.values())
        is_claimed = self._meet or any(cover.floats for cover in covers)
        claims = _Claims(covers, stands) if is_claimed else None
        granted = [cover.edges if claims is None else claims.granted(cover) for cover in covers]
        covered = [0] * len(stands)
        for number, ends in chain.from_iterable(granted):
            covered[number] |= ends
        sites = [stand[ends] for stand, ends in zip(stands, covered, strict=True) if ends]
        return Placement(sites=frozenset(sites), labels=tuple(chosen), listed=sites)

    def permitted(self, placement: Placement) -> Placement:
        """The placement, wherever it comes from, if it leaves alone what the spec does not let anyone quantize.

        Raises `PlacementError` naming the first node that it does not. What no filter speaks of is not looked at.
        """
        ends = (end for site in placement.sites for end in site.consumers if end.node in self._closed)
        if outside := sorted(end for end in ends if end not in self._offered):
            raise PlacementError(
                f"the placement quantizes what node '{outside[0].node}' reads, which patterns: keeps in floating point",
                where=self.model.where,
                cure="leave it out, or allow the node",
            )
        return placement

    @cached_property
    def _offered(self) -> frozenset[Consumer]:
        """All that some choice quantizes the input of."""
        edges = (end for unit in self.units for _, end in (*unit.edges, *self.result_edges(unit)))
        sites = (
            site for unit in self.units for form in unit.forms for site in (*form.constants, *form.biases)
        )
        return frozenset((*edges, *(end for site in sites for end in site.consumers)))

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
        kind = kind_of(label)
        gives = kind == "in+out" or (kind == "activation-only" and "in+out" in form.kinds)
        made = self.result_edges(unit) if gives else ()
        biases = form.biases if kind == "in-only" else ()
        constants = form.constants if kind != "activation-only" else ()
        owned = [*((site, "") for site in constants), *((site, unit.id) for site in biases)]
        fmt = form.choice.activation if kind != "weight-only" else None
        activations = [(tensor, self._activation(tensor, end, fmt)) for tensor, end in unit.edges]
        read = (
            *(stand for _, stand in activations if fmt is not None),
            *(self._covered((s.tensor, s.format, s.axis, owner), s.consumers) for s, owner in owned),
        )
        left = tuple(self._activation(tensor, end, fmt) for tensor, end in made)
        self._covers[name, label] = _Cover(
            read=read,
            made=left,
            edges=(*read, *left),
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
        offered = (*unit.labels, *unit.halves)
        if label not in offered:
            raise PlacementError(
                f"unit '{name}' cannot be '{label}'{did_you_mean(label, offered)}",
                where=self.model.where,
                cure=f"it can be {', '.join(offered)}",
            )
        return unit

    def _activation(self, tensor: str, end: Consumer, fmt: str | None) -> tuple[int, int]:
        """An edge in a format of activations; blocks of one run along the last axis, that products sum over."""
        blocked = fmt is not None and number_format(fmt).block
        axis = len(self.model.shape(tensor) or ()) - 1 if blocked else None
        return self._covered((tensor, fmt or "", axis, None), [end])

    def _covered(self, key: _Key, ends: Iterable[Consumer]) -> tuple[int, int]:
        if key not in self._stands:
            self._stands[key] = _Stand(len(self._stands), key, self.model.ends(key[0]))
        stand = self._stands[key]
        return stand.number, sum(1 << stand.place[end] for end in ends)

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

    def __init__(self, covers: Iterable[_Cover], stands: Sequence[_Stand]) -> None:
        self._stands = stands
        self._read: dict[str, dict[int, int]] = {}
        self._floats: dict[str, int] = {}
        for cover in covers:
            for number, ends in cover.read:
                claims = self._read.setdefault(stands[number].tensor, {})
                claims[number] = claims.get(number, 0) | ends
            for tensor, ends in cover.floats:
                self._floats[tensor] = self._floats.get(tensor, 0) | ends

    def granted(self, maker: _Cover) -> Iterator[tuple[int, int]]:
        """What it reads, and of what it makes all that no reader wants otherwise.

        A reader may want another format, or float where the maker can yield.
        """
        yield from maker.read
        for number, ends in maker.made:
            tensor = self._stands[number].tensor
            for other, theirs in self._read.get(tensor, {}).items():
                ends &= -1 if other == number else ~theirs
            ends &= ~self._floats.get(tensor, 0) if maker.yields else -1
            if ends:
                yield number, ends
