"""The placement with the most multiplications in narrow formats, within accuracy limits, that a backend builds.

Nothing is timed. Which units are quantized is a 0/1 knapsack problem, of multiplications and of the noise of each unit
alone, solved by dynamic programming: HiGHS, in `scipy.optimize.milp`, prints on the terminal whatever its options are.
Units that the backend refuses are found by halving, as in delta debugging (Zeller and Hildebrandt, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from qdqspec.qdq import SchemeSpace
from qdqspec.search.blocks import Labels, simple_labels
from qdqspec.types import LabelNoise, Placement, Trial, kind_of


@dataclass(slots=True, kw_only=True)
class CoverageSearch:
    """One search: ``multiplications`` are those of each unit, ``noise`` is that of each (unit, label) alone.

    ``is_accurate`` decides by a rehearsal whether a placement meets the limits, ``keeps_limits`` by the outputs of its
    model. ``build`` gives the trial of a placement with its kernels: a unit with one of the ``narrow`` formats whose
    kernel is float counts as float. ``given`` is the placement of a model given quantized, and is built first.
    """

    space: SchemeSpace
    multiplications: Mapping[str, int]
    noise: Callable[[], LabelNoise | None]
    is_accurate: Callable[[Placement], bool]
    keeps_limits: Callable[[Trial], bool]
    build: Callable[[Placement], Trial]
    is_over: Callable[[], bool]
    narrow: frozenset[str]
    given: Placement | None = None
    refused: dict[str, str] = field(default_factory=dict)  # unit: why it is not quantized
    _trials: dict[str, Trial] = field(default_factory=dict)
    _verdicts: dict[str, bool] = field(default_factory=dict)
    _missed: set[str] = field(default_factory=set)  # digests of builds that missed the limits

    def best(self) -> Trial | None:
        """The trial of the selected placement; ``None`` if no accurate one is built or covers a multiplication."""
        if self.given is not None:
            self._built(self.given)
        while not self.is_over():
            labellings = self._widest()
            trials = [self._built(labels) for labels in labellings]
            built = [trial for trial in trials if trial.ok]
            lost = self._float_units(built) if built else {}
            if trials and not built:
                lost = self._refused_units(labellings[0], trials[0])
            self.refused |= lost
            if not lost:
                if not built or self.keeps_limits(best := min(built, key=self._rank)):
                    break
                self._missed.add(best.placement.digest)
                self._verdicts.clear()
        for trial in sorted(self._trials.values(), key=self._rank):
            covers = trial.ok and self.count(self.narrow_units(trial)) > 0
            accepted = covers and (trial.placement.given or self._accepts(dict(trial.placement.labels)))
            if accepted and self.keeps_limits(trial):
                return trial
        return None

    def count(self, units: Iterable[str]) -> int:
        """The multiplications of some units."""
        return sum(self.multiplications.get(unit, 0) for unit in units)

    def narrow_units(self, trial: Trial) -> list[str]:
        """The units that a build computes in narrow formats: by its labels, of the given model by its kernels."""
        if not trial.placement.given:
            return [unit for unit, _ in trial.placement.labels if unit not in self.refused]
        nodes = {node for layer in trial.layers if layer.integer for node in layer.nodes}
        return [unit.id for unit in self.space.units if not nodes.isdisjoint(unit.nodes)]

    def _rank(self, trial: Trial) -> tuple[int, int, int]:
        """Most multiplications in narrow kernels first, then the fewest kernels that only convert, then pairs."""
        conversions = sum(layer.boundary for layer in trial.layers)
        return -self.count(self.narrow_units(trial)), conversions, trial.placement.pairs

    # ---- accuracy -------------------------------------------------------------------------------

    def _widest(self, *, least_db: float = -10.0, most_db: float = 80.0, steps: int = 10) -> list[Labels]:
        """The accurate labellings with the most multiplications, one for each rule; empty if none has any.

        Where all labels of a rule miss the limits, the largest allowance of summed noise with which the placement is
        accurate is found by bisection between SQNRs of ``least_db`` and ``most_db``. Fewer ``steps`` take fewer
        rehearsals, and leave more of the limit unused.
        """
        found: dict[str, Labels] = {}
        most = 1
        for labels in simple_labels(self.space):
            kept = offered = _without(labels, self.refused)
            if self.count(offered) < most:
                continue
            if not self._accepts(offered):
                kept, noise, equal = {}, self.noise(), 1 / len(offered)
                powers = {
                    unit: noise.get((unit, at), 0.0) if noise else equal for unit, at in offered.items()
                }
                below, above = least_db, most_db
                for _ in range(steps):
                    middle = (below + above) / 2
                    fitting = {unit: offered[unit] for unit in self._fitting(powers, 10 ** (-middle / 10))}
                    if self._accepts(fitting):
                        kept, above = fitting, middle
                    else:
                        below = middle
            if self.count(kept) >= most:
                found = found if self.count(kept) == most else {}
                most = self.count(kept)
                found.setdefault(self.space.resolve(kept).digest, kept)
        return list(found.values())

    def _fitting(self, powers: Mapping[str, float], allowed: float, *, steps: int = 10_000) -> list[str]:
        """The units with the most multiplications whose noise together is at most ``allowed``: a knapsack problem.

        Noise is rounded up to ``steps`` parts of what is allowed. Fewer take less time, and leave more of it unused.
        """
        units = [unit for unit, power in powers.items() if power <= allowed]
        costs = [math.ceil(powers[unit] / allowed * steps) for unit in units]
        most = np.zeros(steps + 1, np.int64)  # multiplications of the units so far, by their cost
        taken = np.zeros((len(units), steps + 1), bool)
        for unit, cost, row in zip(units, costs, taken, strict=True):
            more = most[: steps + 1 - cost] + max(self.multiplications.get(unit, 0), 1)
            row[cost:] = more > most[cost:]
            most[cost:] = np.maximum(most[cost:], more)
        chosen, left = list[str](), steps
        for unit, cost, row in reversed(list(zip(units, costs, taken, strict=True))):
            if row[left]:
                chosen.insert(0, unit)
                left -= cost
        return chosen

    def _accepts(self, labels: Labels) -> bool:
        placement = self.space.resolve(labels)
        if placement.digest in self._missed:
            return False
        if placement.digest not in self._verdicts:
            self._verdicts[placement.digest] = not placement.sites or self.is_accurate(placement)
        return self._verdicts[placement.digest]

    # ---- builds ---------------------------------------------------------------------------------

    def _built(self, labels: Labels | Placement) -> Trial:
        """The trial of a placement, which is built once."""
        placement = labels if isinstance(labels, Placement) else self.space.resolve(labels)
        if placement.digest not in self._trials:
            self._trials[placement.digest] = self.build(placement)
        return self._trials[placement.digest]

    def _refused_units(self, labels: Labels, failed: Trial) -> dict[str, str]:
        """The units that the backend refuses: those that its error names, else those that halving finds."""
        reason = failed.error or ""
        nodes = {unit: self.space.by_id[unit].nodes for unit in labels}
        named = [unit for unit, own in nodes.items() if any(f"'{node}'" in reason for node in own)]
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
            computes = self.space.by_id[unit].form_of(label).choice.activation in self.narrow
            is_counted = bool(self.multiplications.get(unit)) and unit not in self.refused
            if not is_counted or kind_of(label) == "weight-only" or not computes:
                continue
            nodes = set(self.space.by_id[unit].nodes)
            kernels = [[layer.integer for layer in t.layers if nodes & set(layer.nodes)] for t in built]
            if all(own and not any(own) for own in kernels):
                found[unit] = "its kernel computes in floating point"
        return found


def _without(labels: Labels, units: Iterable[str]) -> Labels:
    removed = set(units)
    return {unit: label for unit, label in labels.items() if unit not in removed}
