"""Sensitivity analysis: the noise of every single Q/DQ pair at the guiding tensors.

A pair changes nothing before it, so that only the part of the graph after it is run: the model is cut into segments,
the float model's values at each cut are stored, and only the pairs of one segment have switches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import TypeAlias

import numpy as np

from qdqspec._core.arrays import Feed, Floats
from qdqspec.accuracy.compare import noise_power, signal_power
from qdqspec.accuracy.evaluator import SAMPLES
from qdqspec.accuracy.rehearsal.graph import SwitchedModel, Switches, SwitchStates, is_foreign, labelled_sites
from qdqspec.accuracy.rehearsal.rehearsal import Rehearsal, RehearsalRefusedError
from qdqspec.backends.open_engines import Engines
from qdqspec.errors import BackendError
from qdqspec.qdq.formats import BIAS_FORMAT
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.units import Edge
from qdqspec.types import LabelNoise

_Group: TypeAlias = tuple[int, ...]  # the numbers of switches that are on together


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """The noise power over signal power of each switch alone, at each guiding tensor: ``noise`` by switch and guide.

    An int32 bias counts as exact, since its step is the product of two scales, and so does a weight of one element.
    """

    switches: Switches
    guides: tuple[str, ...]
    noise: Floats

    def by_label(self, space: SchemeSpace) -> LabelNoise:
        """The noise of each (unit, label) that can be rehearsed, each switch at its worst guide."""
        parts = {
            choice: tuple(dict.fromkeys(number for site in sites for number in self.switches.numbers(site)))
            for choice, sites in labelled_sites(space).items()
            if not any(map(is_foreign, sites))
        }
        return LabelNoise(tuple(self.noise.max(axis=1, initial=0.0).tolist()), parts)


def find_sensitivities(
    rehearsal: Rehearsal,
    *,
    samples: int = SAMPLES,
    first: int = 2,
    noise_share: float = 0.95,
    together: int = 1,
    segments: int = 6,
) -> Sensitivities:
    """Measure every switch alone, on at most so many samples.

    Each is measured on the ``first`` samples, and on the others those that cause the ``noise_share`` of the noise of
    their segment: a larger share takes longer, and tells more of pairs with little noise. ``together`` measures so many
    neighbouring switches of one kind at once, which get equal parts of their noise: fewer runs, and noise that is known
    less well. More ``segments`` run less of the graph for each switch, and build more models. Raises
    `RehearsalRefusedError` if no guiding tensor is floating-point.
    """
    edges = _guiding_floats(rehearsal)
    if not edges:
        raise RehearsalRefusedError(
            "no output of the model, or tensor before it, is floating-point",
            where=rehearsal.subject.model.where,
        )
    graph, count = rehearsal.graph, len(rehearsal.switches)
    noise = np.zeros((count, len(edges)))
    for low, high in _segments(rehearsal, segments):
        behind = [number for number, edge in enumerate(edges) if graph.is_behind(edge, low)]
        model = graph.part(low, high, [edges[number] for number in behind])
        groups = _groups(rehearsal, model.numbers, together)
        if not groups or not behind:
            continue
        powers = np.zeros((2, len(groups), len(behind)))  # of the signal, and of the noise
        measured = list(range(len(groups)))
        with closing(rehearsal.load(model, f"from{low}", rehearsal.runtime.fast)) as engines:
            for index, feed in enumerate(islice(_fed(rehearsal, low), samples)):
                if index == first:
                    measured = _noisiest(_ratio(powers).max(axis=1), noise_share)
                settings = np.zeros((1 + len(measured), count), np.bool_)  # the first without any pair
                for setting, number in zip(settings[1:], measured, strict=True):
                    setting[list(groups[number])] = True
                powers[:, measured] += _powers(model, engines, feed, settings)
        for group, own in zip(groups, _ratio(powers), strict=True):
            noise[np.ix_(group, behind)] = own / len(group)
    return Sensitivities(
        switches=rehearsal.switches, guides=tuple(tensor for tensor, _ in edges), noise=noise
    )


def _powers(model: SwitchedModel, engines: Engines, feed: Feed, settings: SwitchStates) -> Floats:
    """The power of the signal and of the noise on one sample, by setting after the first and output."""
    each = model.run_each(engines, ((setting, feed) for setting in settings))
    reference = next(each)
    signal = [signal_power(value) for value in reference.values()]
    noise = [[noise_power(value, seen.get(edge)) for edge, value in reference.items()] for seen in each]
    return np.array([[signal] * len(noise), noise])


def _ratio(powers: Floats) -> Floats:
    """Noise over signal; infinite for noise without a signal."""
    signal, noise = powers
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(noise == 0, 0.0, noise / signal)


def _noisiest(powers: Floats, share: float) -> list[int]:
    """The fewest numbers of groups that cause a share of the noise, and at least one."""
    falling = np.argsort(-powers, kind="stable")
    with np.errstate(invalid="ignore"):
        shares = np.cumsum(powers[falling]) / powers.sum()
    return sorted(falling[: 1 + int(np.sum(shares < share))].tolist())


def _groups(rehearsal: Rehearsal, numbers: Iterable[int], together: int) -> list[_Group]:
    """The switches to measure, so many neighbours of one kind ``together``, without those that count as exact."""
    model, alike = rehearsal.subject.model, dict[tuple[str, bool, bool], list[int]]()

    def place(number: int) -> tuple[int, int]:
        site = rehearsal.switches[number]
        return rehearsal.graph.place((site.tensor, site.consumers[0])), number

    for number in sorted(numbers, key=place):
        site = rehearsal.switches[number]
        is_scalar = site.weight and prod(dim or 1 for dim in model.shape(site.tensor) or (0,)) == 1
        if site.format != BIAS_FORMAT and not is_scalar:
            alike.setdefault((site.format, site.weight, site.axis is None), []).append(number)
    return [
        tuple(several[start : start + together])
        for several in alike.values()
        for start in range(0, len(several), together)
    ]


def _fed(rehearsal: Rehearsal, index: int) -> Iterator[Feed]:
    """Each input with the float model's values before the node of that index."""
    graph = rehearsal.graph
    live = graph.live(index) if index else ()
    if not live:
        yield from rehearsal.feeds()
        return
    model = graph.head(index, live)
    with closing(rehearsal.load(model, f"until{index}", rehearsal.runtime.fast)) as engines:
        for feed in rehearsal.feeds():
            yield {**feed, **engines.run({name: feed[name] for name in model.inputs if name in feed})}


def _segments(rehearsal: Rehearsal, count: int) -> Iterator[tuple[int, int]]:
    """Ranges of places with about equal numbers of switches, cut where the least data passes between nodes."""
    graph = rehearsal.graph
    places = sorted(graph.place(edge) for edge in rehearsal.switches.by_edge())
    if not places:
        return
    sizes = graph.live_sizes()
    cuts = [0]
    for part in range(1, count):
        near, width = len(places) * part / count, len(places) / (4 * count)
        band = places[int(near - width)], places[min(int(near + width), len(places) - 1)]
        options = range(max(band[0], cuts[-1] + 1), min(band[1] + 1, len(graph.nodes)))
        best = min(options, key=lambda index: sizes[index], default=None)
        if best is not None and np.isfinite(sizes[best]):
            cuts.append(best)
    yield from zip(cuts, [*cuts[1:], len(graph.nodes) + 1], strict=True)


def _guiding_floats(rehearsal: Rehearsal) -> list[Edge]:
    """The guiding edges that hold floats, determined on the first input."""
    first = next(iter(rehearsal.references()), None)
    if first is None:
        raise BackendError("there is no sample to measure sensitivities on")
    _, values = first
    return [
        edge
        for edge in rehearsal.guiding_edges
        if edge in values and np.issubdtype(values[edge].dtype, np.floating)
    ]
