"""Placements by one rule: everything quantized, one label everywhere, linear operators only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import Proposal, Steps
from qdqspec.search.blocks import pure_labels

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def uniform(search: Attribution, *, least_db: float = -100.0, predictions: int = 4) -> Steps[None]:
    """Build placements by one rule: everything quantized, one label everywhere, linear operators only.

    Neighbours agree as they will in the final placement, so that the time of each operator under each label is
    measured with the least bias. They are built for these times, even if they miss a binding limit and cannot win.
    Under a limit, everything quantized as far as the limit allows is the first, so that slow models have a winner
    before the time is over: more ``predictions`` leave less of the limit unused, and take longer. Placements below
    ``least_db`` are not built: outputs of another shape count as -200 dB.
    """
    if any(trial.phase not in ("pure", "seed") for trial in search.trials):
        return  # each other build has told more than these would
    guide = search.guide
    placements = [each for each in map(search.space.resolve, pure_labels(search.space)) if each.sites]
    if placements:
        guide.keeps_metric(placements[0])  # shows whether the limit of the metric is binding
    if guide.is_limited:
        yield search.fitted_everything(predictions=predictions)
    for placement in placements:
        if not guide.is_limited or guide.admits(placement, least_db):
            yield [Proposal(placement=placement, phase="pure", profile=True, informs=True)]
