"""The labellings of least energy at rising prices of noise, for a front of time and accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qdqspec.search.base import Steps, profiled
from qdqspec.search.blocks import FP

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def front(search: Attribution, *, prices: int = 12) -> Steps[None]:
    """Build the labellings of least energy at rising prices of noise, once: the convex part of a front.

    Only for an objective of time and accuracy. More ``prices`` give a front with more points, and more builds.
    """
    energy = search.energy
    if (
        not search.setup.pareto
        or energy.noise is None
        or any(each.phase == "trade" for each in search.trials)
    ):
        return
    largest = float(energy.noise.max(axis=1, initial=0.0).sum())
    rate = float(energy.times[:, FP].sum()) / max(largest, 1e-12)
    codes = [energy.minimize(price=rate * 10**each) for each in np.linspace(-2, 4, prices)]
    yield [profiled(energy.placed(each), "trade") for each in codes]
