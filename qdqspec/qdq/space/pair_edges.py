"""Which pairs follow from labels: the edges that each choice reads quantized, makes quantized, or needs in float.

A pair can be inserted on an edge (a tensor and its reader) in one format. If two formats meet on an edge, the reader's
pair is inserted: its kernel requires it, and the producer outputs float on that edge.

A reader with only its weight quantized reads floats if the producer can output floats. Some runtimes need that: there
a producer that can output integers only stays in float, and no pair is put before operators that the runtime would
move pairs past to that reader. A unit whose weight the runtime would quantize itself, because its inputs and results
have pairs, is ``in+out``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.quantize.formats import number_format
from qdqspec.qdq.space.units import Edge, Unit, data_edges, edges_after, edges_before, weight_input
from qdqspec.types import Consumer, Label, Placement, Site, kind_of, label_of


class _Key(NamedTuple):
    """A pair without its readers: tensor, format, and what keeps it apart from other pairs on the tensor."""

    tensor: str
    format: str
    axis: int | None
    owner: str | None  # the unit of a bias, "" of another constant, `None` of an activation
    scope: str  # the graph that reads an activation: kernels are fused within one


_PairEdge: TypeAlias = tuple[_Key, Consumer]
_Covered: TypeAlias = set[_PairEdge]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """A label of a unit, and its edges."""

    unit: str
    label: Label
    reads: tuple[_PairEdge, ...]  # have a pair
    makes: tuple[_PairEdge, ...]  # have a pair unless a reader needs otherwise
    floats: frozenset[Edge]  # have no pair
    yields: bool  # whether it can output float instead


class PairEdges:
    """The edges of each choice of a label for a unit, and the placement of all choices together.

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
        self._model, self._units = model, units
        self._results, self._capabilities = results, capabilities
        self._choice = cache(self._make_choice)
        self._site = cache(self._make_site)  # large placements compare sites by identity

    def placement(self, labels: Mapping[str, Label]) -> Placement:
        """The placement if each unit has its label. Raises `PlacementError` as `SchemeSpace.resolve`."""
        choices = [self._choice(unit, label) for unit, label in sorted(labels.items()) if label != "fp"]
        if self._capabilities.carriers:
            choices = self._before_floats(choices)
        floats = self.float_products({choice.unit for choice in choices})
        covered = _cover_edges(choices, floats)
        added = {one.unit: one for one, places in self._completions if _is_completed(one, places, covered)}
        if added:
            every = {choice.unit: choice for choice in choices} | added
            choices = [every[unit] for unit in sorted(every)]
            covered = _cover_edges(choices, floats)
        readers: defaultdict[_Key, set[Consumer]] = defaultdict(set)
        for key, end in covered:
            readers[key].add(end)
        sites = frozenset(self._site(key, frozenset(ends)) for key, ends in readers.items())
        return Placement(sites=sites, labels=tuple((choice.unit, choice.label) for choice in choices))

    def _make_site(self, key: _Key, ends: frozenset[Consumer]) -> Site:
        return Site(
            tensor=key.tensor,
            consumers=tuple(ends),
            format=key.format,
            axis=key.axis,
            weight=key.owner is not None,
        )

    def _before_floats(self, choices: list[_Choice]) -> list[_Choice]:
        """The choices without those of units that quantize an edge which is to be float, and cannot omit its pair."""
        floats = self.float_products({choice.unit for choice in choices}).union(
            *(choice.floats for choice in choices)
        )
        kept = [choice for choice in choices if not _needs_pair(choice, floats)]
        return kept if len(kept) == len(choices) else self._before_floats(kept)  # a product may now be float

    def float_products(self, quantized: Collection[str]) -> frozenset[Edge]:
        """The edges before products of activations that are not in these units."""
        return frozenset(edge for unit, edges in self._products if unit not in quantized for edge in edges)

    @cached_property
    def _products(self) -> list[tuple[str, list[Edge]]]:
        """The unit of each product of activations, and the edges before it; none if pairs have one format only.

        A kernel would compute it from both operands as they are, and there is none for operands of two formats.
        """
        model, carriers = self._model, self._capabilities.carriers
        forms = (form for unit in self._units.values() for form in unit.forms if "in+out" in form.kinds)
        if not carriers or len({form.choice.activation for form in forms}) < 2:
            return []
        owner = {node: unit.id for unit in self._units.values() for node in unit.nodes}
        found = []
        for node in model.nodes:
            if node.op_type == "MatMul" and is_default(node) and weight_input(model, node) is None:
                own = data_edges(model, node)
                before = [found for edge in own for found in edges_before(model, edge, carriers)]
                found.append((owner.get(node.name, ""), before))
        return found

    def float_edges(self, unit: Unit) -> Iterator[Edge]:
        """The edges without pairs if a unit reads floats: its own, and those from which pairs would move there."""
        carriers = self._capabilities.carriers
        own = data_edges(self._model, self._model.by_name[unit.id]) if carriers else unit.edges
        return (found for edge in own for found in edges_before(self._model, edge, carriers))

    def _make_choice(self, name: str, label: Label) -> _Choice:
        unit = self._offering(name, label)
        form, kind = unit.form_of(label), kind_of(label)
        gives = kind == "in+out" or (kind == "activation-only" and "in+out" in form.kinds)
        fmt = form.choice.reads(kind)
        constants = [(site, "") for site in form.constants] if kind != "activation-only" else []
        constants += [(site, unit.id) for site in form.biases] if kind == "in-only" else []
        reads = [self._activation(edge, fmt) for edge in unit.edges] if fmt is not None else []
        reads += [
            (_Key(site.tensor, site.format, site.axis, owner, ""), end)
            for site, owner in constants
            for end in site.consumers
        ]
        return _Choice(
            unit=unit.id,
            label=label,
            reads=tuple(reads),
            makes=tuple(self._activation(edge, fmt or "") for edge in self._results(unit)) if gives else (),
            floats=frozenset(self.float_edges(unit)) if fmt is None else frozenset(),
            yields="in-only" in form.kinds,
        )

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

    @cached_property
    def _completions(self) -> list[tuple[_Choice, list[frozenset[_PairEdge]]]]:
        """The choices ``in+out`` of units that the runtime quantizes if what they read and give is quantized.

        With each, for each edge before and after the unit, the edges on which a pair reaches it.
        """
        found = []
        model, past = self._model, self._capabilities.moved_past
        for unit in self._units.values():
            results = tuple(self._results(unit)) if unit.op_type in self._capabilities.completes else ()
            for form in unit.forms if results else ():
                label, fmt = label_of(form.choice.name, "in+out"), form.choice.activation
                if label in form.labels and fmt is not None:
                    around = [[*edges_before(model, edge, past)] for edge in unit.edges]
                    around += [[*edges_after(model, edge, past)] for edge in results]
                    places = [frozenset(self._activation(edge, fmt) for edge in edges) for edges in around]
                    found.append((self._choice(unit.id, label), places))
        return found

    def _activation(self, edge: Edge, fmt: str) -> _PairEdge:
        """An edge in an activation format; blocks are along the last axis, which products are summed over."""
        tensor, end = edge
        blocked = bool(fmt) and number_format(fmt).block
        axis = len(self._model.shape(tensor) or ()) - 1 if blocked else None
        scope = "" if not self._model.has_bodies or end.is_output else self._model.by_name[end.node].scope
        return _Key(tensor, fmt, axis, None, scope), end


def _is_completed(choice: _Choice, places: Iterable[frozenset[_PairEdge]], covered: _Covered) -> bool:
    """Whether each of the places has a pair, and a constant of the choice has none."""
    if any(map(covered.isdisjoint, places)):
        return False
    return any(edge[0].owner is not None and edge not in covered for edge in choice.reads)


def _cover_edges(choices: Iterable[_Choice], floats: frozenset[Edge]) -> _Covered:
    """The edges that have a pair: those read quantized, and those made quantized if no reader needs otherwise.

    A reader may need another format, or float if the producer can omit its pair. ``floats`` are more edges that are to
    be float.
    """
    choices = list(choices)
    covered = {edge for choice in choices for edge in choice.reads}
    wanted = {(key.tensor, end): key for key, end in covered}
    floats = floats.union(*(choice.floats for choice in choices)).difference(wanted)
    for choice in choices:
        for key, end in choice.makes:
            edge = key.tensor, end
            if wanted.get(edge, key) == key and not (choice.yields and edge in floats):
                covered.add((key, end))
    return covered


def _needs_pair(choice: _Choice, floats: Collection[Edge]) -> bool:
    """Whether a choice has a pair on an edge that is to be float."""
    fixed = choice.reads if choice.yields else (*choice.reads, *choice.makes)
    return any((key.tensor, end) in floats for key, end in fixed)
