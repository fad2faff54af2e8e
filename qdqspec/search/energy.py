"""The energy of a labelling: predicted time and a price for its noise, and its minimization. Pure.

Nothing here calls BLAS or LAPACK: on matrices of this size their threads cost more than they save, and keep spinning
while candidates are timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import combinations
from typing import Self, TypeAlias

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.qdq import SchemeSpace
from qdqspec.search.blocks import (
    FLOAT,
    FP,
    LINEAR,
    Codes,
    UnitBlock,
    block_codes,
    domains_of,
    edges_between,
    fuse,
    labels_of,
    uniform_codes,
)
from qdqspec.types import HALVES, Clock, Placement, Trial, kind_of

# milliseconds by block and code, and milliseconds of converting each edge between two domains
_Terms: TypeAlias = tuple[list[list[float]], list[list[list[float]]]]
_Around: TypeAlias = tuple[int, ...]  # the code of a block, and those of its neighbours


@dataclass(eq=False)
class Energy:
    """The energy of a labelling ``codes``::

        sum over blocks b:  times[b, codes[b]] + slowdown of b among its neighbours + price * noise[b, codes[b]]
        sum over edges e, each pair of domains p that e converts between:  share * converting[e, p]

    ``times`` and ``converting`` are in milliseconds of a run, at the speed at which the reference was profiled.
    ``noise`` is noise power over signal power, ``None`` while it is unknown.

    The time of a block is the median of its profiles under a label. A label that was never measured is assumed to take
    ``linear_share`` of the float time of convolutions and matrix products, and the whole of others: less makes more
    labels be tried. Conversions are measured, or estimated by the size of the tensor.

    A kernel may be far slower among some neighbours, where the runtime keeps another layout: a MaxPool of integers
    behind a float convolution took seventy times its time behind an integer one (ONNX Runtime 1.32). A time that is
    more than twice the least of its label, by more than the share ``surprise`` of the reference, counts for the same
    labels of the neighbours only: the slowdown. A smaller share takes noise for slowdowns.

    ``run_elements`` are converted in the time of starting a kernel: more makes conversions of small tensors cost more.
    """

    space: SchemeSpace
    blocks: tuple[UnitBlock, ...]
    _: KW_ONLY
    linear_share: float = 0.6
    run_elements: float = 4096
    surprise: float = 0.05
    left_out: set[int] = field(default_factory=set, init=False)  # blocks with labels that do not build
    noise: Floats | None = field(default=None, init=False)
    reference_ms: float = field(default=0.0, init=False)  # sum of all kernels of the float model

    def __post_init__(self) -> None:
        space, blocks = self.space, self.blocks
        self._whole_ms = 0.0  # of a run of the float model, which may have time outside of kernels
        by_id = space.by_id
        self._block_of = {node: b.index for b in blocks for unit in b.units for node in by_id[unit].nodes}
        self._domains = domains_of(space)
        self._edges = edges_between(space, self._block_of)
        self._edge_of = {edge.tensor: number for number, edge in enumerate(self._edges)}
        self._are_linear = [any(by_id[unit].op_type in LINEAR for unit in block.units) for block in blocks]
        self._block_times = [dict[_Around, list[float]]() for _ in blocks]  # by codes of it and around it
        self._conversion_times: dict[tuple[int, tuple[int, int]], list[float]] = {}  # by edge and domains
        self._around: list[list[int]] = [[] for _ in blocks]  # edges by block
        for number, edge in enumerate(self._edges):
            for end in edge.blocks:
                self._around[end].append(number)
        self._neighbours = [
            sorted({other for number in numbers for other in self._edges[number].blocks} - {index})
            for index, numbers in enumerate(self._around)
        ]
        self.learn(())

    @classmethod
    def of(cls, space: SchemeSpace, trials: Sequence[Trial]) -> Self:
        """The energy by the candidates of a search that ran; the kernels of those profiled determine the blocks."""
        energy = cls(space, fuse(space, (layer for trial in trials for layer in trial.layers)))
        energy.learn(trials)
        return energy

    def placed(self, codes: Codes) -> Placement:
        """The placement of a labelling."""
        return self.space.resolve(labels_of(self.space, self.blocks, codes))

    def leave_out(self, codes: Mapping[int, int]) -> None:
        """Give each of these blocks, by index, this code no more."""
        self.left_out.update(codes)
        self.blocks = tuple(
            replace(block, codes=tuple(code for code in block.codes if code != codes.get(block.index)))
            for block in self.blocks
        )

    def codes_of(self, placement: Placement) -> Codes:
        """The labelling of a placement of the space."""
        return block_codes(self.space, self.blocks, dict(placement.labels))

    # ---- times of kernels -----------------------------------------------------------------------

    def learn(self, trials: Iterable[Trial]) -> None:
        """Add profiled builds, of which the first is the reference.

        Kernels' times are scaled so that their sum differs from the reference's as the time of the whole model does.
        """
        for trial in trials:
            if not trial.layers or trial.subgraph:
                continue
            total, scale = sum(layer.milliseconds for layer in trial.layers), 1.0
            if not self.reference_ms:
                taken, self.reference_ms = trial.samples, total
                clock: Clock = "cpu" if taken.cpu_ms else "wall"
                self._whole_ms = taken.median_ms(clock) if taken.wall_ms else total
            elif trial.ratio and total > 0:
                expected = self.reference_ms + (trial.ratio - 1) * self._whole_ms
                scale = expected / total if expected > 0 else 1.0
            self._learn_kernels(trial, scale)
        self.times = self._times_of_blocks()
        self.converting = self._times_of_conversions()

    def _learn_kernels(self, trial: Trial, scale: float) -> None:
        codes, block_of = self.codes_of(trial.placement).tolist(), self._block_of
        spent = [0.0] * len(codes)
        for layer in trial.layers:
            if layer.boundary:  # its tensors, and conversions that a tensor takes at once, share its time
                for number in (self._edge_of[tensor] for tensor in layer.tensors if tensor in self._edge_of):
                    pairs = self._edges[number].conversions(codes, self._domains) or [(FLOAT, 1)]
                    for pair in pairs:
                        milliseconds = scale * layer.milliseconds / len(layer.tensors) / len(pairs)
                        self._conversion_times.setdefault((number, pair), []).append(milliseconds)
                continue
            owners = {block_of[node] for node in layer.nodes if node in block_of}
            for owner in owners:
                spent[owner] += scale * layer.milliseconds / len(owners)
        for index, (seen, milliseconds) in enumerate(zip(self._block_times, spent, strict=True)):
            seen.setdefault(self._around_of(codes, index), []).append(milliseconds)

    def _around_of(self, codes: Sequence[int], block: int) -> _Around:
        return (codes[block], *(codes[other] for other in self._neighbours[block]))

    def _usual_times(self) -> list[dict[int, float]]:
        """Milliseconds of each block by measured code; sets the slowdowns."""
        usual: list[dict[int, float]] = [{} for _ in self.blocks]
        self.slowdowns: list[dict[_Around, float]] = [{} for _ in self.blocks]
        for seen, medians, slow in zip(self._block_times, usual, self.slowdowns, strict=True):
            for code in {around[0] for around in seen}:
                own = {around: times for around, times in seen.items() if around[0] == code}
                every = np.concatenate(list(own.values()))
                most = every.min() + max(every.min(), self.surprise * self.reference_ms)
                medians[code] = float(np.median(every[every <= most]))
                means = {around: float(np.mean(times)) for around, times in own.items()}
                slow |= {around: mean - medians[code] for around, mean in means.items() if mean > most}
        return usual

    def _times_of_blocks(self) -> Floats:
        """Milliseconds of each block under each code."""
        times = np.zeros((len(self.blocks), len(self.space.labels)))
        for index, (known, is_linear) in enumerate(zip(self._usual_times(), self._are_linear, strict=True)):
            own = known.get(FP, 0.0) if self.reference_ms else 1 / len(self.blocks)
            for code, label in enumerate(self.space.labels):
                is_assumed = is_linear and code != FP and kind_of(label) not in HALVES
                times[index, code] = known.get(code, own * (self.linear_share if is_assumed else 1.0))
        return times

    def _times_of_conversions(self) -> Floats:
        """Milliseconds of each edge's conversions: the mean of its own, else by its size and the rate of its kind.

        Without a measured rate that of all kinds counts, twice between two formats: it passes through float.
        """
        sizes = np.array([edge.elements + self.run_elements for edge in self._edges])
        rates: dict[tuple[int, int] | None, Floats] = {}  # milliseconds and sizes
        for (number, pair), own in self._conversion_times.items():
            for key in (pair, None):
                rates[key] = rates.get(key, 0.0) + np.array([np.mean(own), sizes[number]])
        whole = rates.get(None, np.array([0.0, 1.0]))
        count = 1 + max(*self._domains.reads, *self._domains.makes, 1)
        costs = np.zeros((len(sizes), count, count))
        for pair in combinations(range(count), 2):
            milliseconds, elements = rates.get(pair, whole * (1 if FLOAT in pair else 2, 1))
            costs[:, *pair] = sizes * milliseconds / elements
        for (number, pair), own in self._conversion_times.items():
            costs[number, *pair] = np.mean(own)
        return costs

    # ---- energies -------------------------------------------------------------------------------

    def predict(self, codes: Codes, share: float = 1.0) -> float:
        """Predicted milliseconds of the blocks and conversions of a labelling."""
        return self._total(self._terms(share), codes.tolist())

    def noise_of(self, codes: Codes) -> float:
        """The noise of a labelling; 0 while it is unknown."""
        return 0.0 if self.noise is None else float(self.noise[np.arange(len(codes)), codes].sum())

    def changes(self, codes: Codes, share: float = 1.0) -> list[tuple[float, int, int]]:
        """Changes of single blocks, the fastest first: milliseconds added, index of the block, and its new code."""
        terms, given = self._terms(share), codes.tolist()
        return sorted(
            (self._added(terms, given, block.index, code), block.index, code)
            for block in self.blocks
            for code in block.codes
            if code != given[block.index]
        )

    def _terms(self, share: float, price: float = 0.0) -> _Terms:
        times = self.times + price * self.noise if self.noise is not None else self.times
        return times.tolist(), (share * self.converting).tolist()

    def _total(self, terms: _Terms, codes: Sequence[int]) -> float:
        return self._part(terms, codes, range(len(codes)), range(len(self._edges)))

    def _local(self, terms: _Terms, codes: Sequence[int], block: int) -> float:
        """The part of the energy that depends on one block, and the times of its neighbours."""
        return self._part(terms, codes, (block, *self._neighbours[block]), self._around[block])

    def _part(
        self, terms: _Terms, codes: Sequence[int], blocks: Iterable[int], edges: Iterable[int]
    ) -> float:
        """The energy of some blocks and edges."""
        times, costs = terms
        total = sum(times[block][codes[block]] + self._slowdown(codes, block) for block in blocks)
        for number in edges:
            for one, other in self._edges[number].conversions(codes, self._domains):
                total += costs[number][one][other]
        return total

    def _slowdown(self, codes: Sequence[int], block: int) -> float:
        known = self.slowdowns[block]
        return known.get(self._around_of(codes, block), 0.0) if known else 0.0

    def _added(self, terms: _Terms, codes: list[int], block: int, code: int) -> float:
        """The energy that changing one block adds."""
        before, own = self._local(terms, codes, block), codes[block]
        codes[block] = code
        after = self._local(terms, codes, block)
        codes[block] = own
        return after - before

    # ---- minimization ---------------------------------------------------------------------------

    def minimize(self, share: float = 1.0, price: float = 0.0, starts: Sequence[Codes] = ()) -> Codes:
        """The labelling of least energy that descents find, from ``starts`` or else uniform and fastest labels."""
        terms = self._terms(share, price)
        begins = [start.tolist() for start in starts]
        if not begins:
            fastest = [min(block.codes, key=terms[0][block.index].__getitem__) for block in self.blocks]
            begins = [*map(list, uniform_codes(self.space, self.blocks)), fastest]
        settled = [self._settled(terms, codes) for codes in begins]
        return np.array(min(settled, key=lambda codes: self._total(terms, codes)), dtype=np.int8)

    def within(self, most: float, share: float = 1.0, *, bisections: int = 12, decades: float = 6.0) -> Codes:
        """The labelling of least time with at most so much noise.

        A knapsack problem, by Lagrangian relaxation (Everett, Operations Research 11, 1963): the price of noise is
        bisected, up to ``decades`` from the ratio of whole time to allowed noise, and the rest of the noise is spent on
        single blocks. Fewer ``bisections`` are faster, and leave more.
        """
        loud = self.minimize(share)
        if self.noise_of(loud) <= most:
            return loud
        floats = quiet = np.full(len(self.blocks), FP, dtype=np.int8)
        low, high = -decades, decades
        rate = float(self.times[:, FP].sum()) / max(most, 1e-12)
        for _ in range(bisections):
            middle = (low + high) / 2
            codes = self.minimize(share, rate * 10**middle, (quiet, loud))
            if self.noise_of(codes) <= most:
                high, quiet = middle, codes
            else:
                low, loud = middle, codes
        found, terms = [], self._terms(share)
        for codes in (quiet, floats):
            for _, block, code in self.changes(codes, share):
                changed = codes.copy()
                changed[block] = code
                is_faster = self._added(terms, codes.tolist(), block, code) < 0
                if is_faster and self.noise_of(changed) <= most:
                    codes = changed
            found.append(codes)
        return min(found, key=lambda codes: self.predict(codes, share))

    def _settled(self, terms: _Terms, codes: list[int]) -> list[int]:
        """Coordinate descent: change one block at a time to its best code until nothing improves."""
        stale = {block.index for block in self.blocks if len(block.codes) > 1}
        while stale:
            for block in sorted(stale):
                stale.discard(block)
                now = codes[block]
                others = (code for code in self.blocks[block].codes if code != now)
                changes = ((self._added(terms, codes, block, code), code) for code in others)
                added, best = min(changes, default=(0.0, now))
                if added < -1e-9:  # less is a rounding error
                    codes[block] = best
                    stale.update(self._neighbours[block])
                    slow = (near for near in self._neighbours[block] if self.slowdowns[near])
                    stale.update(*(self._neighbours[near] for near in slow))
        return codes
