"""Compares the layers of two engines to explain their difference in speed, in ONNX names.

The input is layer times of any runtime. If end-to-end times are known, they decide which engine is faster;
the layers only explain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from qdqspec.report.explain_names import op_of, same_nodes
from qdqspec.types import CorrectionGain, LayerTime

RowKind: TypeAlias = Literal["kernel", "conversion"]

PAIR_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_NOTHING_MS = 0.0  # conversions that take no time are bookkeeping of the runtime and are not counted
_END = "the outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedEngine:
    """One engine to explain: its layers in order of execution, and its end-to-end median if known."""

    name: str
    layers: tuple[LayerTime, ...]
    end_to_end_ms: float | None = None
    ops: Mapping[str, str] = field(default_factory=dict)  # operators by node, if the model is known
    quantized: frozenset[str] = frozenset()  # nodes that read a dequantized activation, if the model is known
    notes: tuple[str, ...] = ()
    corrections: tuple[CorrectionGain, ...] = ()  # that the search of this engine tried

    @property
    def sum_ms(self) -> float:
        """Sum of all layers; more than end to end, because a profiler prevents overlap."""
        return math.fsum(layer.milliseconds for layer in self.layers)

    @property
    def milliseconds(self) -> float:
        """The time used for ranking: end to end if known, else the sum."""
        return self.sum_ms if self.end_to_end_ms is None else self.end_to_end_ms

    @property
    def kernels(self) -> tuple[LayerTime, ...]:
        """Layers that compute."""
        return tuple(layer for layer in self.layers if not layer.boundary)

    @property
    def integer(self) -> tuple[LayerTime, ...]:
        """Kernels that compute in integers or another narrow format."""
        return tuple(layer for layer in self.kernels if layer.integer)

    @property
    def left_in_float(self) -> tuple[LayerTime, ...]:
        """Kernels of nodes that read quantized activations, and that compute in floats all the same."""
        return tuple(
            layer
            for layer in self.kernels
            if not layer.integer and not self.quantized.isdisjoint(layer.nodes)
        )

    @property
    def float_writers(self) -> tuple[LayerTime, ...]:
        """Integer kernels that write floats, which a later kernel has to quantize again."""
        return tuple(layer for layer in self.integer if ">" in layer.precision)

    @property
    def lonely_pairs(self) -> tuple[LayerTime, ...]:
        """Q and DQ that were not fused into a kernel."""
        return tuple(layer for layer in self.layers if is_pair(layer))

    @property
    def conversions(self) -> tuple[LayerTime, ...]:
        """Changes of type or layout, besides Q and DQ, that take time."""
        return tuple(
            layer
            for layer in self.layers
            if layer.boundary and not is_pair(layer) and layer.milliseconds > _NOTHING_MS
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The same place in both engines: a kernel's nodes, or the conversions before them."""

    place: tuple[str, ...]
    kind: RowKind
    reference: tuple[LayerTime, ...]
    tuned: tuple[LayerTime, ...]

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
    """Two engines of one network. ``renamed`` maps nodes of ``tuned`` to their names in the reference."""

    reference: ExplainedEngine
    tuned: ExplainedEngine
    renamed: Mapping[str, str]

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
        found = [*_kernel_rows(self.reference.kernels, self._kernels), *self._conversion_rows()]
        return tuple(sorted(found, key=lambda row: -abs(row.difference_ms)))

    @property
    def lost_fusions(self) -> tuple[Row, ...]:
        """Places where the reference runs fewer kernels."""
        return tuple(row for row in self.rows if row.lost_fusion)

    @property
    def won_fusions(self) -> tuple[Row, ...]:
        """Places where the reference runs more kernels."""
        return tuple(row for row in self.rows if row.won_fusion)

    @cached_property
    def _kernels(self) -> tuple[LayerTime, ...]:
        return tuple(_renamed(layer, self.renamed) for layer in self.tuned.kernels)

    def _conversion_rows(self) -> list[Row]:
        ours, theirs = _conversions(self.reference.layers, {}), _conversions(self.tuned.layers, self.renamed)
        return [
            Row(
                place=place,
                kind="conversion",
                reference=tuple(ours.get(place, ())),
                tuned=tuple(theirs.get(place, ())),
            )
            for place in dict.fromkeys((*ours, *theirs))
        ]


def compare(reference: ExplainedEngine, tuned: ExplainedEngine) -> EngineComparison:
    """Match the layers of two engines of one network."""
    names = [[node for layer in engine.kernels for node in layer.nodes] for engine in (reference, tuned)]
    return EngineComparison(reference, tuned, same_nodes(*names))


def find_reference(engines: Sequence[ExplainedEngine]) -> ExplainedEngine:
    """The engine to compare with: the only one without quantized layers, else the first."""
    plain = [engine for engine in engines if not engine.integer and not engine.lonely_pairs]
    return plain[0] if len(plain) == 1 else engines[0]


def is_pair(layer: LayerTime) -> bool:
    """Whether a layer is a Q or DQ that was not fused."""
    return layer.boundary and layer.op_type in PAIR_OPS


def ops_in(nodes: Iterable[str], engine: ExplainedEngine) -> set[str]:
    """Operators of nodes."""
    return {op_of(node, engine.ops) for node in nodes}


def _renamed(layer: LayerTime, names: Mapping[str, str]) -> LayerTime:
    return replace(layer, nodes=tuple(names.get(node, node) for node in layer.nodes)) if names else layer


def _kernel_rows(ours: Sequence[LayerTime], theirs: Sequence[LayerTime]) -> list[Row]:
    """One row for each group of kernels that share nodes, directly or through others."""
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for layer in (*ours, *theirs):
        for node in layer.nodes[1:]:
            parent[root(node)] = root(layer.nodes[0])
    rows: dict[str, tuple[dict[str, None], list[LayerTime], list[LayerTime]]] = {}
    for side, layers in ((1, ours), (2, theirs)):
        for layer in layers:
            key = root(layer.nodes[0]) if layer.nodes else layer.name
            row = rows.setdefault(key, ({}, [], []))
            row[0].update(dict.fromkeys(layer.nodes or (layer.name,)))
            row[side].append(layer)  # type: ignore[union-attr]  # 1 and 2 are the lists
    return [
        Row(place=tuple(nodes), kind="kernel", reference=tuple(left), tuned=tuple(right))
        for nodes, left, right in rows.values()
    ]


def _conversions(
    layers: Sequence[LayerTime], names: Mapping[str, str]
) -> dict[tuple[str, ...], list[LayerTime]]:
    """Conversions that take time, by the first node of the kernel after them."""
    found: dict[tuple[str, ...], list[LayerTime]] = {}
    following = _END
    for layer in reversed(layers):
        if not layer.boundary:
            following = names.get(layer.nodes[0], layer.nodes[0]) if layer.nodes else layer.name
        elif layer.milliseconds > _NOTHING_MS or is_pair(layer):
            found.setdefault((following,), []).insert(0, layer)
    return dict(reversed(found.items()))
