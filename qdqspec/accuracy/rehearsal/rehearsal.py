"""Rehearsal: the accuracy of placements without builds, from one session in which every Q/DQ pair has a switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice, tee
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.closing import Closing
from qdqspec._core.temporary import TemporaryFolder
from qdqspec.accuracy.compare import OutputComparison
from qdqspec.accuracy.evaluator import HELD_BYTES, SAMPLES
from qdqspec.accuracy.rehearsal.graph import (
    SwitchedModel,
    Switches,
    SwitchGraph,
    SwitchStates,
    Values,
    is_foreign,
)
from qdqspec.backends.base import Engine
from qdqspec.backends.memory import bytes_left
from qdqspec.backends.open_engines import Engines
from qdqspec.errors import BackendError, ModelError, PlacementError, QdqspecError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS, copies_values, is_default
from qdqspec.graph.save import save_model
from qdqspec.graph.weights import WeightStore
from qdqspec.qdq.pairs import PairMaker, QuantSource
from qdqspec.qdq.units import Edge
from qdqspec.types import Consumer, Placement, Rehearsed, Site

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The inputs of a rehearsal: a model, all pairs that placements may have with their numbers, and data.

    ``feeds`` is called for each pass over the data. Weights at the sites ``floating`` are quantized when the model
    runs, and not stored as integers. ``rounds_biases``: see `qdqspec.qdq.capabilities.Capabilities`.
    """

    model: Model
    sites: tuple[Site, ...]
    numbers: QuantSource
    feeds: Callable[[], Iterable[Feed]]
    samples: int = SAMPLES
    data: str = ""
    floating: frozenset[Site] = frozenset()
    rounds_biases: frozenset[str] = frozenset()


class Rehearsal(Closing):
    """Computes the effect of any placement of a subject's pairs on the outputs of the model."""

    def __init__(
        self,
        subject: Subject,
        runtime: Runtime,
        *,
        known: dict[int, Values] | None = None,
    ) -> None:
        """Build and load the model with switches.

        Outputs of the float model are stored up to `HELD_BYTES`: those of further samples are computed again for each
        placement. ``known`` are the stored ones by sample, shared by rehearsals of the same model and data. Raises
        `RehearsalRefusedError` if the runtime lacks operators of the model, or half of the free memory is not enough.
        """
        self.subject = subject
        self.runtime = runtime
        guides = guiding_outputs(subject.model)
        self.outputs_edges = tuple((name, subject.model.output_ends[name]) for name in guides)
        self.guiding_edges = tuple(dict.fromkeys(chain.from_iterable(guides.values())))
        self._references = {} if known is None else known
        with ExitStack() as opened:
            self.folder = opened.enter_context(TemporaryFolder())
            self.switches = Switches(site for site in subject.sites if not is_foreign(site))
            try:
                self.graph = self._graph()
                self._processes = self._allowed_processes()
                self._model = self.graph.whole(dict.fromkeys((*self.outputs_edges, *self.guiding_edges)))
                self._engines = self.load(self._model, "whole", runtime.exact)
            except (BackendError, ModelError, PlacementError) as error:
                raise RehearsalRefusedError(f"the model cannot be rehearsed: {error.what}") from error
            opened.callback(self._engines.close)
            self._opened = opened.pop_all()

    def engine(self, placement: Placement) -> RehearsedEngine:
        """A placement with the interface of an engine."""
        return RehearsedEngine(self, placement)

    def error(self, placement: Placement) -> Rehearsed:
        """The error of a placement relative to the float model, at the outputs and at the guiding tensors."""
        setting = self.switches.setting(placement)
        outputs, guiding = OutputComparison(), OutputComparison()
        samples = 0
        feeds, references = tee(self.references())
        each = self.values_each((setting, feed) for feed, _ in feeds)
        for (_, reference), values in zip(references, each, strict=True):
            samples += 1
            for comparison, edges in ((outputs, self.outputs_edges), (guiding, self.guiding_edges)):
                comparison.add(_by_tensor(reference, edges), _by_tensor(values, edges))
        return Rehearsed(
            outputs=outputs.results(), guiding=guiding.results(), samples=samples, data=self.subject.data
        )

    def references(self) -> Iterator[tuple[Feed, Values]]:
        """Each input with the float model's values, some of which are stored."""
        off = np.zeros(len(self.switches), np.bool_)
        for index, feed in enumerate(self.feeds()):
            known = self._references.get(index)
            if known is None:
                known = next(self.values_each([(off, feed)]))
                kept = (*self._references.values(), known)
                if sum(value.nbytes for values in kept for value in values.values()) <= HELD_BYTES:
                    self._references[index] = known
            yield feed, known

    def feeds(self) -> Iterator[Feed]:
        """The inputs."""
        return islice(iter(self.subject.feeds()), self.subject.samples)

    def values_each(self, runs: Iterable[tuple[SwitchStates, Feed]]) -> Iterator[Values]:
        """The values at outputs and guides for each run, in order, several runs at the same time."""
        return self._model.run_each(self._engines, runs)

    @property
    def run_seconds(self) -> float:
        """The time of a run, by the latest one; 0 before the first."""
        return self._engines.seconds

    def load(self, model: SwitchedModel, name: str, build: Callable[[Path], Engine]) -> Engines:
        """The engines of a model of `graph`: as many as the processor and the memory allow."""
        path = self.folder / f"{name}.onnx"
        save_model(model.proto, path)
        return Engines(lambda: build(path), self._processes)

    def close(self) -> None:
        """Close the session. Closing twice is harmless."""
        self._opened.close()

    def _graph(self) -> SwitchGraph:
        subject = self.subject
        base = subject.model.path.parent if subject.model.path else None
        store = WeightStore(self.folder, base=base)
        singles = frozenset(switch for switch in self.switches if _is_floating(switch, subject.floating))
        maker = PairMaker(subject.model, subject.numbers, floating=singles, store=store)
        return SwitchGraph(subject.model, self.switches, maker, store, subject.rounds_biases)

    def _allowed_processes(self) -> int:
        """The number of engines whose weights fit into half of the free memory. Raises if not even those of one do."""
        needed, most, left = self.graph.needed_bytes, self.runtime.processes, bytes_left()
        if left is None:
            return most
        if needed > (limit := left // 2):
            raise RehearsalRefusedError(
                f"the model cannot be rehearsed: it would take {needed >> 20} MiB, and {limit >> 20} MiB are allowed",
                where=self.subject.model.where,
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
            yield {name: values[name, end] for name, end in rehearsal.outputs_edges if (name, end) in values}

    def close(self) -> None:
        """Nothing: the rehearsal stays open."""


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
    return {name: _edges_before(model, name) for name in dict.fromkeys(model.outputs)}


def _edges_before(model: Model, output: str) -> tuple[Edge, ...]:
    """The edges with floats before the trailing operators of an output; its own without one that selects."""
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
    real = (edge for edge in found if model.elem_type(edge[0]) in FLOATS and edge[0] not in model.constants)
    return (tuple(real) if selects else ()) or (end,)


def _operands(model: Model, node: Node) -> tuple[int, ...]:
    """The inputs through which a trailing operator is followed; empty for an operator that computes."""
    if is_default(node) and node.op_type in SELECTING:
        return SELECTING[node.op_type]
    gathers = is_default(node) and node.op_type in ("Cast", "Gather", "GatherND", "GatherElements")
    if copies_values(node) or gathers:
        chosen = (0, 1) if node.op_type.startswith("Gather") else (0,)
        return tuple(i for i in chosen if i < len(node.inputs) and node.inputs[i] not in model.constants)
    return ()


def _is_floating(switch: Site, floating: frozenset[Site]) -> bool:
    key = (switch.tensor, switch.format, switch.axis)
    return any(
        key == (site.tensor, site.format, site.axis) and set(switch.consumers) <= set(site.consumers)
        for site in floating
    )
