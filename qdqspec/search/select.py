"""Who is confirmed, and what is shipped. Pure; may import floors 0 to 3.

Never ship what is not better than the reference: leaving the model alone is a result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.types import NOT_CANDIDATES, Interval, Placement, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is shipped, under which role it was confirmed, and why."""

    role: str
    placement: Placement
    unchanged: bool
    reason: str


def finalists(
    trials: Sequence[Trial],
    everything: Placement,
    *,
    min_sqnr_db: float | None = None,
    min_accuracy: float | None = None,
) -> dict[str, Placement]:
    """The roles to confirm: reference, winner, runner-up, and everything quantized.

    Winner and runner-up reach what accuracy is asked for, as far as that is known of them; everything quantized is
    there for comparison, though the search may have ended before it, unless it was seen to fail.
    """
    good = [t for t in trials if t.ok and t.phase not in NOT_CANDIDATES]
    champions = [t for t in trials if t.ok and t.incumbent]
    sound = (t for t in good if t.number > 0 and reaches(t, min_sqnr_db, min_accuracy))
    ranked = sorted(sound, key=lambda t: t.ratio if t.ratio is not None else float("inf"))
    roles = {"reference": trials[0].placement, "winner": champions[-1].placement}
    others = [t.placement for t in ranked if t.placement.digest not in {p.digest for p in roles.values()}]
    if others:
        roles["runner-up"] = others[0]
    failed = {t.placement.digest for t in trials if not t.ok and not t.subgraph}
    if everything.sites and everything.digest not in failed:
        roles["everything"] = everything
    return roles


def raw_winner(trials: Sequence[Trial]) -> Placement | None:
    """All that won in parts of the model, put together, by a strategy that builds that (phase ``raw``)."""
    return next((t.placement for t in reversed(trials) if t.ok and t.phase == "raw"), None)


def reaches(trial: Trial, min_sqnr_db: float | None, min_accuracy: float | None = None) -> bool:
    """Whether a trial is accurate enough. A task metric is known of few, and speaks only where it is."""
    if min_accuracy is not None and trial.accuracy is not None and trial.accuracy < min_accuracy:
        return not trial.placement.sites
    return min_sqnr_db is None or (trial.sqnr_db is not None and trial.sqnr_db >= min_sqnr_db)


def front_of(trials: Sequence[Trial], limit: int) -> list[Trial]:
    """The trials that none other beats in both latency and accuracy, fastest first.

    More than ``limit`` of them are thinned out evenly, keeping both ends.
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
    ratios: Mapping[str, Interval],
    *,
    barred: Collection[str] = (),
    unheard: Collection[str] = (),
    ended_by: str = "",
) -> Choice:
    """The simplest placement inside the best interval, if it is proved faster than the reference.

    Simplest means fewest activation pairs. Proved means that the whole 95 % interval lies below one.
    ``barred`` are digests of placements that are not accurate enough, ``unheard`` of those that nobody knows that
    of, though it is asked for: they are there for comparison. ``ended_by`` is the limit that ended the
    search before it was done; it is part of the reason of an unchanged model.
    """
    reference = roles["reference"]
    proved = {
        role: ratio
        for role, ratio in ratios.items()
        if ratio.high < 1 and roles[role].digest not in (reference.digest, *barred, *unheard)
    }
    if not proved:
        lacks = dict.fromkeys(unheard, "how accurate it is was not heard")
        reason = _why_not(roles, ratios, lacks | dict.fromkeys(barred, "is not accurate enough"))
        if ended_by:
            reason += f"; the search ended at {ended_by}, before it was done"
        return Choice(role="reference", placement=reference, unchanged=True, reason=reason)
    best = min(proved, key=lambda role: proved[role].median)
    inside = [role for role in proved if proved[role].median <= proved[best].high]
    role = min(inside, key=lambda name: (roles[name].pairs, proved[name].median))
    ratio = proved[role]
    reason = f"{role}: {ratio.median:.3f} of the reference's time [{ratio.low:.3f}, {ratio.high:.3f}]"
    if role != best:
        reason += f"; as fast as {best} within its interval, with fewer Q/DQ pairs"
    return Choice(role=role, placement=roles[role], unchanged=False, reason=reason)


def _why_not(roles: Mapping[str, Placement], ratios: Mapping[str, Interval], lacks: Mapping[str, str]) -> str:
    reference = roles["reference"].digest
    rivals = {role: ratio for role, ratio in ratios.items() if roles[role].digest != reference}
    if not rivals:
        return "no placement was faster than the reference in any race"
    role = min(rivals, key=lambda name: rivals[name].median)
    best = rivals[role]
    took = f"{best.median:.3f} of the reference's time [{best.low:.3f}, {best.high:.3f}]"
    lacking = lacks.get(roles[role].digest)
    return f"the best ({role}) took {took}" + (f", but {lacking}" if lacking else "")
