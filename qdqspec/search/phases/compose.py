"""The labellings of least time by the profiles so far, which each build improves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import profiled
from qdqspec.search.stepwise import Steps
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution

SHARES = (
    0.0,
    0.5,
    1.0,
    2.0,
)  # weights of conversions: more help where the times of conversions are estimated badly


def compose(search: Attribution) -> Steps[None]:
    """Build a composition with each weight of conversions, learn their profiles, and repeat while one saves enough."""
    while True:
        composed = filter(None, (search.composed(share) for share in SHARES))
        proposed = [
            each for each in composed if _saves_enough(search, each) and search.is_worth_building(each)
        ]
        trials = yield [profiled(each, "compose") for each in proposed]
        if not trials:
            return


def _saves_enough(search: Attribution, placement: Placement) -> bool:
    """Whether the energy of a composition is below that of the incumbent by the share `Attribution.least_gain`."""
    energy, best = search.energy, search.incumbent.placement
    ours, theirs = (energy.predict(energy.codes_of(each)) for each in (placement, best))
    return ours <= (1 - search.least_gain) * theirs
