"""Changes of single blocks of the incumbent, where compositions failed, or for a search that goes on to its limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qdqspec.search.base import Steps, profiled

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def flip(search: Attribution) -> Steps[None]:
    """Build the fastest change that is new, saves enough and is expected to meet the limits; a win is the new start.

    A composition leaves no change that saves time, unless it did not build or missed a limit. Where nothing needs to be
    saved, each change is built.
    """
    energy, least = search.energy, search.least_gain
    while True:
        start = energy.codes_of(search.incumbent.placement)
        most_ms = -least * energy.predict(start) if least else math.inf
        for added_ms, block, code in energy.changes(start):
            codes = start.copy()
            codes[block] = code
            if added_ms <= most_ms and search.is_worth_building(placement := energy.placed(codes)):
                yield [profiled(placement, "refine")]
                break
        else:
            return
