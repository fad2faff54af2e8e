"""The labels of blocks with which placements do not build, found by halving; compositions leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqspec.search.base import Proposal, Steps
from qdqspec.search.blocks import FP, Codes, UnitBlock

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def leave_out(search: Attribution) -> Steps[None]:
    """Halve each placement that failed until the largest part that builds is known, as in delta debugging.

    Blocks that the error names, and those with another label that did not build, are suspected first. Zeller and
    Hildebrandt, IEEE Transactions on Software Engineering 28, 2002.
    """
    energy = search.energy
    for failed in search.failed:  # grows with the parts that fail too
        codes, error = energy.codes_of(failed.placement), failed.error or ""
        chosen = [block for block in energy.blocks if codes[block.index] != FP]
        if any(codes[block.index] not in block.codes for block in chosen):
            continue
        nodes = {
            block.index: [n for unit in block.units for n in search.space.by_id[unit].nodes]
            for block in chosen
        }
        named = {index for index, own in nodes.items() if any(f"'{node}'" in error for node in own)}
        is_suspect = [block.index in named or block.index in energy.left_out for block in chosen]
        kept: list[UnitBlock] = []
        for suspected in (False, True):
            group = [block for block, is_one in zip(chosen, is_suspect, strict=True) if is_one == suspected]
            kept = yield from _grown(search, codes, kept, group)
        energy.leave_out({block.index: int(codes[block.index]) for block in chosen if block not in kept})


def _grown(
    search: Attribution, codes: Codes, kept: list[UnitBlock], more: Sequence[UnitBlock]
) -> Steps[list[UnitBlock]]:
    """The blocks kept so far, and as many of these as build together with them under their codes."""
    if not more:
        return kept
    together = [*kept, *more]
    only = np.full_like(codes, FP)
    for block in together:
        only[block.index] = codes[block.index]
    placement = search.energy.placed(only)
    yield [
        Proposal(placement=placement, phase="leave out", profile=True, informs=True)
    ]  # unless it was built before
    if all(trial.placement != placement for trial in search.failed):
        return together
    if len(more) == 1:
        return kept
    middle = len(more) // 2
    kept = yield from _grown(search, codes, kept, more[:middle])
    return (yield from _grown(search, codes, kept, more[middle:]))
