"""Q/DQ edges implied by each (unit, label), in columns for all choices together.

A pair can be inserted on an edge (a tensor and its reader) in one format. The edges of a choice are computed
when it is first used, so that resolving takes a few operations on whole columns instead of several for each
of tens of thousands of units.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.placement.units import Edge, Unit
from qdqspec.quantize.formats import number_format
from qdqspec.registry import did_you_mean
from qdqspec.types import Consumer, Label, Placement, Site, kind_of

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

    ``results`` returns the edges after a unit that are quantized if it outputs integers.
    """

    def __init__(
        self, model: Model, units: Mapping[str, Unit], results: Callable[[Unit], Iterable[Edge]]
    ) -> None:
        self._model = model
        self._units = units
        self._results = results
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
        known = self._known
        numbers = [known[label].get(name, -1) for name, label in labels.items() if label != "fp"]
        if -1 in numbers:
            numbers = [self._number(*choice) for choice in sorted(labels.items()) if choice[1] != "fp"]
        choices = np.array(numbers, np.int64)
        choices = choices[np.argsort(np.asarray(self._ranks)[choices])]
        sites = self._sites(self._covered(choices))
        ordered = tuple(map(self._choices.__getitem__, choices.tolist()))
        return Placement(sites=frozenset(sites), labels=ordered, listed=sites)

    def _sites(self, covered: npt.NDArray[np.bool_]) -> list[Site]:
        """The sites of all tensors in a format that have covered edges."""
        if not self._tensors:
            return []
        kind = np.object_ if self._widest > _WIDE else np.int64
        bits = np.left_shift(1, np.asarray(self._bits).astype(kind))
        ends = np.add.reduceat(np.where(covered, bits, 0), np.asarray(self._firsts)).tolist()
        return [tensor.site(some) for tensor, some in zip(self._tensors.values(), ends, strict=True) if some]

    def _covered(self, choices: _Numbers) -> npt.NDArray[np.bool_]:
        """The edges that have a pair: those read quantized, and those made quantized if no reader needs otherwise.

        A reader may need another format, or float if the producer can omit its pair.
        """
        chosen = np.zeros(len(self._choices), np.bool_)
        chosen[choices] = True
        (_, reads), (makers, makes), (_, floats) = (
            pairs[chosen[pairs[:, 0]]].T
            for pairs in (np.asarray(c).reshape(-1, 2) for c in (self._reads, self._makes, self._floats))
        )
        edges = np.asarray(self._edges)
        wanted = np.full(len(self._edge), _NOBODY)
        wanted[floats] = _FLOAT
        wanted[edges[reads]] = reads
        theirs = wanted[edges[makes]]
        stays = (theirs == _FLOAT) & ~np.asarray(self._yields).astype(np.bool_)[makers]
        covered = np.zeros(len(edges), np.bool_)
        covered[reads] = True
        covered[makes[(theirs == _NOBODY) | (theirs == makes) | stays]] = True
        return covered

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
        for tensor, end in unit.edges:
            column, at = (
                (self._floats, self._model_edge((tensor, end)))
                if fmt is None
                else (self._reads, self._activation(tensor, end, fmt))
            )
            column.extend((number, at))
        for site, owner in (*((site, "") for site in constants), *((site, name) for site in biases)):
            for end in site.consumers:
                self._reads.extend(
                    (number, self._pair_edge((site.tensor, site.format, site.axis, owner, ""), end))
                )
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
