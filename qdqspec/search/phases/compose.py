"""The labellings of least time by the profiles so far, always built: times depend on neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.search.base import profiled
from qdqspec.search.stepwise import Steps

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution

SHARES = (0.0, 0.5, 1.0, 2.0)  # weights of conversions: fewer find less where conversions are estimated badly
PATIENCE = 2  # rounds without a won race after which compositions end: each improves the profiles


def compose(search: Attribution) -> Steps[None]:
    """Build a composition with each weight of conversions, learn their profiles, and repeat while one wins."""
    winless = 0
    while winless < PATIENCE:
        composed = filter(None, (search.composed(share) for share in SHARES))
        trials = yield [profiled(each, "compose") for each in composed if search.is_worth_building(each)]
        if not trials:
            return
        winless = 0 if any(trial.incumbent for trial in trials) else winless + 1
