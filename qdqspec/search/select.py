"""Selection of the placements to confirm, and of the final one. Pure.

A placement that is not proved better than the reference is never selected: an unchanged model is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.types import GIVEN, NOT_CANDIDATES, Interval, Placement, RatioTest, Trial
from qdqspec.units import interval_text, ratio_text, share_text

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


def is_candidate(trial: Trial) -> bool:
    """Whether a trial timed a quantized candidate, a whole model with its final numbers."""
    return (
        trial.ok and bool(trial.placement.sites) and not trial.subgraph and trial.phase not in NOT_CANDIDATES
    )


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
    slower: str = "",
    plain: RatioTest | None = None,
) -> Selection:
    """The simplest placement inside the best interval, if its gain is proved.

    Simplest means fewest activation pairs. It is at most `TIE` slower than the best by their medians: a wide interval
    holds slower ones. Proved means that the upper end of the 95 % interval of its mean time over the reference's is
    below ``1 - min_gain``, and below 1 in both conditions of the caches. ``barred`` are digests of placements that are
    not accurate enough. Parts of the reason of an unchanged model are ``shortfall``, how far faster candidates missed
    the accuracy limit, and ``slower``, that all accurate candidates are slower than the reference. If candidates were
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
        rivals = {role: each for role, each in ratios.items() if roles[role].digest != reference.digest}
        accurate = {role: each for role, each in rivals.items() if roles[role].digest not in barred}
        inaccurate = {role: each for role, each in rivals.items() if role not in accurate}
        is_close = any(ratio.mean.median < 1 for ratio in accurate.values())
        reasons = (
            shortfall or _inaccurate(roles, inaccurate),
            slower if slower and not is_close else _not_faster(roles, accurate, min_gain),
        )
        parts = "; ".join(filter(None, reasons)) or _NOTHING
        reason = "; ".join(filter(None, (parts, _converted(plain))))
        return Selection(role="reference", placement=reference, unchanged=True, reason=reason)
    best = min(proved, key=lambda role: proved[role].median)
    most = min(proved[best].high, (1 + TIE) * proved[best].median)
    if plain is not None and plain.mean.median <= most:
        gain = f"{_rival(roles, best)} {_takes(proved[best])}"
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
    bounds = interval_text(plain.mean)
    return f"converted to float32 without pairs it takes {ratio_text(plain.mean.median)} (95 %: {bounds})"


_NOTHING = "no quantized candidate ran"
_NAMES = {
    "winner": "the best candidate",
    "runner-up": "the fastest other candidate",
    "everything": "everything quantized",
}


def _named(roles: Mapping[str, Placement], role: str) -> str:
    """A role in a reason."""
    return "the given model's own placement" if roles[role].given else role


def _rival(roles: Mapping[str, Placement], role: str) -> str:
    """A role that was not selected, in the reason of an unchanged model."""
    name = _named(roles, role)
    return _NAMES.get(name, name)


def _inaccurate(roles: Mapping[str, Placement], ratios: Mapping[str, RatioTest]) -> str:
    """The fastest of placements that are not accurate enough, if it is faster than the reference."""
    role = min(ratios, key=lambda each: ratios[each].mean.median, default="")
    if not role or ratios[role].mean.median >= 1:
        return ""
    return f"{_rival(roles, role)} {_takes(ratios[role].mean)}, but is not accurate enough"


def _not_faster(roles: Mapping[str, Placement], ratios: Mapping[str, RatioTest], min_gain: float) -> str:
    """The reason why the fastest of accurate placements is not selected; empty if there is none."""
    if not ratios:
        return ""
    role = min(ratios, key=lambda each: ratios[each].mean.median)
    ratio, name = ratios[role].mean, _rival(roles, role)
    if ratio.high < 1 - min_gain:
        worst = f"up to {ratios[role].enclosing.high:.3f} in one of the conditions of the caches"
        return f"the gain is not proved: {name} {_takes(ratio)}, and {worst}"
    if ratio.median >= 1:
        return f"no candidate is faster: {name} {_takes(ratio)}"
    gain, low, high = (share_text(1 - value) for value in (ratio.median, ratio.high, ratio.low))
    asked = f", and tune.min_gain asks for {100 * min_gain:g} %" if min_gain else ""
    return f"the gain is not proved: {name} saves {gain} of the time (95 %: {low} to {high}){asked}"


def _takes(ratio: Interval) -> str:
    return f"takes {ratio_text(ratio.median)} of the reference's time (95 %: {interval_text(ratio)})"
