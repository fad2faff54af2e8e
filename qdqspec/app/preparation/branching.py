"""Chooses the products with factors of channels that a case's model gets before its search."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from qdqspec.accuracy.corrections.equalization import WeightSteps, chosen_equalizations
from qdqspec.accuracy.corrections.problem import MIN_SAMPLES
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.equalize import Equalization, branched, equalized, find_chains
from qdqspec.qdq.space.search_space import SchemeSpace

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared


def scaled_branches(
    prepared: Prepared, model: Model, samples: int = 16, least_gain: float = 0.5
) -> tuple[Equalization, ...]:
    """The branches of a model whose factors reduce the estimated error of the linear operators behind.

    They reduce it by the share ``least_gain``: a product takes time, so that less is not worth it. The estimate uses
    the statistics of channels on ``samples``, every second one held out: more of them show rarer values, and take the
    time of a run each. There are none where equalization is not allowed, data is missing or the operators behind cannot
    be quantized, and none beside scales that the user gives or that a quantized model in ``start_from`` has, which are
    those of the model as it is.
    """
    case, data = prepared.case, prepared.calibration
    if "equalization" not in case.quantize.allowed_corrections or data is None or len(data) < MIN_SAMPLES:
        return ()
    if case.inputs.scales is not None or prepared.start_scales.tensors or not prepared.capabilities.computes:
        return ()
    possible = {change.branch.product: change for change in branched(model) if change.branch is not None}
    readers = {name for change in possible.values() if change.branch for name in change.branch.readers}
    if not possible:
        return ()
    behind = SchemeSpace(model, prepared.capabilities, allowed=readers, rules=case.quantize)
    if not behind.units:
        return ()
    extended = equalized(model, tuple(possible.values()))
    chains = [chain for chain in find_chains(extended) if chain.maker.name in possible]
    weights = frozenset(absorber.weight.tensor for chain in chains for absorber in chain.absorbers)
    try:
        chosen = chosen_equalizations(
            extended,
            chains,
            WeightSteps(steps=63 if prepared.capabilities.reduce_range else 127, per_channel=weights),
            lambda sources: prepared.values_of(extended, sources, islice(data, samples)),
            least_gain,
        )
    except BackendError:
        return ()  # calibration has the same failure, and reports it
    return tuple(replace(possible[chain.maker.name], exponents=change.exponents) for chain, change in chosen)
