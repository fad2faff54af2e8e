"""Reads ONNX Runtime's profile and computes each kernel's share of the latency.

Kernels in bodies of If, Loop and Scan are found too.
Kernels of the main graph run in the order of the written optimized graph (seen on every model tried), while
unnamed ones are named by an index that the file does not contain. An event is written when a kernel ends, so those of
a body precede that of the node that owns it: for an If those of a branch, for a Loop or Scan those of each iteration.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import onnx

from qdqspec.backends.onnxruntime.layers import Origin
from qdqspec.graph.model import Model
from qdqspec.graph.scopes import Scope, Scopes, bodies_of, find_scopes
from qdqspec.types import LayerTime

_SUFFIX = "_kernel_time"
_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantize")
_INTEGER_TYPES = frozenset({"uint8", "int8"})


def read_profile(path: Path) -> tuple[KernelEvent, ...]:
    """Kernel executions in the order they ended, over all runs."""
    return parse_profile(path.read_text(encoding="utf-8"))


def parse_profile(text: str) -> tuple[KernelEvent, ...]:
    """As `read_profile`, from the text of the file."""
    events = json.loads(text)
    return tuple(
        _event(e) for e in events if e.get("cat") == "Node" and str(e.get("name", "")).endswith(_SUFFIX)
    )


def _event(event: dict[str, object]) -> KernelEvent:
    arguments = event["args"]
    assert isinstance(arguments, dict)
    inputs = arguments.get("input_type_shape") or [{}]
    return KernelEvent(
        name=str(event["name"]).removesuffix(_SUFFIX),
        op_type=str(arguments.get("op_name", "")),
        microseconds=int(str(event["dur"])),
        dtype=next(iter(inputs[0]), ""),
    )


def layer_times(
    optimized: Model,
    origins: Sequence[Origin],
    events: Sequence[KernelEvent],
    *,
    runs: int,
    total_ms: float,
) -> tuple[LayerTime, ...]:
    """One `LayerTime` for each kernel that ran in the last ``runs`` runs, scaled to a sum of ``total_ms``.

    ``origins`` are those of the nodes. Empty if the profile does not match the graph, so that no time is assigned to
    the wrong node. Kernels in a branch that is not executed have no time; those of iterations are added.
    """
    found = runs_of(find_scopes(optimized.proto), events)
    if found is None or len(found) < runs:
        return ()
    spent = [_spent(run) for run in found[-runs:]]
    sample = {name: event for run in found[-runs:] for name, event, _ in reversed(run)}
    ran = [(n, o) for n, o in zip(optimized.nodes, origins, strict=True) if n.name in sample]
    times = [_trimmed_mean([run.get(node.name, 0) for run in spent]) for node, _ in ran]
    scale = total_ms / sum(times) if sum(times) else 0.0
    return tuple(
        LayerTime(
            name=origin.name,
            op_type=node.op_type,
            milliseconds=time * scale,
            nodes=origin.nodes,
            tensors=origin.tensors,
            boundary=origin.boundary,
            integer=not origin.boundary and _is_integer(sample[node.name]),
        )
        for (node, origin), time in zip(ran, times, strict=True)
    )


def _spent(run: Sequence[TimedEvent]) -> dict[str, int]:
    """Microseconds of each kernel in one run."""
    spent: dict[str, int] = {}
    for name, _, microseconds in run:
        spent[name] = spent.get(name, 0) + microseconds
    return spent


def _is_integer(event: KernelEvent) -> bool:
    return event.op_type.startswith(_INTEGER_OPS) or (
        event.dtype in _INTEGER_TYPES and event.op_type != "Cast"
    )


def _trimmed_mean(values: Sequence[int]) -> float:
    """The mean without the lowest and highest fifth: a finer resolution than the profile's whole microseconds."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One execution of one kernel. ``dtype`` is the type of its first input."""

    name: str
    op_type: str
    microseconds: int
    dtype: str


TimedEvent: TypeAlias = tuple[
    str, KernelEvent, int
]  # unique name of the node; microseconds without those of its bodies
_Found: TypeAlias = tuple[list[TimedEvent], int]  # and the index of the next event


def runs_of(scopes: Scopes, events: Sequence[KernelEvent]) -> list[list[TimedEvent]] | None:
    """The kernels executed in each run of a graph; ``None`` if the events do not match it."""
    reader = _Reader(scopes, events)
    runs: list[list[TimedEvent]] = []
    at = 0
    while at < len(events):
        found = reader.main(at)
        if found is None:
            return None
        runs.append(found[0])
        at = found[1]
    return runs


class _Reader:
    def __init__(self, scopes: Scopes, events: Sequence[KernelEvent]) -> None:
        self._main = scopes.main
        self._bodies = {(scope.owner, scope.attribute): scope for scope in scopes.bodies}
        self._events = events

    def main(self, at: int) -> _Found | None:
        """One run, starting at an event. Events of operators that are not in the file are skipped."""
        timed: list[TimedEvent] = []
        for name, node in _nodes(self._main):
            found = self._node(name, node, at)
            while found is None:
                at += 1
                if at >= len(self._events):
                    return None
                found = self._node(name, node, at)
            timed += found[0]
            at = found[1]
        return timed, at

    def _body(self, scope: Scope, at: int) -> _Found | None:
        """One run of a body. Its kernels may run in another order than in the file."""
        timed: list[TimedEvent] = []
        left = list(_nodes(scope))
        while left:
            for index in self._likely(left, at):
                found = self._node(*left[index], at)
                if found is not None:
                    break
            else:
                return None
            del left[index]
            timed += found[0]
            at = found[1]
        return timed, at

    def _likely(self, left: Sequence[tuple[str, onnx.NodeProto]], at: int) -> list[int]:
        """The nodes that an event may belong to: that of its name, those without a name, those with bodies."""
        if at >= len(self._events):
            return []
        event = self._events[at]
        fitting = [index for index, (_, node) in enumerate(left) if _fits(event, node)]
        fitting.sort(key=lambda index: left[index][1].name != event.name)
        return fitting + [
            i for i, (_, node) in enumerate(left) if i not in fitting and any(True for _ in bodies_of(node))
        ]

    def _node(self, name: str, node: onnx.NodeProto, at: int) -> _Found | None:
        bodies = [self._bodies[name, attribute] for attribute, _ in bodies_of(node)]
        for timed, end in (
            self._branches(bodies, at) if node.op_type == "If" else self._iterations(bodies, at)
        ):
            if end < len(self._events) and _fits(self._events[end], node):
                event = self._events[end]
                own = max(event.microseconds - sum(part for _, _, part in timed), 0)
                return [*timed, (name, event, own)], end + 1
        return None

    def _branches(self, bodies: Sequence[Scope], at: int) -> Iterator[_Found]:
        """The kernels executed in each branch that matches."""
        for body in bodies:
            found = self._body(body, at)
            if found is not None:
                yield found

    def _iterations(self, bodies: Sequence[Scope], at: int) -> Iterator[_Found]:
        """The kernels executed after no iteration, after one, and so on."""
        timed: list[TimedEvent] = []
        while True:
            yield timed, at
            found = self._body(bodies[0], at) if bodies else None
            if found is None or found[1] == at:
                return
            timed = timed + found[0]
            at = found[1]


def _nodes(scope: Scope) -> Iterator[tuple[str, onnx.NodeProto]]:
    return zip(scope.names, scope.graph.node, strict=True)


def _fits(event: KernelEvent, node: onnx.NodeProto) -> bool:
    return event.op_type == node.op_type and node.name in ("", event.name)
