"""Fusion blocks that get one label, and a cost model of labelled blocks learnt from layer profiles. Pure.

The operators of one kernel must not be separated: units that share a kernel in any profiled build form one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.graph.unify import joined
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._classes import LINEAR
from qdqspec.search._descent import Descent, Edge
from qdqspec.search._noise import BlockNoise
from qdqspec.search.crossings import FP, Codes, Conversions, Crossings, all_float, domains_of, edges_between
from qdqspec.types import HALVES, Label, LayerTime, Placement, Trial, format_of, kind_of

TIME_DOUBT, CROSSING_DOUBT = 0.15, 0.5  # standard deviations of logarithms when a model is drawn
LINEAR_TIME = 0.6  # of its float time, assumed for a label of an operator of `LINEAR`
DRAWN_SHARES = (0.5, 1.0, 2.0)
MOST_TOGETHER, MOST_SEEDS = 4, 64  # blocks flipped together, and the number of groups that are grown


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBlock:
    """Units with one label. ``codes`` are the labels that at least one of them offers, as numbers."""

    index: int
    units: tuple[str, ...]
    codes: tuple[int, ...]


def fuse(space: SchemeSpace, profiles: Iterable[Sequence[LayerTime]]) -> tuple[UnitBlock, ...]:
    """Join units that share a kernel of any profile; in graph order."""
    kernels = (
        [space.unit_of[node] for node in layer.nodes if node in space.unit_of]
        for layers in profiles
        for layer in layers
        if not layer.boundary
    )
    found = []
    for index, names in enumerate(joined((unit.id for unit in space.units), kernels)):
        codes = {space.labels.index(label) for name in names for label in space.by_id[name].labels}
        found.append(UnitBlock(index=index, units=names, codes=tuple(sorted(codes))))
    return tuple(found)


def unit_labels(space: SchemeSpace, blocks: Sequence[UnitBlock], codes: Codes) -> dict[str, Label]:
    """Labels of units from codes of blocks."""
    labels: dict[str, Label] = {}
    for block in blocks:
        labels |= block_labels(space, block, codes[block.index])
    return labels


def block_labels(space: SchemeSpace, block: UnitBlock, code: int) -> dict[str, Label]:
    """Labels of the units of one block.

    Under "in+out" each unit gets its fullest label of the format; other labels apply to the units that offer them.
    """
    label, labels = space.labels[code], {}
    for name in block.units:
        unit = space.by_id[name]
        wanted = unit.full_in(format_of(label)) if kind_of(label) == "in+out" else label
        if wanted in unit.labels:
            labels[name] = wanted
    return labels


def block_codes(space: SchemeSpace, blocks: Sequence[UnitBlock], labels: Mapping[str, Label]) -> Codes:
    """Codes of blocks from labels of units: a block gets the fullest label among its units."""
    ranked = sorted(range(len(space.labels)), key=lambda code: kind_of(space.labels[code]) != "in+out")
    codes = all_float(len(blocks))
    for block in blocks:
        given = {labels.get(name, "fp") for name in block.units}
        codes[block.index] = next((code for code in ranked if code != FP and space.labels[code] in given), FP)
    return codes


class CostModel:
    """Time of each block under each label, plus the cost of crossing between float and narrow formats.

    A block's time is the median of its times in profiles under that label. A label that was never measured takes a
    share of the float time: that of measured blocks of the same operators, averaged by their float times with an
    assumed share that has the weight of the block itself. So a small block hardly changes what is assumed of a large
    one. Times are in milliseconds per run, at the speed at which the reference was profiled: the machine's speed
    changes between profiles, and a trial's ratio to the reference was measured beside it. Without profiles each block
    is assumed to take the same share of one millisecond. A tensor that is produced in one domain and read in another
    costs a conversion (`Conversions`).
    """

    def __init__(self, space: SchemeSpace, blocks: Sequence[UnitBlock]) -> None:
        self.space = space
        self.blocks = tuple(blocks)
        self.reference_ms = 0.0  # sum of all kernels of the float model
        self._whole_ms = 0.0  # of a run of it, which may have time outside of kernels
        self._block_of = {node: b.index for b in blocks for u in b.units for node in space.by_id[u].nodes}
        self._edges = edges_between(space, self._block_of)
        domains = domains_of(space)
        self._crossings = Crossings(self._edges, domains)
        self._conversions = Conversions(self._edges, domains)
        self._seen_times: list[dict[int, list[float]]] = [{} for _ in blocks]
        self._kinds = [_kind(space, block) for block in blocks]
        self.times = np.zeros((len(blocks), len(space.labels)))  # by block and code
        self.is_measured = np.zeros(self.times.shape, dtype=bool)  # whether a profile has it
        self.converting = self._conversions.costs()  # by edge and pair of domains
        self._domains = domains
        self._descent = self.descent([block.codes for block in self.blocks])
        self._priced: tuple[BlockNoise, Descent] | None = None

    @classmethod
    def of(cls, space: SchemeSpace, trials: Iterable[Trial]) -> Self:
        """The model of the profiled trials of a search; their kernels determine the blocks."""
        timed = [trial for trial in trials if trial.ok and trial.layers and not trial.subgraph]
        costs = cls(space, fuse(space, (trial.layers for trial in timed)))
        costs.learn(timed)
        return costs

    def learn(self, trials: Iterable[Trial]) -> None:
        """Add profiled builds. The first one is the reference."""
        for trial in trials:
            if trial.layers:
                self._learn(trial)
        medians = [{code: float(np.median(own)) for code, own in seen.items()} for seen in self._seen_times]
        totals: dict[tuple[str, int], Floats] = {}  # time and float time, by operators of a block and code
        for known, kind in zip(medians, self._kinds, strict=True):
            for code in known.keys() - {FP} if FP in known else ():
                totals[kind, code] = totals.get((kind, code), 0.0) + np.array([known[code], known[FP]])
        if not self.reference_ms:
            medians = [{FP: 1 / len(self.blocks)} for _ in self.blocks]
        else:
            for index, known in enumerate(medians):
                self.is_measured[index, list(known)] = True
        for times, known, kind in zip(self.times, medians, self._kinds, strict=True):
            own = known.get(FP, 0.0)
            for code, label in enumerate(self.space.labels):
                is_linear = kind in LINEAR and kind_of(label) not in HALVES
                assumed = np.array([own * (LINEAR_TIME if is_linear else 1.0), own])
                spent, floats = assumed + totals.get((kind, code), 0.0)
                share = 1.0 if code == FP or not floats else min(1.0, spent / floats)  # so that it is tried
                times[code] = known.get(code, own * share)
        self.converting = self._conversions.costs()

    def descent(
        self, offered: Sequence[tuple[int, ...]], groups: Sequence[Sequence[int]] | None = None
    ) -> Descent:
        """A descent over these blocks, or over groups of them that share a code."""
        return Descent(offered, self._edges, self._domains, groups)

    def compose(
        self,
        share: float,
        noise: BlockNoise | None = None,
        price: float = 0.0,
        starts: Sequence[Codes] | None = None,
    ) -> Codes:
        """The labelling of least predicted time, with crossings weighted by ``share``.

        Its ``noise`` costs ``price`` milliseconds. The descent begins at each of ``starts``, by default at one label
        everywhere and at the fastest label of each block.
        """
        converting = share * self.converting
        if noise is None:
            return self._composed(self.times, converting, starts)
        return self._composed(self.times + price * noise.own, converting, starts, noise, price)

    def draw(self, random: np.random.Generator, heat: float = 1.0) -> Codes:
        """Thompson sampling: the best labelling of a model drawn from the uncertainty of times and crossing costs.

        Profiles are noisy and times depend on the neighbours, so that near its optimum the model does not distinguish
        labellings that a build distinguishes. ``heat`` multiplies the standard deviations.
        """
        times = self.times * random.lognormal(0, heat * TIME_DOUBT, self.times.shape)
        converting = self.converting * random.lognormal(0, heat * CROSSING_DOUBT, self.converting.shape)
        return self._composed(times, float(random.choice(DRAWN_SHARES)) * converting, None)

    def _composed(
        self,
        times: Floats,
        converting: Floats,
        starts: Sequence[Codes] | None,
        noise: BlockNoise | None = None,
        price: float = 0.0,
    ) -> Codes:
        """The labelling of least time with these times of blocks and conversions, and a price of shared noise."""
        if starts is None:
            fastest = [min(b.codes, key=times[b.index].tolist().__getitem__) for b in self.blocks]
            uniform = (
                [code if code in block.codes else FP for block in self.blocks]
                for code in range(len(self.space.labels))
            )
            starts = [np.array(codes, dtype=np.int8) for codes in (*uniform, fastest)]
        if noise is None or not noise.shared:
            settled = [self._descent.settle(start, times, converting) for start in starts]
            return min(settled, key=lambda codes: self._total_ms(codes, times, converting))
        priced = np.zeros((len(noise.shared), converting.shape[1]))
        priced[:, 0] = [price * each.power for each in noise.shared]
        costs = np.concatenate([converting, priced])
        settled = [self._descent_with(noise).settle(start, times, costs) for start in starts]
        return min(
            settled,
            key=lambda codes: self._total_ms(codes, times, converting) + price * noise.of_shared(codes),
        )

    def _descent_with(self, noise: BlockNoise) -> Descent:
        """The descent in which shared noise costs too; kept for the last noise."""
        if self._priced is None or self._priced[0] is not noise:
            edges: list[Edge] = [*self._edges, *noise.shared]
            self._priced = noise, Descent([block.codes for block in self.blocks], edges, self._domains)
        return self._priced[1]

    def placed(self, codes: Codes) -> Placement:
        """The placement of a labelling."""
        return self.space.resolve(unit_labels(self.space, self.blocks, codes))

    def codes_of(self, placement: Placement) -> Codes:
        """The labelling of a placement of the space."""
        return block_codes(self.space, self.blocks, dict(placement.labels))

    def as_placed(self, codes: Codes) -> Codes:
        """The labelling of the placement, in which blocks that the runtime quantizes itself have their label."""
        return self.codes_of(self.placed(codes))

    def predict(self, codes: Codes, share: float = 1.0) -> float:
        """Predicted milliseconds of the blocks and crossings of a labelling."""
        return self._total_ms(codes, self.times, share * self.converting)

    def _total_ms(self, codes: Codes, times: Floats, converting: Floats) -> float:
        blocks_ms = float(times[np.arange(len(codes)), codes].sum())
        return blocks_ms + float(self._crossings.spent(codes, converting).sum())

    def crossings_ms(self, codes: Codes) -> Floats:
        """Predicted milliseconds of conversions for each pair of domains."""
        return self._crossings.spent(codes, self.converting)

    def grown(self, codes: Codes, index: int, code: int, most: int) -> Iterator[Codes]:
        """The labelling with one block flipped, then with one more neighbour at a time, up to ``most`` in all."""
        group, current = {index}, codes.copy()
        current[index] = code
        yield current
        while len(group) < most:
            around = {b for member in group for b in self._descent.neighbours[member]} - group
            able = sorted(b for b in around if code in self.blocks[b].codes and current[b] != code)
            if not able:
                return
            options = []
            for neighbour in able:
                option = current.copy()
                option[neighbour] = code
                options.append((self.predict(option), neighbour, option))
            _, chosen, current = min(options, key=lambda option: option[:2])
            group.add(chosen)
            yield current

    def _learn(self, trial: Trial) -> None:
        """Add the kernels of a build, scaled so that their sum differs from the reference's as the whole does."""
        total, scale = sum(layer.milliseconds for layer in trial.layers), 1.0
        if self.reference_ms:
            expected = self.reference_ms + ((trial.ratio or 1.0) - 1) * self._whole_ms
            if trial.ratio and total > 0 and expected > 0:
                scale = expected / total
        else:
            taken = trial.samples
            self.reference_ms = total
            self._whole_ms = taken.median_ms("cpu" if taken.cpu_ms else "wall") if taken.wall_ms else total
        spent, codes = np.zeros(len(self.blocks)), self.codes_of(trial.placement)
        for layer in trial.layers:
            milliseconds = scale * layer.milliseconds
            if layer.boundary:
                for tensor in layer.tensors:
                    self._conversions.learn(tensor, codes, milliseconds / len(layer.tensors))
                continue
            owners = {self._block_of[node] for node in layer.nodes if node in self._block_of}
            for owner in owners:
                spent[owner] += milliseconds / len(owners)
        for seen, code, milliseconds in zip(self._seen_times, codes, spent, strict=True):
            seen.setdefault(int(code), []).append(float(milliseconds))

    def local_ms(self, block: UnitBlock, code: int, codes: Codes, share: float = 1.0) -> float:
        """The predicted cost of a block and the tensors around it under a label, all else fixed."""
        changed = codes.copy()
        changed[block.index] = code
        crossing = self._descent.crossing(block.index, changed, self.converting)
        return float(self.times[block.index, code] + share * crossing)

    def single_changes(self, codes: Codes, share: float = 1.0) -> list[tuple[float, int, int]]:
        """Changes of single blocks, the fastest first: milliseconds added, index of the block, and its new code."""
        changes: list[tuple[float, int, int]] = []
        for block in self.blocks:
            now = self.local_ms(block, int(codes[block.index]), codes, share)
            others = (code for code in block.codes if code != codes[block.index])
            changes += [
                (self.local_ms(block, code, codes, share) - now, block.index, code) for code in others
            ]
        return sorted(changes)


def _kind(space: SchemeSpace, block: UnitBlock) -> str:
    """The linear operators of a block, or all of its operators if it has none; grouped convolutions are apart."""
    units = [space.by_id[name] for name in block.units]
    units = [unit for unit in units if unit.op_type in LINEAR] or units
    nodes = space.model.by_name
    grouped = ("grouped" for unit in units if nodes[unit.id].attributes.get("group", 1) != 1)
    return " ".join(sorted({*(unit.op_type for unit in units), *grouped}))


def flips(costs: CostModel, codes: Codes) -> list[Codes]:
    """Labellings that differ in one block or a few neighbours, the most promising by the cost model first.

    Neighbours matter if one block alone only moves a conversion: from each of the most promising single flips a group
    grows along the tensors, each time by the most promising block, up to `MOST_TOGETHER`. A block without time, such as
    one in a body that does not run, is flipped only where that saves conversions.
    """
    flipped: dict[bytes, tuple[float, Codes]] = {}
    spent = costs.times.sum(axis=1)
    has_profiles = bool(spent.any())
    changes = (
        (added, index, code)
        for added, index, code in costs.single_changes(codes)
        if added < 0 or spent[index] or not has_profiles
    )
    for number, (_, index, code) in enumerate(changes):
        for other in costs.grown(codes, index, code, MOST_TOGETHER if number < MOST_SEEDS else 1):
            flipped.setdefault(other.tobytes(), (costs.predict(other), other))
    return [other for _, other in sorted(flipped.values(), key=lambda pair: pair[0])]
