"""What another program will measure: 95 % prediction intervals of ratios. Pure.

A confidence interval (`qdqspec.measurement.stats`) answers whether a gain is proved by this measurement. A figure that
is measured again, with other builds, in another program, at another time, has noise of its own, which a confidence
interval does not include. The intervals that are reported do (docs/decisions/0045).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.measurement.stats import (
    Variance,
    build_levels,
    student_half_width,
    variance_of_builds,
)
from qdqspec.types import Interval

# The standard deviation of a log ratio between times, and its degrees of freedom, before anything is known of a
# machine: fitted to 132 claims beside independent figures, on three machines (docs/decisions/0045).
USUAL_TIMES = 0.008, 6


def predicted_ratios(
    steady: Mapping[str, Sequence[Sequence[float]]],
    first: Mapping[str, Sequence[Sequence[float]]],
    base: str,
    devices: int = 1,
    times: tuple[float, int] = (0.0, 0),
) -> dict[str, Interval]:
    """Every role's time over the base role's, as another program measures it: the estimate and its prediction interval.

    The arguments are those of `qdqspec.measurement.stats.enclosed_ratios`. The other program has as many builds as this
    measurement, at another time, in one of the two conditions of the caches. So the interval has the variance between
    builds of both measurements, twice that between times (`variance_between_times`), and on each side half of what the
    conditions differ by.
    """
    conditions = [build_levels(steady), *([build_levels(first)] if first else [])]
    middle = {role: np.mean([levels[role] for levels in conditions], axis=0) for role in steady}
    theirs = float(np.mean([variance_of_builds(levels, devices)[0] for levels in conditions]))
    ours, freedom = variance_of_builds(middle, devices)
    between, looks = variance_between_times(times)
    found = {}
    for role, own in middle.items():
        if role == base:
            found[role] = Interval(median=1, low=1, high=1)
            continue
        share = 1 / len(own) + 1 / len(middle[base])
        half = student_half_width((share * (ours + theirs), freedom), (2 * between, looks))
        spread = _spread(conditions[0], conditions[1], role, base, devices) if first else 0.0
        center, reach = float(own.mean() - middle[base].mean()), spread + half
        found[role] = Interval(median=center, low=center - reach, high=center + reach).exponential
    return found


def variance_between_times(times: tuple[float, int]) -> Variance:
    """The variance of a log ratio between times: what a search measured of it, but not less than is usual.

    Where its looks vary more than `USUAL_TIMES`, theirs. Where they vary less, the mean weighted by degrees of freedom
    (Smyth 2004): few looks, which happen to agree, do not prove a steady machine, and many do. The degrees of freedom
    add up: what is usual is known before the first look.
    """
    (deviation, freedom), (usual, others) = times, USUAL_TIMES
    together = freedom + others
    if deviation > usual:
        return deviation**2, together
    return (freedom * deviation**2 + others * usual**2) / together, together


def _spread(
    steady: Mapping[str, Floats], first: Mapping[str, Floats], role: str, base: str, devices: int
) -> float:
    """Half of what the log ratio differs by between the conditions, less what noise makes of no difference."""
    halves = {name: (first[name] - steady[name]) / 2 for name in steady}
    variance = variance_of_builds(halves, devices)[0] * (1 / len(halves[role]) + 1 / len(halves[base]))
    difference = float(halves[role].mean() - halves[base].mean())
    return math.sqrt(max(0.0, difference**2 - variance))
