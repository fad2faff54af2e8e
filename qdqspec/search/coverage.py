"""The placement with the most multiplications in narrow formats, within accuracy limits, that a backend builds.

Nothing is timed. Units that the backend refuses are found by halving, as in delta debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdqspec.qdq import SchemeSpace
from qdqspec.search.blocks import Halving, named_in, pure_labels
from qdqspec.search.guide import Guide
from qdqspec.types import Placement, Trial, kind_of


@dataclass(slots=True, kw_only=True)
class CoverageSearch:
    """One search: ``multiplications`` are those of each unit, ``guide`` predicts the accuracy of placements.

    ``keeps_limits`` decides whether a placement meets the limits by the outputs of its model, from which the guide has
    learnt then. ``build`` gives the trial of a placement with its kernels: a unit with one of the ``narrow`` formats
    whose kernel is float counts as float. ``given`` is the placement of a model given quantized, and is built first.
    """

    space: SchemeSpace
    multiplications: Mapping[str, int]
    guide: Guide
    keeps_limits: Callable[[Trial], bool]
    build: Callable[[Placement], Trial]
    is_over: Callable[[], bool]
    narrow: frozenset[str]
    given: Placement | None = None
    refused: dict[str, str] = field(default_factory=dict)  # unit: why it is not quantized
    _trials: dict[str, Trial] = field(default_factory=dict)
    _missed: set[str] = field(default_factory=set)  # digests of builds that missed the limits

    def best(self) -> Trial | None:
        """The trial of the selected placement; ``None`` if no accurate one is built or covers a multiplication."""
        if self.given is not None:
            self._built(self.given)
        while not self.is_over():
            trials = [self._built(placement) for placement in self._widest()]
            built = [trial for trial in trials if trial.ok]
            lost = self._float_units(built) if built else {}
            if trials and not built:
                lost = self._refused_units(trials[0])
            self.refused |= lost
            if not lost:
                if not built or self.keeps_limits(best := min(built, key=self._rank)):
                    break
                self._missed.add(best.placement.digest)
        for trial in sorted(self._trials.values(), key=self._rank):
            covers = trial.ok and self.count(self.narrow_units(trial)) > 0
            if covers and trial.placement.digest not in self._missed and self.keeps_limits(trial):
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

    # ---- builds ---------------------------------------------------------------------------------

    def _widest(self) -> list[Placement]:
        """The accurate placements with the most multiplications, one for each rule; empty if none has any.

        Where nothing is known of the noise of units, a placement that missed the limits loses the one with the fewest
        multiplications.
        """
        found: dict[str, Placement] = {}
        most = 1
        for labels in pure_labels(self.space):
            offered = {unit: label for unit, label in labels.items() if unit not in self.refused}
            if self.count(offered) < most:
                continue
            placement = self.guide.fitted(offered, self.multiplications)
            while placement.digest in self._missed:
                left = dict(placement.labels)
                del left[min(left, key=lambda unit: self.multiplications.get(unit, 0))]
                placement = self.space.resolve(left)
            covered = self.count(unit for unit, _ in placement.labels)
            if covered >= most:
                found = found if covered == most else {}
                most = covered
                found.setdefault(placement.digest, placement)
        return list(found.values())

    def _built(self, placement: Placement) -> Trial:
        """The trial of a placement, which is built once."""
        if placement.digest not in self._trials:
            self._trials[placement.digest] = self.build(placement)
        return self._trials[placement.digest]

    def _refused_units(self, failed: Trial) -> dict[str, str]:
        """The units that the backend refuses, found by halving; those that its error names are suspected first."""
        labels, named = dict(failed.placement.labels), named_in(failed, self.space)
        halving = Halving(
            [unit for unit in labels if unit not in named], [unit for unit in labels if unit in named]
        )
        while halving.left and not self.is_over():
            part = self.space.resolve({unit: labels[unit] for unit in halving.tried})
            halving.learn(builds=self._built(part).ok)
        return dict.fromkeys((unit for unit in labels if unit not in halving.kept), failed.error or "")

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
