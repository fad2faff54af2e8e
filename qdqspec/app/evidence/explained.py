"""Compares the layers of two engines, to explain their difference in speed or the changes of a version, in ONNX names.

If end-to-end times are known, they decide which engine is faster; the layers only explain it. A list of kernels without
times is described, and not compared.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal, TypeAlias

from qdqspec._core.groups import joined
from qdqspec._core.units import plain
from qdqspec.graph.ops import HEAVY, POOLS as POOLS, QDQ_OPS, WEIGHT_INPUT
from qdqspec.types import CorrectionGain, Interval, LayerChange, LayerChangeKind, LayerTime

RowKind: TypeAlias = Literal["kernel", "conversion"]

WEIGHTED_OPS = frozenset(WEIGHT_INPUT)
_END = "the outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedEngine:
    """One engine to explain: its layers in order of execution, and its end-to-end median if known."""

    name: str
    layers: tuple[LayerTime, ...]
    end_to_end_ms: float | None = None
    speedup: Interval | None = None  # over the reference, if both were timed against each other
    proved: str = ""  # of the speed-up, as `units.proved_text`
    ops: Mapping[str, str] = field(default_factory=dict)  # operators by node, if the model is known
    quantized: frozenset[str] = frozenset()  # nodes that read a dequantized activation, if the model is known
    notes: tuple[str, ...] = ()
    corrections: tuple[CorrectionGain, ...] = ()  # that the search of this engine tried

    @property
    def timed(self) -> bool:
        """Whether it was timed; otherwise its layers are a list of kernels, and their milliseconds are all 0."""
        return self.end_to_end_ms is not None or any(layer.milliseconds for layer in self.layers)

    @property
    def sum_ms(self) -> float:
        """Sum of all layers; more than end to end, because a profiler prevents overlap."""
        return math.fsum(layer.milliseconds for layer in self.layers)

    @property
    def milliseconds(self) -> float:
        """The time used for ranking: end to end if known, else the sum."""
        return self.sum_ms if self.end_to_end_ms is None else self.end_to_end_ms

    @property
    def kernels(self) -> list[LayerTime]:
        """Layers that compute."""
        return [layer for layer in self.layers if not layer.boundary]

    @property
    def integer_kernels(self) -> list[LayerTime]:
        """Kernels that compute in integers or another narrow format."""
        return [layer for layer in self.kernels if layer.integer]

    @property
    def left_in_float(self) -> list[LayerTime]:
        """Kernels of nodes that read quantized activations and that no integer kernel computes."""
        float_nodes = self.quantized - {node for kernel in self.integer_kernels for node in kernel.nodes}
        return [k for k in self.kernels if not k.integer and not float_nodes.isdisjoint(k.nodes)]

    @property
    def heavy(self) -> dict[str, bool]:
        """Whether an integer kernel computes it, for each convolution, matrix product, attention or recurrent node."""
        nodes = [node for kernel in self.kernels for node in kernel.nodes]
        integer = {node for kernel in self.integer_kernels for node in kernel.nodes}
        return {node: node in integer for node in nodes if op_of(node, self.ops) in HEAVY}

    @property
    def float_writers(self) -> list[LayerTime]:
        """Integer kernels that write floats, which a later kernel has to quantize again."""
        return [layer for layer in self.integer_kernels if ">" in layer.precision]

    @property
    def unfused_pairs(self) -> list[LayerTime]:
        """Q and DQ that were not fused into a kernel."""
        return [layer for layer in self.layers if is_pair(layer)]

    @property
    def conversions(self) -> list[LayerTime]:
        """Changes of type or layout, besides Q and DQ; of a timed engine those that take time."""
        between = (layer for layer in self.layers if layer.boundary and not is_pair(layer))
        return [layer for layer in between if layer.milliseconds > 0 or not self.timed]

    def behind(self, layer: LayerTime) -> LayerTime | None:
        """The kernel that produces a conversion's input if known; else the kernel executed before it."""
        made = next((kernel for kernel in self.kernels if {*kernel.tensors} & {*layer.tensors}), None)
        if made is not None:
            return made
        before = self.layers[: self.layers.index(layer)]
        return next((one for one in reversed(before) if not one.boundary), None)

    def reads_alone(self, kernel: LayerTime) -> bool:
        """Whether a DQ that was not fused is executed just before a kernel."""
        index = self.layers.index(kernel)
        before = self.layers[index - 1] if index else None
        return before is not None and before.boundary and before.op_type == "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class Row:
    """The same place in both engines: a kernel's nodes, or the conversions before them."""

    place: tuple[str, ...]
    kind: RowKind
    reference: tuple[LayerTime, ...]
    tuned: tuple[LayerTime, ...]

    @property
    def text(self) -> str:
        """Its nodes, or the nodes after its conversions."""
        nodes = plain(nodes_text(self.place))
        return f"before {nodes}" if self.kind == "conversion" else nodes

    @property
    def reference_ms(self) -> float:
        """Time in the reference."""
        return math.fsum(layer.milliseconds for layer in self.reference)

    @property
    def tuned_ms(self) -> float:
        """Time in the tuned engine."""
        return math.fsum(layer.milliseconds for layer in self.tuned)

    @property
    def difference_ms(self) -> float:
        """Time in the tuned engine minus that in the reference."""
        return self.tuned_ms - self.reference_ms

    @property
    def lost_fusion(self) -> bool:
        """Whether nodes that ran as one kernel run as several."""
        return self.kind == "kernel" and len(self.tuned) > len(self.reference) > 0

    @property
    def won_fusion(self) -> bool:
        """Whether nodes that ran as several kernels run as fewer."""
        return self.kind == "kernel" and len(self.reference) > len(self.tuned) > 0


@dataclass(frozen=True)
class EngineComparison:
    """Two engines of one network, whose layers are matched by the nodes that they compute."""

    reference: ExplainedEngine
    tuned: ExplainedEngine

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        """The names in the reference of nodes of ``tuned`` that have other names there."""
        engines = self.reference, self.tuned
        return same_nodes(*([node for layer in engine.kernels for node in layer.nodes] for engine in engines))

    @property
    def ratio(self) -> float:
        """Time of the tuned engine over the reference's."""
        return (
            self.tuned.milliseconds / self.reference.milliseconds if self.reference.milliseconds else math.inf
        )

    @property
    def decided_by_sum(self) -> bool:
        """Whether an end-to-end time is missing, so that sums of layers are compared."""
        return self.reference.end_to_end_ms is None or self.tuned.end_to_end_ms is None

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All places, the largest differences first."""
        renamed = self.renamed
        theirs = [replace(k, nodes=tuple(renamed.get(n, n) for n in k.nodes)) for k in self.tuned.kernels]
        rows = []
        for ours, others in _kernel_groups(self.reference.kernels, theirs):
            place = dict.fromkeys(key for layer in (*ours, *others) for key in _kernel_keys(layer))
            rows.append(Row(tuple(place), "kernel", tuple(ours), tuple(others)))
        before, after = _conversions(self.reference.layers, {}), _conversions(self.tuned.layers, renamed)
        rows += [
            Row((key,), "conversion", tuple(before.get(key, ())), tuple(after.get(key, ())))
            for key in dict.fromkeys((*before, *after))
        ]
        return tuple(sorted(rows, key=lambda row: -abs(row.difference_ms)))


def find_reference(engines: Sequence[ExplainedEngine]) -> ExplainedEngine:
    """The engine to compare with: the only one without quantized layers, else the first."""
    plain = [engine for engine in engines if not engine.integer_kernels and not engine.unfused_pairs]
    return plain[0] if len(plain) == 1 else engines[0]


def is_pair(layer: LayerTime) -> bool:
    """Whether a layer is a Q or DQ that was not fused."""
    return layer.boundary and layer.op_type in QDQ_OPS


def ops_in(nodes: Iterable[str], engine: ExplainedEngine) -> set[str]:
    """Operators of nodes."""
    return {op_of(node, engine.ops) for node in nodes}


def _kernel_keys(layer: LayerTime) -> tuple[str, ...]:
    return layer.nodes or (layer.name,)


def _conversions(layers: Sequence[LayerTime], names: Mapping[str, str]) -> dict[str, list[LayerTime]]:
    """Conversions that take time, by the first node of the kernel after them."""
    found: dict[str, list[LayerTime]] = {}
    following = _END
    for layer in reversed(layers):
        if not layer.boundary:
            following = names.get(layer.nodes[0], layer.nodes[0]) if layer.nodes else layer.name
        elif layer.milliseconds > 0 or is_pair(layer):
            found.setdefault(following, []).insert(0, layer)
    return dict(reversed(found.items()))


# ---- nodes of two exports -----------------------------------------------------------------------

# An exporter renumbers nodes for each Q/DQ placement (``Conv_5`` and ``Conv_34`` are the same node in the recorded
# ResNet-18 quartet), so where names differ, nodes are matched by operator and order.
_NUMBERED = re.compile(r"(?P<op>[A-Za-z][A-Za-z]*?)_?(?P<number>\d+)$")
_WORD = re.compile(r"[A-Za-z]+")
# operators that fusion may remove from names
_ABSORBED = frozenset({"Relu", "Clip", "Identity", "Dropout", "Flatten", "Reshape"})
_ENOUGH = 0.5  # share of common names above which nodes are matched by name
_LARGEST = 3000  # nodes; above this, matching by order takes too long and is unreliable


def nodes_text(nodes: Sequence[str]) -> str:
    """The nodes of one kernel, ``/layer2/conv1/Conv + Relu``: later ones without the scope shared with the first."""
    first, *others = nodes or ("",)
    scopes = first.split("/")[:-1]
    return " + ".join((first, *(_without(scopes, node.split("/")) for node in others)))


def short_place(text: str, width: int) -> str:
    """A node, tensor or kernel in ``width`` characters: without its first scopes, and then cut in the middle."""
    text = plain(text)
    while len(text) > width:
        rest = text.removeprefix(".../").lstrip("/").partition("/")[2]
        if "/" not in rest.partition(" + ")[0]:
            break
        text = f".../{rest}"
    return plain(text, width)


def _without(scopes: Sequence[str], parts: Sequence[str]) -> str:
    same = 0
    while same < min(len(scopes), len(parts) - 1) and scopes[same] == parts[same]:
        same += 1
    return "/".join(parts[same:] if same > 1 or not parts[0] else parts)


def op_of(node: str, ops: Mapping[str, str] | None = None) -> str:
    """A node's operator: from ``ops``, else from its name (``Conv_5``, ``/layer1/conv1/Conv``, ``Conv#3``)."""
    if ops and node in ops:
        return ops[node]
    last = node.rsplit("/", 1)[-1].partition("#")[0]
    numbered = _NUMBERED.match(last)
    found = _WORD.search(numbered["op"] if numbered else last)
    return found[0] if found else last


def same_nodes(reference: Sequence[str], tuned: Sequence[str]) -> dict[str, str]:
    """Names in ``reference`` of the nodes of ``tuned`` that have other names there."""
    common = set(reference) & set(tuned)
    smaller = min(len(set(reference)), len(set(tuned)))
    if not smaller or len(common) >= _ENOUGH * smaller or max(len(reference), len(tuned)) > _LARGEST:
        return {}
    left, right = _in_order(reference), _in_order(tuned)
    ours, theirs = ([node for node in side if op_of(node) not in _ABSORBED] for side in (left, right))
    matcher = SequenceMatcher(None, list(map(op_of, ours)), list(map(op_of, theirs)), autojunk=False)
    found = {
        theirs[block.b + offset]: ours[block.a + offset]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
    after, followers = dict(itertools.pairwise(left)), {}
    for node, follower in itertools.pairwise(right):  # activations are matched by the node before them
        candidate = after.get(found.get(node, ""), "")
        if follower not in found and candidate and op_of(candidate) == op_of(follower):
            followers[follower] = candidate
    return found | followers


def _in_order(nodes: Sequence[str]) -> list[str]:
    """Nodes sorted by the exporter's numbers if all have one: a runtime executes branches in any order."""
    distinct = list(dict.fromkeys(nodes))
    numbers = {node: int(found["number"][:12]) for node in distinct if (found := _NUMBERED.search(node))}
    if len(numbers) < len(distinct):
        return distinct
    return sorted(distinct, key=lambda node: (numbers[node], node))


Layers = Sequence[LayerTime]


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


def layer_changes(
    before: Sequence[Layers], after: Sequence[Layers], varies: float = 0.25, least_share: float = 0.02
) -> tuple[LayerChange, ...]:
    """The places whose kernels differ in fusion, precision or time, the largest change of time first.

    Both sides have profiles of several builds. Places are those of the first builds; their time differs if in all
    builds it does so in one direction, by more than the share ``varies`` of the place's time and ``least_share`` of
    the model's: lower values list more noise.
    """
    least_ms = least_share * (math.fsum(layer.milliseconds for layer in before[0]) or 1.0)

    def direction(row: Row | None) -> int:
        """1 if the place became slower, -1 if faster, 0 if the difference is small."""
        if row is None or abs(row.difference_ms) <= max(least_ms, varies * row.reference_ms):
            return 0
        return 1 if row.difference_ms > 0 else -1

    builds = [
        {
            (row.place, row.kind): row
            for row in EngineComparison(*(ExplainedEngine(name="", layers=tuple(one)) for one in both)).rows
        }
        for both in zip(before, after, strict=True)
    ]
    changes = []
    for place, row in builds[0].items():
        sides = row.reference, row.tuned
        fusions = [Counter(frozenset(layer.nodes) for layer in side) for side in sides]
        precisions = [{(node, k.integer, k.precision) for k in side for node in k.nodes} for side in sides]
        differs: dict[LayerChangeKind, bool] = {
            "fusion": fusions[0] != fusions[1],
            "precision": precisions[0] != precisions[1],
            "time": {direction(each.get(place)) for each in builds} in ({1}, {-1}),
        }
        if any(differs.values()):
            every = [*row.reference, *row.tuned]
            change = LayerChange(
                nodes=tuple(dict.fromkeys(node for layer in every for node in layer.nodes)),
                tensors=tuple(dict.fromkeys(t for layer in every if not layer.nodes for t in layer.tensors)),
                kinds=tuple(kind for kind, is_so in differs.items() if is_so),
                before=tuple(map(_text, row.reference)),
                after=tuple(map(_text, row.tuned)),
                before_ms=row.reference_ms,
                after_ms=row.tuned_ms,
            )
            changes.append(change)
    return tuple(changes)


def _kernel_groups(before: Layers, after: Layers) -> list[tuple[list[LayerTime], list[LayerTime]]]:
    """Kernels of both sides that share nodes, directly or through others, in the order of the model."""
    alike = [_kernel_keys(layer) for layer in (*before, *after)]
    classes = joined(dict.fromkeys(key for each in alike for key in each), alike)
    home = {key: number for number, keys_of in enumerate(classes) for key in keys_of}
    groups: dict[int, tuple[list[LayerTime], list[LayerTime]]] = {}
    for side, layers in enumerate((before, after)):
        for layer in layers:
            groups.setdefault(home[_kernel_keys(layer)[0]], ([], []))[side].append(layer)
    return list(groups.values())


def _text(layer: LayerTime) -> str:
    """``QLinearConv (conv1, relu1), integer``."""
    named = ", ".join(layer.nodes or layer.tensors)
    precision = layer.precision or ("integer" if layer.integer else "")
    return f"{layer.op_type}{f' ({named})' if named else ''}{f', {precision}' if precision else ''}"
