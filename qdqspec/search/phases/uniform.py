"""Placements by one rule: everything quantized, one label everywhere, linear operators only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import Proposal, Steps
from qdqspec.search.blocks import pure_labels

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def uniform(search: Attribution, *, least_db: float = -100.0) -> Steps[None]:
    """Build placements by one rule: everything quantized, one label everywhere, linear operators only.

    Neighbours agree as they will in the final placement, so that the time of each operator under each label is
    measured with the least bias. They are built for these times, even if they miss a binding limit and cannot win.
    Under a limit, labels that alone exceed it are left out, and placements below ``least_db`` are not built: outputs of
    another shape count as -200 dB.
    """
    if any(trial.phase not in ("pure", "seed") for trial in search.trials):
        return  # each other build has told more than these would
    labels = map(search.guide.without_loud, pure_labels(search.space))
    placements = [each for each in map(search.space.resolve, labels) if each.sites]
    if placements:
        search.guide.keeps_metric(placements[0])  # shows whether the limit of the metric is binding
    if search.guide.is_limited:
        placements = [each for each in placements if search.guide.admits(each, least_db)]
    yield [Proposal(placement=each, phase="pure", profile=True, informs=True) for each in placements]
