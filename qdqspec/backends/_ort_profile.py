"""Reads ONNX Runtime's profile and gives every kernel its share of the latency. May import floors 0 and 1."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from qdqspec.backends._ort_layers import Origin
from qdqspec.types import LayerTime

_SUFFIX = "_kernel_time"
_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger")
_INTEGER_TYPES = frozenset({"uint8", "int8"})


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One execution of one kernel. ``dtype`` is the type of its first input."""

    name: str
    op_type: str
    microseconds: int
    dtype: str


def read_profile(path: Path) -> tuple[KernelEvent, ...]:
    """Kernel executions in the order they ended, over all runs."""
    events = json.loads(path.read_text(encoding="utf-8"))
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
    graph: onnx.GraphProto,
    origins: Sequence[Origin],
    events: Sequence[KernelEvent],
    *,
    runs: int,
    total_ms: float,
) -> tuple[LayerTime, ...]:
    """One `LayerTime` a kernel over the last ``runs`` runs, scaled so that all add up to ``total_ms``.

    Empty where the profile does not fit the graph, so that nothing is charged to the wrong node.
    """
    rows = _rows(graph, events)
    if rows is None or len(rows) < runs:
        return ()
    columns = list(zip(*rows[-runs:], strict=True))
    times = [_trimmed_mean([event.microseconds for event in column]) for column in columns]
    scale = total_ms / sum(times) if sum(times) else 0.0
    return tuple(
        LayerTime(
            name=origin.name,
            op_type=node.op_type,
            milliseconds=time * scale,
            nodes=origin.nodes,
            tensors=origin.tensors,
            boundary=origin.boundary,
            integer=not origin.boundary and _is_integer(column[0]),
        )
        for node, origin, column, time in zip(graph.node, origins, columns, times, strict=True)
    )


def _rows(graph: onnx.GraphProto, events: Sequence[KernelEvent]) -> list[list[KernelEvent]] | None:
    """Events of each run, one a node; ``None`` where they do not fit.

    Kernels run in the order in which the optimized graph was written (seen on every model tried), while
    unnamed ones are called after an index that the file does not keep. Kernels inside bodies of If, Loop and
    Scan come in between and are passed over: their time is part of the node that holds them.
    """
    nodes = list(graph.node)
    rows: list[list[KernelEvent]] = [[]]
    for event in events:
        expected = nodes[len(rows[-1])]
        if event.op_type == expected.op_type and expected.name in ("", event.name):
            rows[-1].append(event)
            if len(rows[-1]) == len(nodes):
                rows.append([])
    return None if rows.pop() else rows


def _is_integer(event: KernelEvent) -> bool:
    return event.op_type.startswith(_INTEGER_OPS) or (
        event.dtype in _INTEGER_TYPES and event.op_type != "Cast"
    )


def _trimmed_mean(values: Sequence[int]) -> float:
    """The mean without the lowest and highest fifth: finer than the profile's whole microseconds."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
