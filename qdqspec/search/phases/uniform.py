"""Placements by one rule: everything quantized, one label everywhere, linear operators only.

Neighbours agree as they will in the final placement, so that the time of each operator under each label is measured
with the least bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import profiled
from qdqspec.search.labels import pure_labels
from qdqspec.search.stepwise import Steps

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def uniform(search: Attribution, *, least_db: float = -100.0) -> Steps[None]:
    """Build all; where a limit is binding only everything quantized, for its profile, although it cannot win.

    Outputs of another shape count as -200 dB: below ``least_db`` a placement does not run as the model does.
    """
    if any(trial.phase not in ("pure", "seed") for trial in search.trials):
        return  # each other build has told more than these would
    space, guide = search.space, search.guide
    if guide.is_limited:
        everything = (space.resolve(space.everything(choice.name)) for choice in space.choices)
        placements = [each for each in everything if guide.admits(each, least_db)]
    else:
        placements = [space.resolve(labels) for labels in pure_labels(space)]
    yield [profiled(placement, "pure") for placement in placements if placement.sites]
