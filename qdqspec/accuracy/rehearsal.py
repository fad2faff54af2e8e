"""Rehearsal: the accuracy of placements without builds, from one session in which every Q/DQ pair has a switch.

The sensitivity analysis measures the noise of every single pair. A pair changes nothing before it, so that only the
part of the graph after it is run: the model is cut into segments, the float model's values at each cut are stored, and
only the pairs of one segment have switches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Feed, Floats
from qdqspec._core.files import Closing, TemporaryFolder
from qdqspec.accuracy.compare import OutputComparison, noise_power, signal_power
from qdqspec.accuracy.evaluator import SAMPLES
from qdqspec.backends import Engine, Engines, bytes_left
from qdqspec.errors import BackendError, ModelError, PlacementError, QdqspecError
from qdqspec.graph import Model, Node, WeightStore, save_model
from qdqspec.graph.ops import FLOATS, copies_values, is_default
from qdqspec.qdq import BIAS_FORMAT, Edge, QuantSource, SchemeSpace, SwitchedModel, Switches, SwitchGraph
from qdqspec.types import Consumer, LabelNoise, Placement, Rehearsed, Site

SwitchStates: TypeAlias = npt.NDArray[np.bool_]  # whether each switch is on, by number
Values: TypeAlias = dict[Edge, Array]

# Operators that select, with their operands that are data.
SELECTING = {"ArgMax": (0,), "ArgMin": (0,), "Hardmax": (0,), "NonMaxSuppression": (0, 1), "TopK": (0,)}


class RehearsalRefusedError(QdqspecError):
    """A model cannot be rehearsed: callers build its placements instead, and report the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The reference runtime. ``exact`` does not optimize; ``fast`` does, and may round differently.

    ``processes`` is the number of engines that run at once.
    """

    exact: Callable[[Path], Engine]
    fast: Callable[[Path], Engine]
    processes: int = 1


class Rehearsal(Closing):
    """Computes the effect of any placement of pairs at the ``sites`` of a model on its outputs."""

    def __init__(
        self,
        model: Model,
        sites: Iterable[Site],
        numbers: QuantSource,
        feeds: Callable[[], Iterable[Feed]],
        runtime: Runtime,
        *,
        samples: int = SAMPLES,
        data: str = "",
        floating: Iterable[Site] = (),
        rounds_biases: Collection[str] = (),
    ) -> None:
        """Build and load the model with switches.

        ``feeds`` is called for each pass over the ``data``. Weights at the sites ``floating`` are quantized when the
        model runs, and not stored as integers. ``rounds_biases``: see `qdqspec.qdq.capabilities.Capabilities`.
        Raises `RehearsalRefusedError` if the runtime lacks operators of the model, or half of the free memory is not
        enough.
        """
        self.model, self.samples, self.runtime = model, samples, runtime
        self._feeds, self._data = feeds, data
        guides = guiding_outputs(model)
        self.outputs_edges = tuple((name, model.output_ends[name]) for name in guides)
        self.guiding_edges = tuple(dict.fromkeys(chain.from_iterable(guides.values())))
        with ExitStack() as opened:
            self.folder = opened.enter_context(TemporaryFolder())
            self.switches = Switches(sites)
            singles = self.switches.floating(floating)
            base = model.path.parent if model.path else None
            try:
                store = WeightStore(self.folder, base=base)
                self.graph = SwitchGraph(
                    model, self.switches, numbers, store, floating=singles, rounds_biases=rounds_biases
                )
                self._processes = self._allowed_processes()
                wanted = dict.fromkeys((*self.outputs_edges, *self.guiding_edges))
                self._switched = self.graph.part(0, len(self.graph.nodes) + 1, wanted)
                self._engines = self.load(self._switched, "whole", runtime.exact)
            except (BackendError, ModelError, PlacementError) as error:
                raise RehearsalRefusedError(f"the model cannot be rehearsed: {error.what}") from error
            opened.callback(self._engines.close)
            self._opened = opened.pop_all()

    def engine(self, placement: Placement) -> RehearsedEngine:
        """A placement with the interface of an engine."""
        return RehearsedEngine(self, placement)

    def error(self, placement: Placement) -> Rehearsed:
        """The error of a placement relative to the float model, at the outputs and at the guiding tensors."""
        outputs, guiding = OutputComparison(), OutputComparison()
        samples = 0
        for reference, (values,) in self.compared([placement]):
            samples += 1
            for comparison, edges in ((outputs, self.outputs_edges), (guiding, self.guiding_edges)):
                comparison.add(_by_tensor(reference, edges), _by_tensor(values, edges))
        return Rehearsed(
            outputs=outputs.results(), guiding=guiding.results(), samples=samples, data=self._data
        )

    def compared(self, placements: Iterable[Placement]) -> Iterator[tuple[Values, tuple[Values, ...]]]:
        """For each input: the values of the float model, and those with each placement."""
        off = np.zeros(len(self.switches), np.bool_)
        settings = [off, *(self.switches.setting(placement) for placement in placements)]
        each = self.values_each((setting, feed) for feed in self.feeds() for setting in settings)
        while found := tuple(islice(each, len(settings))):
            yield found[0], found[1:]

    def feeds(self) -> Iterator[Feed]:
        """The inputs."""
        return islice(iter(self._feeds()), self.samples)

    def values_each(self, runs: Iterable[tuple[SwitchStates, Feed]]) -> Iterator[Values]:
        """The values at outputs and guides for each run, in order, several runs at the same time."""
        return run_each(self._switched, self._engines, runs)

    @property
    def run_seconds(self) -> float:
        """The time of a run, by the latest one; 0 before the first."""
        return self._engines.seconds

    def load(self, model: SwitchedModel, name: str, build: Callable[[Path], Engine]) -> Engines:
        """The engines of a model with switches: as many as the processor and the memory allow."""
        path = self.folder / f"{name}.onnx"
        save_model(model.proto, path)
        return Engines(lambda: build(path), self._processes)

    def close(self) -> None:
        """Close the session. Closing twice is harmless."""
        self._opened.close()

    def _allowed_processes(self) -> int:
        """The number of engines whose weights fit into half of the free memory. Raises if not even those of one do."""
        needed, most, left = self.graph.needed_bytes, self.runtime.processes, bytes_left()
        if left is None:
            return most
        if needed > (limit := left // 2):
            raise RehearsalRefusedError(
                f"the model cannot be rehearsed: it would take {needed >> 20} MiB, and {limit >> 20} MiB are allowed",
                where=self.model.where,
            )
        return min(most, limit // max(needed, 1))


class RehearsedEngine(Closing):
    """A placement in a rehearsal, with the interface of an engine."""

    def __init__(self, rehearsal: Rehearsal, placement: Placement) -> None:
        self.placement = placement
        self._rehearsal = rehearsal

    def run(self, feeds: Feed) -> dict[str, Array]:
        """The outputs by name. Raises `PlacementError` for a pair without a switch."""
        return next(self.run_each([feeds]))

    def run_each(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """The outputs for each of these inputs, several computed at the same time."""
        rehearsal, setting = self._rehearsal, self._rehearsal.switches.setting(self.placement)
        for values in rehearsal.values_each((setting, feed) for feed in feeds):
            yield _by_tensor(values, rehearsal.outputs_edges)

    def close(self) -> None:
        """Nothing: the rehearsal stays open."""


def run_each(
    model: SwitchedModel, engines: Engines, runs: Iterable[tuple[SwitchStates, Feed]]
) -> Iterator[Values]:
    """The values of each run by edge, in order, several computed at the same time.

    Outputs that are not arrays are omitted.
    """
    for found in engines.run_each(model.feed(setting, inputs) for setting, inputs in runs):
        yield {edge: found[name] for edge, name in model.names.items() if name in found}


def _by_tensor(values: Values, edges: Iterable[Edge]) -> dict[str, Array]:
    """Values by name of the tensor; if readers of a tensor get different values, those of the first."""
    found: dict[str, Array] = {}
    for edge in edges:
        if edge in values:
            found.setdefault(edge[0], values[edge])
    return found


def guiding_outputs(model: Model) -> dict[str, tuple[Edge, ...]]:
    """For each graph output the edges before its trailing operators that select; without one the output itself.

    There the error that guides a search is measured. After a selection, as by ArgMax, are indices, or other elements at
    the least noise. Before it noise is additive, so that it can be attributed to pairs. After a Softmax it is too, as
    far as a limit on its output can hold: the rehearsed SQNR of random placements deviates from the sum of single
    noises by 1.6 dB (SqueezeNet) and .4 dB (a face detector) there, and by 2.8 and .9 dB before.
    """
    guides = {}
    for output in dict.fromkeys(model.outputs):
        end = (output, model.output_ends[output])
        found, seen, pending, selects = dict[Edge, None](), set[str](), [end], False
        while pending:
            edge = pending.pop()
            tensor = edge[0]
            node = None if tensor in model.constants else model.producer.get(tensor)
            operands = () if node is None else _operands(model, node)
            if node is None or not operands:
                found[edge] = None
            elif tensor not in seen:
                seen.add(tensor)
                selects |= is_default(node) and node.op_type in SELECTING
                pending += [(node.inputs[index], Consumer(node.name, index)) for index in operands]
        real = (one for one in found if model.elem_type(one[0]) in FLOATS and one[0] not in model.constants)
        guides[output] = (tuple(real) if selects else ()) or (end,)
    return guides


def _operands(model: Model, node: Node) -> tuple[int, ...]:
    """The inputs through which a trailing operator is followed; empty for an operator that computes."""
    if is_default(node) and node.op_type in SELECTING:
        return SELECTING[node.op_type]
    gathers = is_default(node) and node.op_type in ("Cast", "Gather", "GatherND", "GatherElements")
    if copies_values(node) or gathers:
        chosen = (0, 1) if node.op_type.startswith("Gather") else (0,)
        return tuple(i for i in chosen if i < len(node.inputs) and node.inputs[i] not in model.constants)
    return ()


def label_noise(rehearsal: Rehearsal, noise: Floats, space: SchemeSpace) -> LabelNoise:
    """The noise of each (unit, label) that can be rehearsed, by that of switches, each at its worst guide."""
    return LabelNoise(tuple(noise.max(axis=1, initial=0.0).tolist()), rehearsal.switches.by_label(space))


def find_sensitivities(
    rehearsal: Rehearsal,
    *,
    samples: int = SAMPLES,
    first: int = 2,
    noise_share: float = 0.95,
    together: int = 1,
    segments: int = 6,
) -> Floats:
    """The noise power over signal power of each switch alone at each guiding tensor in float, (switch, guide).

    An int32 bias counts as exact, since its step is the product of two scales, and so does a weight of one element.

    Each is measured on the ``first`` samples, and on the others, ``samples`` in all, those that cause the
    ``noise_share`` of the noise of their segment: a larger share takes longer, and tells more of pairs with little
    noise. ``together`` measures so many neighbouring switches of one kind at once, which get equal parts of their
    noise: fewer runs, and noise that is known less well. More ``segments`` run less of the graph for each switch, and
    build more models. Raises `RehearsalRefusedError` if no guiding tensor is floating-point.
    """
    sample, _ = next(rehearsal.compared(()), (None, ()))
    if sample is None:
        raise BackendError("there is no sample to measure sensitivities on")
    floats = {edge for edge, value in sample.items() if np.issubdtype(value.dtype, np.floating)}
    edges = [edge for edge in rehearsal.guiding_edges if edge in floats]
    if not edges:
        raise RehearsalRefusedError(
            "no output of the model, or tensor before it, is floating-point",
            where=rehearsal.model.where,
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
                if index == first:  # the fewest groups that cause a share of the noise, and at least one
                    alone = _ratio(powers).max(axis=1)
                    falling = np.argsort(-alone, kind="stable")
                    with np.errstate(invalid="ignore"):
                        is_less = np.cumsum(alone[falling]) / alone.sum() < noise_share
                    measured = sorted(falling[: 1 + int(np.sum(is_less))].tolist())
                settings = np.zeros((1 + len(measured), count), np.bool_)  # the first without any pair
                for setting, number in zip(settings[1:], measured, strict=True):
                    setting[list(groups[number])] = True
                each = run_each(model, engines, ((setting, feed) for setting in settings))
                reference = next(each)
                signal = [signal_power(value) for value in reference.values()]
                power = [
                    [noise_power(value, seen.get(edge)) for edge, value in reference.items()] for seen in each
                ]
                powers[:, measured] += np.array([[signal] * len(power), power])
        for group, own in zip(groups, _ratio(powers), strict=True):
            noise[np.ix_(group, behind)] = own / len(group)
    return noise


def _ratio(powers: Floats) -> Floats:
    """Noise over signal; infinite for noise without a signal."""
    signal, noise = powers
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(noise == 0, 0.0, noise / signal)


def _groups(rehearsal: Rehearsal, numbers: Iterable[int], together: int) -> list[tuple[int, ...]]:
    """The numbers of switches to measure ``together``, neighbours of one kind, without those that count as exact."""
    model, alike = rehearsal.model, dict[tuple[str, bool, bool], list[int]]()

    def place(number: int) -> tuple[int, int]:
        site = rehearsal.switches[number]
        return rehearsal.graph.places[site.tensor, site.consumers[0]], number

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
    places = sorted(graph.places.values())
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
