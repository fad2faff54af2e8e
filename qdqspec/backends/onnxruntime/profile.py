"""Reads ONNX Runtime's profile and computes each kernel's share of the latency."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from qdqspec.backends.onnxruntime.events import KernelEvent, TimedEvent, runs_of
from qdqspec.backends.onnxruntime.layers import Origin
from qdqspec.graph.model import Model
from qdqspec.graph.scopes import find_scopes
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
