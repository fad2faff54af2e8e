"""Chooses the products with factors of channels that a case's model gets before its search.

The factors are those with the least estimated error of the linear operators behind. They are taken if these operators,
quantized, change the outputs less with them than without, in a rehearsal on other calibration samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from qdqspec.corrections.equalization import LARGE_GAIN, WeightSteps, chosen_equalizations
from qdqspec.corrections.judge import MIN_SAMPLES, Errors, Judge
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.parity.data import Dataset
from qdqspec.placement.edit.equalize import Equalization, branched, equalized, find_chains
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import reference_runtime
from qdqspec.quantize.ranges import TensorRange
from qdqspec.rehearsal import RehearsalRefusedError
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.preparation.prepare import Prepared

SAMPLES = 16  # for the statistics of channels, every second one held out
JUDGED = 4  # samples behind these on which the outputs are compared, if there are as many
LEAST_GAIN_DB = 1.0  # of the outputs, without any single sample: a product takes time


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledBranches:
    """The products of a model, and the SQNR with the linear operators behind them quantized, without and with them."""

    changes: tuple[Equalization, ...] = ()
    before_db: float = 0.0
    after_db: float = 0.0


def scaled_branches(prepared: Prepared, model: Model) -> ScaledBranches:
    """The branches of a model whose factors halve the estimated error of the linear operators behind, and more.

    There are none unless the error of the outputs is smaller with all of them together. There are none where
    equalization is not allowed or data is missing, and none beside scales that the user gives or that a quantized
    model in ``start_from`` has, which are those of the model as it is.
    """
    rules, inputs, nothing = prepared.case.quantize, prepared.case.inputs, ScaledBranches()
    data = prepared.calibration
    if "equalization" not in rules.allowed_corrections or data is None or len(data) < MIN_SAMPLES:
        return nothing
    if inputs.scales is not None or prepared.start_scales.tensors or not prepared.capabilities.computes:
        return nothing
    try:
        changes = _estimated(prepared, model, data)
        return _judged(prepared, model, changes, data) if changes else nothing
    except (BackendError, RehearsalRefusedError):
        return nothing  # calibration has the same failure, and reports it; without a rehearsal no product is judged


def _estimated(prepared: Prepared, model: Model, data: Dataset) -> tuple[Equalization, ...]:
    """The branches with the factors that reduce the estimated error most."""
    possible = {change.branch.product: change for change in branched(model) if change.branch is not None}
    if not possible:
        return ()
    extended = equalized(model, tuple(possible.values()))
    chains = [chain for chain in find_chains(extended) if chain.maker.name in possible]
    steps = 63 if prepared.capabilities.reduce_range else 127
    weights = frozenset(absorber.weight.tensor for chain in chains for absorber in chain.absorbers)
    chosen = chosen_equalizations(
        extended,
        chains,
        WeightSteps(steps=steps, per_channel=weights),
        lambda sources: prepared.values_of(extended, sources, islice(data, SAMPLES)),
        LARGE_GAIN,
    )
    return tuple(replace(possible[chain.maker.name], exponents=change.exponents) for chain, change in chosen)


def _judged(
    prepared: Prepared, model: Model, changes: tuple[Equalization, ...], data: Dataset
) -> ScaledBranches:
    """The changes if the outputs have less error with them; the operators behind are quantized in both models."""
    scaled = equalized(model, changes)
    readers = {name for change in changes if change.branch for name in change.branch.readers}
    tried = [_Quantized.of(prepared, each, readers) for each in (model, scaled)]
    tensors = {site.tensor for one in tried for site in one.placement.sites if not site.weight}
    # the scaled model has the tensors of the other one too, with the same values
    ranges = prepared.tensor_ranges(scaled, tensors, lambda: islice(data, 0, SAMPLES, 2))
    before, after = (one.errors(prepared, ranges, data) for one in tried)
    if after.gains_without_db(before).min() < LEAST_GAIN_DB:
        return ScaledBranches()
    return ScaledBranches(changes=changes, before_db=before.total_db, after_db=after.total_db)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantized:
    """A model in which only some linear operators are quantized."""

    space: SchemeSpace
    placement: Placement

    @classmethod
    def of(cls, prepared: Prepared, model: Model, operators: Collection[str]) -> _Quantized:
        space = SchemeSpace(model, prepared.capabilities, allowed=operators, rules=prepared.case.quantize)
        labels = {unit.id: "in-only" if "in-only" in unit.labels else unit.full for unit in space.units}
        return cls(space=space, placement=space.resolve(labels))

    def errors(self, prepared: Prepared, ranges: Mapping[str, TensorRange], data: Dataset) -> Errors:
        """The error at the guiding tensors, on samples that the factors were not chosen on, if there are enough."""
        model, first = self.space.model, SAMPLES if len(data) >= SAMPLES + MIN_SAMPLES else 0
        with ExitStack() as opened:
            judge = Judge(
                model=model,
                placements=(self.placement,),
                feeds=lambda: islice(data, first, None),
                runtime=reference_runtime(opened, prepared.options, prepared.backend),
                samples=JUDGED,
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            opened.callback(judge.close)
            (errors,) = judge.errors(prepared.quantizer(self.space, ranges))
            return errors
