"""The placement with the most multiplications in narrow formats, within accuracy limits, that a backend builds.

Nothing is timed. Units leave the widest labellings in the order of their noise per multiplication until the placement
is accurate, a greedy rule for the knapsack problem (Dantzig, "Discrete-variable extremum problems", 1957). Units that
the backend refuses are found by halving the placement, as in delta debugging (Zeller and Hildebrandt, 2002). Of
placements with equally many multiplications the one with the fewest kernels that only convert is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._classes import Labels, simple_labels
from qdqspec.types import LabelNoise, Placement, Trial, kind_of

RETURNED = 12  # units, at most, that are tried again after the noisiest ones were left out


@dataclass(slots=True, kw_only=True)
class CoverageSearch:
    """One search: ``multiplications`` are those of each unit, ``noise`` is that of each (unit, label) alone.

    ``is_accurate`` decides by a rehearsal whether a placement meets the limits, ``keeps_limits`` by the outputs of its
    model, after which rehearsals may decide otherwise. ``build`` gives the trial of a placement with its kernels.
    ``narrow`` are the formats whose kernels compute in them: a unit with such a format whose kernel is float by the
    backend's list counts as float.
    """

    space: SchemeSpace
    multiplications: Mapping[str, int]
    noise: Callable[[], LabelNoise | None]
    is_accurate: Callable[[Placement], bool]
    keeps_limits: Callable[[Trial], bool]
    build: Callable[[Placement], Trial]
    is_over: Callable[[], bool]
    narrow: frozenset[str]
    refused: dict[str, str] = field(default_factory=dict)  # unit: why it is not quantized
    _trials: dict[str, Trial] = field(default_factory=dict)
    _verdicts: dict[str, bool] = field(default_factory=dict)
    _missed: set[str] = field(default_factory=set)  # digests of builds that missed the limits

    def best(self) -> Trial | None:
        """The trial of the selected placement; ``None`` if no accurate one is built or covers a multiplication."""
        while not self.is_over():
            labellings = self._widest()
            trials = [self._built(labels) for labels in labellings]
            built = [trial for trial in trials if trial.ok]
            if built:
                lost = self._float_units(built)
            else:
                lost = self._refused_units(labellings[0], trials[0]) if trials else {}
            self.refused |= lost
            if not lost:
                if not built or self.keeps_limits(best := min(built, key=self._rank)):
                    break
                self._missed.add(best.placement.digest)
                self._verdicts.clear()
        found = sorted(filter(self._covers, self._trials.values()), key=self._rank)
        return next((trial for trial in found if self.keeps_limits(trial)), None)

    def _covers(self, trial: Trial) -> bool:
        labels = trial.placement.labels
        return trial.ok and self.count(unit for unit, _ in labels) > 0 and self._accepts(dict(labels))

    def _rank(self, trial: Trial) -> tuple[int, int, int]:
        """Most multiplications in narrow kernels first, then the fewest kernels that only convert, then pairs."""
        units = [unit for unit, _ in trial.placement.labels if unit not in self.refused]
        conversions = sum(layer.boundary for layer in trial.layers)
        return -self.count(units), conversions, trial.placement.pairs

    def count(self, labels: Iterable[str]) -> int:
        """The multiplications of some units."""
        return sum(self.multiplications.get(unit, 0) for unit in labels)

    def _widest(self) -> list[Labels]:
        """The accurate labellings with the most multiplications, one for each rule; empty if none has any."""
        found: dict[str, Labels] = {}
        most = 1
        for labels in simple_labels(self.space):
            offered = {unit: label for unit, label in labels.items() if unit not in self.refused}
            if self.count(offered) < most:
                continue
            kept = self._accurate_labels(offered)
            if self.count(kept) >= most:
                found = found if self.count(kept) == most else {}
                most = self.count(kept)
                found.setdefault(self.space.resolve(kept).digest, kept)
        return list(found.values())

    def _accurate_labels(self, labels: Labels) -> Labels:
        """The labels without the units of most noise per multiplication, as few as the limits require."""
        if self._accepts(labels):
            return labels
        order = self._noisiest(labels)
        few, many = 0, len(order)  # without so many units it misses the limits; it meets them
        while many - few > 1:
            middle = (few + many) // 2
            if self._accepts(_without(labels, order[:middle])):
                many = middle
            else:
                few = middle
        kept = _without(labels, order[:many])
        large = sorted(order[:many], key=lambda unit: -self.multiplications.get(unit, 0))
        for unit in large[:RETURNED]:
            more = {**kept, unit: labels[unit]}
            if self.multiplications.get(unit, 0) and self._accepts(more):
                kept = more
        return kept

    def _noisiest(self, labels: Labels) -> list[str]:
        """The units by their noise per multiplication, the noisiest first; without an analysis the last ones first."""
        noise = self.noise()
        if noise is None:
            return list(reversed(labels))
        return sorted(
            labels,
            key=lambda unit: (
                -noise.get((unit, labels[unit]), 0.0) / max(self.multiplications.get(unit, 0), 1)
            ),
        )

    def _accepts(self, labels: Labels) -> bool:
        placement = self.space.resolve(labels)
        if placement.digest in self._missed:
            return False
        if placement.digest not in self._verdicts:
            self._verdicts[placement.digest] = not placement.sites or self.is_accurate(placement)
        return self._verdicts[placement.digest]

    def _built(self, labels: Labels) -> Trial:
        placement = self.space.resolve(labels)
        if placement.digest not in self._trials:
            self._trials[placement.digest] = self.build(placement)
        return self._trials[placement.digest]

    def _refused_units(self, labels: Labels, failed: Trial) -> dict[str, str]:
        """The units that the backend refuses: those that its error names, else those that halving finds."""
        reason = failed.error or ""
        named = [
            unit for unit in labels if any(f"'{node}'" in reason for node in self.space.by_id[unit].nodes)
        ]
        if named and self._built(_without(labels, named)).ok:
            return dict.fromkeys(named, reason)
        kept = self._buildable(list(labels), {}, labels)
        return {unit: reason for unit in labels if unit not in kept}

    def _buildable(self, units: Sequence[str], fixed: Labels, labels: Labels) -> Labels:
        """The ``fixed`` labels and those of as many of these units as are built with them, found by halving."""
        more = {**fixed, **{unit: labels[unit] for unit in units}}
        if not units or self.is_over():
            return fixed
        if self._built(more).ok:
            return more
        if len(units) == 1:
            return fixed
        middle = len(units) // 2
        first = self._buildable(units[:middle], fixed, labels)
        return self._buildable(units[middle:], first, labels)

    def _float_units(self, built: Sequence[Trial]) -> dict[str, str]:
        """The units with multiplications whose kernels are float in each of the builds, as the backend lists them."""
        found: dict[str, str] = {}
        for unit, label in built[0].placement.labels:
            nodes, counted = set(self.space.by_id[unit].nodes), self.multiplications.get(unit, 0)
            if not counted or kind_of(label) == "weight-only" or not self._computes(unit, label):
                continue
            kernels = [[layer for layer in trial.layers if nodes & set(layer.nodes)] for trial in built]
            if all(own and not any(layer.integer for layer in own) for own in kernels):
                found[unit] = "its kernel computes in floating point"
        return found

    def _computes(self, unit: str, label: str) -> bool:
        """Whether a label's format is one that kernels compute in, rather than one of stored weights."""
        return self.space.by_id[unit].form_of(label).choice.activation in self.narrow


def _without(labels: Labels, units: Iterable[str]) -> Labels:
    removed = set(units)
    return {unit: label for unit, label in labels.items() if unit not in removed}
