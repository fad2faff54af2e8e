"""Times of blocks and conversions, learnt from the kernels of profiled builds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.blocks import UnitBlock, block_codes, nodes_of_blocks
from qdqspec.search.edges import FLOAT, FP, Domains, Edge
from qdqspec.search.labels import LINEAR
from qdqspec.types import HALVES, LayerTime, Trial, kind_of

RUN_ELEMENTS = 4096  # that a conversion kernel converts in the time of starting one


class KernelTimes:
    """Milliseconds of blocks by code, and of converting each edge by pair of domains.

    The time of a block is the median of its profiles under a label. A label that was never measured takes a share of
    the float time: that of measured blocks of the same operators, averaged by their float times with an assumed share
    that has the weight of the block itself. Times are at the speed at which the reference was profiled; without
    profiles each block takes the same share of one millisecond. Conversions are measured, or estimated by the size of
    the tensor.

    ``linear_share`` is assumed for the time of convolutions and matrix products under a label that no block of these
    operators has had: less makes more of them be tried.
    """

    def __init__(
        self,
        space: SchemeSpace,
        blocks: Sequence[UnitBlock],
        edges: Sequence[Edge],
        domains: Domains,
        *,
        linear_share: float = 0.6,
    ) -> None:
        self.reference_ms = 0.0  # sum of all kernels of the float model
        self._whole_ms = 0.0  # of a run of the float model, which may have time outside of kernels
        self._space, self._blocks, self._edges, self._domains = space, blocks, edges, domains
        self._linear_share = linear_share
        self._block_of = nodes_of_blocks(space, blocks)
        self._edge_of = {edge.tensor: number for number, edge in enumerate(edges)}
        self._kinds = [_kind(space, block) for block in blocks]
        self._block_times: list[dict[int, list[float]]] = [{} for _ in blocks]  # by code
        self._conversion_times: dict[tuple[int, int], list[float]] = {}  # by edge and pair of domains

    def learn(self, trial: Trial) -> None:
        """Add the kernels of a build, scaled so that their sum differs from the reference's as the whole does.

        The first one is the reference.
        """
        total, scale = sum(layer.milliseconds for layer in trial.layers), 1.0
        if not self.reference_ms:
            taken = trial.samples
            self.reference_ms = total
            self._whole_ms = taken.median_ms("cpu" if taken.cpu_ms else "wall") if taken.wall_ms else total
        elif trial.ratio and total > 0:
            expected = self.reference_ms + (trial.ratio - 1) * self._whole_ms
            scale = expected / total if expected > 0 else 1.0
        codes = block_codes(self._space, self._blocks, dict(trial.placement.labels)).tolist()
        block_of, spent = self._block_of, [0.0] * len(codes)
        for layer in trial.layers:
            if layer.boundary:
                self._learn_conversion(layer, codes, scale)
                continue
            owners = {block_of[node] for node in layer.nodes if node in block_of}
            for owner in owners:
                spent[owner] += scale * layer.milliseconds / len(owners)
        for seen, code, milliseconds in zip(self._block_times, codes, spent, strict=True):
            seen.setdefault(code, []).append(milliseconds)

    def _learn_conversion(self, layer: LayerTime, codes: Sequence[int], scale: float) -> None:
        """Add a kernel that converts; its tensors, and conversions that a tensor takes at once, share its time."""
        for number in (self._edge_of[tensor] for tensor in layer.tensors if tensor in self._edge_of):
            pairs = self._edges[number].conversions(codes, self._domains) or [0]
            for pair in pairs:
                milliseconds = scale * layer.milliseconds / len(layer.tensors) / len(pairs)
                self._conversion_times.setdefault((number, pair), []).append(milliseconds)

    def of_blocks(self) -> tuple[Floats, Floats]:
        """Milliseconds of each block under each code, and which of them are measured."""
        medians = [{code: float(np.median(own)) for code, own in seen.items()} for seen in self._block_times]
        totals: dict[tuple[str, int], Floats] = {}  # time and float time, by operators of a block and code
        for known, kind in zip(medians, self._kinds, strict=True):
            for code in known.keys() - {FP} if FP in known else ():
                totals[kind, code] = totals.get((kind, code), 0.0) + np.array([known[code], known[FP]])
        times = np.zeros((len(self._blocks), len(self._space.labels)))
        is_measured = np.zeros(times.shape, dtype=bool)
        for index, (known, kind) in enumerate(zip(medians, self._kinds, strict=True)):
            is_measured[index, list(known)] = True
            own = known.get(FP, 0.0) if self.reference_ms else 1 / len(self._blocks)
            for code, label in enumerate(self._space.labels):
                is_linear = kind in LINEAR and kind_of(label) not in HALVES
                assumed = np.array([own * (self._linear_share if is_linear else 1.0), own])
                spent, floats = assumed + totals.get((kind, code), 0.0)
                share = 1.0 if code == FP or not floats else min(1.0, spent / floats)  # so that it is tried
                times[index, code] = known.get(code, own * share)
        return times, is_measured

    def of_conversions(self) -> Floats:
        """Milliseconds of each edge's conversions: the mean of its own, else by its size and the rate of its kind.

        Without a measured rate that of all kinds counts, twice between two formats: it passes through float.
        """
        sizes = np.array([edge.elements + RUN_ELEMENTS for edge in self._edges])
        rates: dict[int | None, Floats] = {}  # milliseconds and sizes
        for (number, pair), own in self._conversion_times.items():
            for key in (pair, None):
                rates[key] = rates.get(key, 0.0) + np.array([np.mean(own), sizes[number]])
        whole = rates.get(None, np.array([0.0, 1.0]))
        costs = np.zeros((len(sizes), len(self._domains.pairs)))
        for pair, (one, _) in enumerate(self._domains.pairs):
            milliseconds, elements = rates.get(pair, whole * (1 if one == FLOAT else 2, 1))
            costs[:, pair] = sizes * milliseconds / elements
        for (number, pair), own in self._conversion_times.items():
            costs[number, pair] = np.mean(own)
        return costs


def _kind(space: SchemeSpace, block: UnitBlock) -> str:
    """The linear operators of a block, or all of its operators if it has none; grouped convolutions are apart."""
    units = [space.by_id[name] for name in block.units]
    units = [unit for unit in units if unit.op_type in LINEAR] or units
    nodes = space.model.by_name
    grouped = ("grouped" for unit in units if nodes[unit.id].attributes.get("group", 1) != 1)
    return " ".join(sorted({*(unit.op_type for unit in units), *grouped}))
