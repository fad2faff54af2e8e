"""The labellings of least time by the profiles so far, which each build improves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqspec.search.base import Steps, profiled
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def compose(search: Attribution, *, shares: Sequence[float] = (0.0, 0.5, 1.0, 2.0)) -> Steps[None]:
    """Build labellings of least time, learn their profiles, and repeat while one saves enough.

    One labelling is made with each weight of conversions. ``shares`` are these weights: more help where the times of
    conversions are estimated badly.
    """
    energy, guide = search.energy, search.guide

    def composed(share: float) -> Placement | None:
        """The placement of least energy that is expected to meet the limits; ``None`` if there is none."""
        if energy.noise is None or guide.limits.aim_db is None:
            return energy.placed(energy.minimize(share))
        return guide.within_limits(lambda most: energy.placed(energy.within(most, share)))

    while True:
        most_ms = (1 - search.least_gain) * energy.predict(energy.codes_of(search.incumbent.placement))
        proposed = [
            placement
            for placement in filter(None, map(composed, shares))
            if energy.predict(energy.codes_of(placement)) <= most_ms and search.is_worth_building(placement)
        ]
        trials = yield [profiled(placement, "compose") for placement in proposed]
        if not trials:
            return
