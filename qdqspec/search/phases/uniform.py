"""Placements by one rule: everything quantized, one label everywhere, linear operators only.

Neighbours agree as they will in the final placement, so that the time of each operator under each label is measured
with the least bias. Under a limit the units with the most noise for their time are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import profiled
from qdqspec.search.labels import pure_labels
from qdqspec.search.stepwise import Steps

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def uniform(search: Attribution) -> Steps[None]:
    """Build all; under a limit one after the other, as each build corrects the predictions for the next."""
    if any(trial.phase not in ("pure", "seed") for trial in search.trials):
        return  # each other build has told more than these would
    made = map(search.guide.fitted, pure_labels(search.space))
    proposals = (
        profiled(placement, "pure")
        for placement in made
        if placement.sites and search.is_worth_building(placement)
    )
    if not search.guide.is_limited:
        yield list(proposals)
        return
    for proposal in proposals:
        yield [proposal]
