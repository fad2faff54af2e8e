"""Changes of single blocks, the fastest first; a win is the new start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import Proposal, Steps
from qdqspec.search.blocks import Codes
from qdqspec.search.energy import Posterior
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def flip(search: Attribution) -> Steps[None]:
    """Build those that are new, and are expected to save enough of the time and to be accurate enough."""
    energy = search.energy
    while True:
        best = search.incumbent
        # eps is two standard deviations of a build; a ratio has the variance of two builds
        belief = Posterior(energy, search.eps / 2**0.5, search.trials)
        start = energy.codes_of(best.placement)
        for _, block, code in energy.changes(start):
            codes = start.copy()
            codes[block] = code
            placement = energy.placed(codes)
            if (
                search.is_new(placement)
                and belief.expected_gain(codes, best.ratio or 1.0) >= search.least_gain
                and _is_accurate(search, codes, placement)
                and search.guide.keeps_metric(placement)
            ):
                yield [Proposal(placement=placement, phase="refine")]
                break
        else:
            return


def _is_accurate(search: Attribution, codes: Codes, placement: Placement, noise_slack: float = 1.25) -> bool:
    """Whether a flip of the incumbent is expected to meet the limit, by its noise, and else by a rehearsal.

    ``noise_slack`` is the factor by which the sum of noise may exceed what is allowed before a flip is not even
    rehearsed: more has more rehearsals, and finds flips whose noise does not add up.
    """
    energy, guide, least = search.energy, search.guide, search.guide.limits.aim_db
    if least is None or not search.is_exceeded:
        return True
    here = search.incumbent.placement
    noise, sqnr_db = energy.noise_of(energy.codes_of(here)), guide.predicted_db(here)
    # noise and SQNR of the incumbent tell how noise adds up near it
    allowed = noise * 10 ** ((sqnr_db - least) / 10) if sqnr_db and noise else guide.allowed(least)
    return energy.noise_of(codes) <= noise_slack * allowed and guide.admits(placement, least)
