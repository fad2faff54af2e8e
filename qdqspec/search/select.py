"""Selection of the placements to confirm, and of the final one. Pure.

A placement that is not proved better than the reference is never selected: an unchanged model is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.types import GIVEN, NOT_CANDIDATES, Placement, RatioTest, Trial
from qdqspec.units import percent_text

# largest number of race winners, and of fastest candidates, whose accuracy is measured on all data
EXAMINED = 6
TIE = 0.01  # of the best placement's time, that a simpler one within its interval may take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected placement, the role under which it was confirmed, and the reason."""

    role: str
    placement: Placement
    unchanged: bool
    reason: str


def finalists(
    trials: Sequence[Trial],
    everything: Placement,
    *,
    fits: Callable[[Trial], bool] = lambda _: True,
    admits: Callable[[Placement], bool] = lambda _: True,
) -> dict[str, Placement]:
    """The roles to confirm: reference, winner, runner-up, everything quantized, and the model as given if it ran.

    Winner and runner-up are accurate enough: ``fits`` checks a trial's known values, ``admits`` measures a placement
    and is called for a few, the last race winner and the fastest first, none slower than the reference. Everything
    quantized is confirmed for comparison, even if the search ended before building it, unless it failed. So is a
    quantized model as given.
    """
    good = [t for t in trials if t.ok and t.phase not in NOT_CANDIDATES]
    champions = [t for t in trials if t.ok and t.incumbent and (not t.placement.sites or fits(t))]
    faster = [t for t in good if t.ratio is not None and t.ratio < 1 and t.placement.sites and fits(t)]
    ranked = sorted(faster, key=lambda t: t.ratio or 0.0)
    roles = {"reference": trials[0].placement}
    last = (t.placement for t in champions[: -EXAMINED - 1 : -1])
    roles["winner"] = next((p for p in last if not p.sites or admits(p)), roles["reference"])
    others = [t.placement for t in ranked if t.placement != roles["winner"]]
    runner_up = next(filter(admits, others[:EXAMINED]), None)
    if runner_up is not None:
        roles["runner-up"] = runner_up
    failed = {t.placement.digest for t in trials if not t.ok and not t.subgraph}
    if everything.sites and everything.digest not in failed:
        roles["everything"] = everything
    given = next((trial.placement for trial in trials if trial.ok and trial.placement.given), None)
    if given is not None:
        roles[GIVEN] = given
    return roles


def raw_winner(trials: Sequence[Trial]) -> Placement | None:
    """The combination of all wins in parts of the model, for strategies that build it (phase ``raw``)."""
    return next((t.placement for t in reversed(trials) if t.ok and t.phase == "raw"), None)


def reaches(trial: Trial, min_sqnr_db: float | None, min_accuracy: float | None = None) -> bool:
    """Whether a trial is accurate enough. A task metric is known of few trials and is checked only for these."""
    if min_accuracy is not None and trial.accuracy is not None and trial.accuracy < min_accuracy:
        return not trial.placement.sites
    return min_sqnr_db is None or (trial.sqnr_db is not None and trial.sqnr_db >= min_sqnr_db)


def front_of(trials: Sequence[Trial], limit: int) -> list[Trial]:
    """The trials that no other beats in both latency and accuracy, fastest first.

    More than ``limit`` trials are thinned out evenly, keeping both ends.
    """
    known = [t for t in trials if t.ok and t.ratio is not None and t.sqnr_db is not None]
    front: list[Trial] = []
    for trial in sorted(known, key=lambda t: (t.ratio or 0.0, -(t.sqnr_db or 0.0))):
        if not front or (trial.sqnr_db or 0.0) > (front[-1].sqnr_db or 0.0):
            front.append(trial)
    if len(front) <= limit:
        return front
    return [front[round(i * (len(front) - 1) / (limit - 1))] for i in range(limit)]


def choose(
    roles: Mapping[str, Placement],
    ratios: Mapping[str, RatioTest],
    *,
    barred: Collection[str] = (),
    min_gain: float = 0.0,
    shortfall: str = "",
    ended_by: str = "",
    plain: RatioTest | None = None,
) -> Selection:
    """The simplest placement inside the best interval, if its gain is proved.

    Simplest means fewest activation pairs. It is at most `TIE` slower than the best by their medians: a wide interval
    holds slower ones. Proved means that the upper end of the 95 % interval of its mean time over the reference's is
    below ``1 - min_gain``, and below 1 in both conditions of the caches. ``barred`` are digests of placements that are
    not accurate enough. Parts of the reason of an unchanged model are ``shortfall``, how far faster candidates missed
    the accuracy limit, and ``ended_by``, the limit that ended the search before it was done. If candidates were
    converted from another float type, ``plain`` is the ratio of the converted model without pairs: then no placement is
    selected that is not faster than that one too.
    """
    reference = roles["reference"]
    proved = {
        role: ratio.mean
        for role, ratio in ratios.items()
        if ratio.proves(min_gain) and roles[role].digest not in (reference.digest, *barred)
    }
    if not proved:
        ended = f"the search ended at {ended_by}, before it was done" if ended_by else ""
        rivals = _rivals(roles, ratios, barred, min_gain) or ([] if shortfall else [_NOTHING])
        reason = "; ".join(part for part in (shortfall, *rivals, ended, _converted(plain)) if part)
        return Selection(role="reference", placement=reference, unchanged=True, reason=reason)
    best = min(proved, key=lambda role: proved[role].median)
    most = min(proved[best].high, (1 + TIE) * proved[best].median)
    if plain is not None and plain.mean.median <= most:
        gain = f"{best} took {proved[best].median:.3f} of the reference's time"
        reason = f"{gain}, and {_converted(plain)}: its pairs do not make it faster"
        return Selection(role="reference", placement=reference, unchanged=True, reason=reason)
    inside = [role for role in proved if proved[role].median <= most]
    role = min(inside, key=lambda name: (roles[name].pairs, proved[name].median))
    ratio = proved[role]
    reason = f"{_named(roles, role)}: {ratio.median:.3f} of the reference's time [{ratio.low:.3f}, {ratio.high:.3f}]"
    if role != best:
        reason += f"; as fast as {best} within its interval, with fewer Q/DQ pairs"
    reason = "; ".join(filter(None, (reason, _converted(plain))))
    return Selection(role=role, placement=roles[role], unchanged=False, reason=reason)


def _converted(plain: RatioTest | None) -> str:
    """The time of the converted model without pairs; empty if candidates are not converted."""
    if plain is None:
        return ""
    ratio = plain.mean
    return (
        f"converted to float32 without pairs it took {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    )


_NOTHING = "no placement was faster than the reference in any race"


def _named(roles: Mapping[str, Placement], role: str) -> str:
    """A role in a reason."""
    return "the given model's own placement" if roles[role].given else role


def _rivals(
    roles: Mapping[str, Placement],
    ratios: Mapping[str, RatioTest],
    barred: Collection[str],
    min_gain: float,
) -> list[str]:
    """The reason why the fastest confirmed placement is not selected, and the fastest accurate one."""
    reference = roles["reference"].digest
    rivals = sorted(
        (role for role in ratios if roles[role].digest != reference),
        key=lambda role: ratios[role].mean.median,
    )
    accurate = [role for role in rivals if roles[role].digest not in barred]
    reasons = []
    for role in dict.fromkeys((*rivals[:1], *accurate[:1])):
        ratio = ratios[role].mean
        name, reach = _named(roles, role), f"[{ratio.low:.3f}, {ratio.high:.3f}]"
        took = f"{name} took {ratio.median:.3f} of the reference's time {reach}"
        if role not in accurate:
            took += ", but is not accurate enough"
        elif ratio.high < 1 - min_gain:
            slowest = ratios[role].enclosing.high
            took += (
                f", and up to {slowest:.3f} in one of the conditions of the caches: not proved faster in both"
            )
        elif ratio.median < 1:
            gain, low, high = (percent_text(1 - value) for value in (ratio.median, ratio.high, ratio.low))
            asked = f"the {100 * min_gain:g} % of tune.min_gain" if min_gain else "a gain"
            took += f": a gain of {gain} (95 %: {low} to {high}) does not prove {asked}"
        reasons.append(took)
    return reasons
