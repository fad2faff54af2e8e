"""Changes of single blocks, the fastest first; a win is the new start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import Proposal
from qdqspec.search.stepwise import Steps

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def flip(search: Attribution) -> Steps[None]:
    """Build those that are expected to save enough of the time and to be accurate enough."""
    energy = search.energy
    while True:
        here = energy.codes_of(search.incumbent.placement)
        promising = next(filter(search.is_promising, energy.flips(here)), None)
        if promising is None:
            return
        yield [Proposal(placement=energy.placed(promising), phase="refine")]
