"""Changes of kernels between two profiles of a model, such as those of two versions of a runtime. Pure.

Kernels are compared by the nodes that they compute: those that share a node, directly or through another kernel of
either side, form a group. A group whose kernels divide its nodes otherwise has another fusion.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from qdqspec.graph.unify import joined
from qdqspec.types import LayerChange, LayerTime

Layers = Sequence[LayerTime]
_Key = tuple[str, str]  # "node" or "tensor", and its name


def median_layers(profiles: Sequence[Layers]) -> tuple[LayerTime, ...]:
    """The kernels of several profiles of one engine, each with its median time."""
    first, *rest = profiles
    names = [layer.name for layer in first]
    alike = [p for p in rest if [layer.name for layer in p] == names]
    columns = zip(first, *alike, strict=True)
    return tuple(
        replace(column[0], milliseconds=statistics.median(layer.milliseconds for layer in column))
        for column in columns
    )


def steady_changes(before: Sequence[Layers], after: Sequence[Layers]) -> tuple[LayerChange, ...]:
    """The changes between the first builds of both sides, without changes of time that other builds do not confirm.

    Kernels of fresh builds of one model vary in time. A change of time counts if every further pair of builds has one
    of the same sign.
    """
    first, *rest = [layer_changes(old, new) for old, new in zip(before, after, strict=True)]
    moved = [{change.nodes + change.tensors: _sign(change) for change in each} for each in rest]
    found = []
    for change in first:
        key = change.nodes + change.tensors
        if "time" in change.kinds and not all(each.get(key) == _sign(change) for each in moved):
            change = replace(change, kinds=tuple(kind for kind in change.kinds if kind != "time"))
        if change.kinds:
            found.append(change)
    return tuple(found)


def _sign(change: LayerChange) -> float:
    """1 if it became slower, -1 if faster, 0 if the change of time is not significant."""
    return math.copysign(1.0, change.after_ms - change.before_ms) if "time" in change.kinds else 0.0


def layer_changes(
    before: Layers, after: Layers, varies: float = 0.25, least_share: float = 0.02
) -> tuple[LayerChange, ...]:
    """The groups of kernels that differ in fusion, precision or time; the largest change of time first.

    A change of time is listed if it is more than the share ``varies`` of the group's time, by which profiles of short
    kernels differ without a cause, and more than ``least_share`` of the model's: lower values list more noise.
    """
    least_ms = least_share * (math.fsum(layer.milliseconds for layer in before) or 1.0)
    changes = (_change(old, new, varies, least_ms) for old, new in kernel_groups(before, after, _keys))
    return tuple(sorted(filter(None, changes), key=lambda c: -abs(c.after_ms - c.before_ms)))


def kernel_groups(
    before: Layers, after: Layers, keys: Callable[[LayerTime], Sequence[Hashable]]
) -> list[tuple[list[LayerTime], list[LayerTime]]]:
    """Kernels of both sides that share keys, directly or through others, in the order of the model."""
    alike = [keys(layer) for layer in (*before, *after)]
    classes = joined(dict.fromkeys(key for each in alike for key in each), alike)
    home = {key: number for number, keys_of in enumerate(classes) for key in keys_of}
    groups: dict[int, tuple[list[LayerTime], list[LayerTime]]] = {}
    for side, layers in enumerate((before, after)):
        for layer in layers:
            groups.setdefault(home[keys(layer)[0]], ([], []))[side].append(layer)
    return list(groups.values())


def _keys(layer: LayerTime) -> list[_Key]:
    if layer.nodes:
        return [("node", node) for node in layer.nodes]
    return [("tensor", tensor) for tensor in layer.tensors] or [("tensor", layer.name)]


def _change(old: list[LayerTime], new: list[LayerTime], varies: float, least_ms: float) -> LayerChange | None:
    before_ms, after_ms = (math.fsum(layer.milliseconds for layer in side) for side in (old, new))
    kinds = []
    if _fusion(old) != _fusion(new):
        kinds.append("fusion")
    if _precision(old) != _precision(new):
        kinds.append("precision")
    moved = abs(after_ms - before_ms)
    if moved > max(least_ms, varies * before_ms):
        kinds.append("time")
    if not kinds:
        return None
    every = (*old, *new)
    return LayerChange(
        nodes=tuple(dict.fromkeys(node for layer in every for node in layer.nodes)),
        tensors=tuple(dict.fromkeys(t for layer in every if not layer.nodes for t in layer.tensors)),
        kinds=tuple(kinds),  # type: ignore[arg-type]  # a list of literals widens to text
        before=tuple(map(_text, old)),
        after=tuple(map(_text, new)),
        before_ms=before_ms,
        after_ms=after_ms,
    )


def _fusion(layers: list[LayerTime]) -> Counter[frozenset[_Key]]:
    return Counter(frozenset(_keys(layer)) for layer in layers)


def _precision(layers: list[LayerTime]) -> dict[_Key, tuple[bool, str]]:
    """Whether each node is computed in integers, and the precision that the runtime reports."""
    return {key: (layer.integer, layer.precision) for layer in layers for key in _keys(layer) if layer.nodes}


def _text(layer: LayerTime) -> str:
    """``QLinearConv (conv1, relu1), integer``."""
    named = ", ".join(layer.nodes or layer.tensors)
    precision = layer.precision or ("integer" if layer.integer else "")
    return f"{layer.op_type}{f' ({named})' if named else ''}{f', {precision}' if precision else ''}"
