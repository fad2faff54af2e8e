"""The labels of blocks with which placements do not build, found by halving; compositions leave them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qdqspec.search.base import Proposal, Steps
from qdqspec.search.blocks import FP, Halving, named_in

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def leave_out(search: Attribution) -> Steps[None]:
    """Halve placements that failed until the largest part that builds is known; compositions leave out the rest.

    Blocks that the error names, and those with another label that did not build, are suspected first.
    """
    energy = search.energy
    for failed in search.failed:  # grows with the parts that fail too
        codes = energy.codes_of(failed.placement)
        chosen = [block for block in energy.blocks if codes[block.index] != FP]
        if any(codes[block.index] not in block.codes for block in chosen):
            continue
        units = named_in(failed, search.space)
        suspected = [b for b in chosen if not units.isdisjoint(b.units) or b.index in energy.left_out]
        halving = Halving([block for block in chosen if block not in suspected], suspected)
        while halving.left:
            only = np.full_like(codes, FP)
            for block in halving.tried:
                only[block.index] = codes[block.index]
            part = energy.placed(only)
            yield [Proposal(placement=part, phase="leave out", profile=True, informs=True)]
            halving.learn(builds=all(trial.placement != part for trial in search.failed))
        kept = halving.kept
        energy.leave_out({block.index: int(codes[block.index]) for block in chosen if block not in kept})
