"""Sensitivity analysis: the noise of every single Q/DQ pair at the guiding tensors.

A pair changes nothing before it, so that only the part of the graph after it is run: the model is cut into segments,
the float model's values at each cut are stored, and only the pairs of one segment have switches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Feed, Floats
from qdqspec.errors import BackendError
from qdqspec.measurement.engines import Engines
from qdqspec.parity.compare import noise_power, signal_power, sqnr_db
from qdqspec.parity.gate import MOST_DB
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.placement.space.units import Edge
from qdqspec.quantize.formats import BIAS_FORMAT
from qdqspec.rehearsal.graph import SwitchedModel
from qdqspec.rehearsal.rehearsal import Rehearsal, RehearsalRefusedError
from qdqspec.rehearsal.switches import Switches, SwitchStates, is_foreign, labelled_sites
from qdqspec.types import LabelNoise, Placement, Site

SEGMENTS = 6
FIRST = 2  # samples on which every pair is measured
MOST_NOISE = 0.95  # pairs that cause this share of their segment's noise are measured on further samples, ...
SURE = 0.2  # ... until the standard error of the mean over samples is this share of it

Group: TypeAlias = tuple[int, ...]  # the numbers of switches that are on together


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """The noise power over signal power of each switch alone, at each guiding tensor.

    ``noise`` is by switch and guide, measured over the first ``samples`` inputs, a number for each switch: pairs with
    little noise are measured on fewer. An int32 bias counts as exact, since its step is the product of two scales, and
    so does a weight of one element.
    """

    switches: Switches
    guides: tuple[str, ...]
    noise: Floats
    samples: npt.NDArray[np.int64]

    def noise_of(self, sites: Iterable[Site]) -> float:
        """The noise of several pairs at their worst guide, assuming independent errors.

        The sum is accurate above about 20 dB; below it, rehearse the placement instead. Raises `PlacementError` for a
        pair without a switch.
        """
        numbers = [number for site in sites for number in self.switches.numbers(site)]
        return float(self.noise[numbers].sum(axis=0).max(initial=0.0))

    def guiding_db(self, placement: Placement) -> float:
        """The predicted SQNR of a placement at its worst guide."""
        return min(MOST_DB, sqnr_db(1.0, self.noise_of(placement.ordered)))

    def by_label(self, space: SchemeSpace) -> LabelNoise:
        """The noise of each (unit, label) that can be rehearsed, each switch at its worst guide."""
        parts = {
            choice: tuple(dict.fromkeys(number for site in sites for number in self.switches.numbers(site)))
            for choice, sites in labelled_sites(space).items()
            if not any(map(is_foreign, sites))
        }
        return LabelNoise(tuple(self.noise.max(axis=1, initial=0.0).tolist()), parts)


def quick_runs(rehearsal: Rehearsal) -> int:
    """The number of runs of a quick analysis with one segment, apart from the reference's."""
    return len(_groups(rehearsal, range(len(rehearsal.switches)), quick=True))


def find_sensitivities(
    rehearsal: Rehearsal,
    *,
    segments: int = SEGMENTS,
    quick: bool = False,
    tensors: int = 1,
    alone: Set[int] = frozenset(),
) -> Sensitivities:
    """Measure every switch alone; with ``quick`` on the first sample only, those of one tensor together.

    A quick analysis measures so many neighbouring ``tensors`` together, which get equal parts of their noise, but those
    with a switch in ``alone`` each by itself. Raises `RehearsalRefusedError` if no guiding tensor is floating-point.
    """
    edges = _guiding_floats(rehearsal)
    if not edges:
        raise RehearsalRefusedError(
            "no output of the model, or tensor before it, is floating-point",
            where=rehearsal.subject.model.where,
        )
    switches = rehearsal.switches
    noise, samples = np.zeros((len(switches), len(edges))), np.zeros(len(switches), np.int64)
    for low, high in _segments(rehearsal, segments):
        behind = [number for number, edge in enumerate(edges) if rehearsal.graph.is_behind(edge, low)]
        own = [edges[number] for number in behind]
        for number, tally in _segment(
            rehearsal, own, low, high, quick=quick, tensors=tensors, alone=alone
        ).items():
            noise[number, behind], samples[number] = tally.ratio, tally.samples
    return Sensitivities(
        switches=switches, guides=tuple(tensor for tensor, _ in edges), noise=noise, samples=samples
    )


@dataclass(slots=True)
class _Tally:
    """Signal and noise power of one switch at each guide, summed over samples."""

    signal: Floats
    noise: Floats
    squares: Floats  # of the noise of single samples
    samples: int = 0

    def add(self, signal: Floats, noise: Floats) -> None:
        """Add one sample. Changes this tally."""
        self.signal, self.noise, self.samples = self.signal + signal, self.noise + noise, self.samples + 1
        self.squares = self.squares + noise**2

    def share(self, count: int) -> _Tally:
        """The tally of each of ``count`` switches that were on together, with equal parts of the noise."""
        return _Tally(self.signal, self.noise / count, self.squares / count**2, self.samples)

    @property
    def is_sure(self) -> bool:
        """Whether the noise differs little between samples, at the guide where it is largest."""
        worst, number = int(np.argmax(self.ratio)), self.samples
        with np.errstate(over="ignore", invalid="ignore"):
            square = (self.noise[worst] / number) ** 2
            return bool((self.squares[worst] / number - square) / (number - 1) <= SURE**2 * square)

    @property
    def ratio(self) -> Floats:
        """Noise over signal at each guide; infinite for noise without a signal."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.noise == 0, 0.0, self.noise / self.signal)


def _segment(
    rehearsal: Rehearsal,
    edges: Sequence[Edge],
    low: int,
    high: int,
    *,
    quick: bool,
    tensors: int,
    alone: Set[int] = frozenset(),
) -> Mapping[int, _Tally]:
    """The switches between two places, each alone: all on the first samples, those with the most noise on more.

    ``edges`` are those that they can change.
    """
    graph = rehearsal.graph
    model = graph.part(low, high, edges)
    groups = _groups(rehearsal, model.numbers, quick=quick, tensors=tensors, alone=alone)
    if not groups or not edges:
        return {}
    nothing = np.zeros(len(edges))
    tallies = {group: _Tally(nothing, nothing, nothing) for group in groups}
    with closing(rehearsal.load(model, f"from{low}", rehearsal.runtime.fast)) as engines:
        for index, feed in enumerate(islice(_fed(rehearsal, low), 1 if quick else None)):
            if index == FIRST:
                groups = _noisiest({group: float(tallies[group].ratio.max()) for group in groups})
            if index >= FIRST:
                groups = [group for group in groups if not tallies[group].is_sure]
            if not groups:
                break
            measured = {group: tallies[group] for group in groups}
            _measure(model, engines, feed, measured, len(rehearsal.switches))
    return {number: tally.share(len(group)) for group, tally in tallies.items() for number in group}


def _groups(
    rehearsal: Rehearsal,
    numbers: Iterable[int],
    *,
    quick: bool,
    tensors: int = 1,
    alone: Set[int] = frozenset(),
) -> list[Group]:
    """The switches to measure: each alone, or with ``quick`` those that quantize neighbouring tensors alike together.

    Without those that count as exact: int32 biases, and weights of one element, which a scale represents.
    """
    model, found = rehearsal.subject.model, dict[Any, list[int]]()
    for number in numbers:
        site = rehearsal.switches[number]
        is_scalar = site.weight and prod(dim or 1 for dim in model.shape(site.tensor) or (0,)) == 1
        if site.format != BIAS_FORMAT and not is_scalar:
            key = (site.tensor, site.format, site.axis, site.weight) if quick else number
            found.setdefault(key, []).append(number)
    if tensors == 1:
        return list(map(tuple, found.values()))
    alike = dict[Any, list[list[int]]]()

    def place(number: int) -> int:
        site = rehearsal.switches[number]
        return rehearsal.graph.place((site.tensor, site.consumers[0]))

    groups = [tuple(group) for group in found.values() if not alone.isdisjoint(group)]
    for key, group in sorted(found.items(), key=lambda item: min(map(place, item[1]))):
        if alone.isdisjoint(group):
            alike.setdefault((key[1], key[2] is None, key[3]), []).append(group)
    for several in alike.values():
        starts = range(0, len(several), tensors)
        groups += (tuple(chain.from_iterable(several[start : start + tensors])) for start in starts)
    return groups


def _measure(
    model: SwitchedModel, engines: Engines, feed: Feed, tallies: Mapping[Group, _Tally], count: int
) -> None:
    """Run one sample with each of these groups of switches on, and with none."""
    nothing = np.zeros(count, np.bool_)
    reference = model.run(engines, nothing, feed)
    signal = np.array(list(map(signal_power, reference.values())))

    def only(group: Group) -> SwitchStates:
        setting = nothing.copy()
        setting[list(group)] = True
        return setting

    each = model.run_each(engines, ((only(group), feed) for group in tallies))
    for tally, seen in zip(tallies.values(), each, strict=True):
        tally.add(signal, np.array([noise_power(value, seen.get(edge)) for edge, value in reference.items()]))


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


def _noisiest(powers: Mapping[Group, float]) -> list[Group]:
    """The groups that cause `MOST_NOISE` of the noise, in the order given."""
    falling = sorted(powers, key=lambda group: -powers[group])
    total = sum(powers.values())
    before = accumulate((powers[group] for group in falling), initial=0.0)
    kept = {group for group, sum_of in zip(falling, before, strict=False) if sum_of < MOST_NOISE * total}
    return [group for group in powers if group in kept]


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
