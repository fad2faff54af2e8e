"""Selection of the placements to confirm, and of the final one. Pure.

A placement that is not proved better than the reference is never selected: an unchanged model is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.search.reasons import (
    converted_text,
    rival_text,
    selected_text,
    takes_text,
    unchanged_text,
)
from qdqspec.types import GIVEN, NOT_CANDIDATES, Placement, RatioTest, Trial


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
    most: int = 6,
) -> dict[str, Placement]:
    """The roles to confirm: reference, winner, runner-up, everything quantized, and the model as given if it ran.

    Winner and runner-up are accurate enough: ``fits`` checks a trial's known values, ``admits`` measures a placement
    and is called for ``most`` race winners, the last first, and ``most`` of the fastest, none slower than the
    reference: more take longer, and find a winner where many miss the limits on all data. Everything quantized is
    confirmed for comparison, even if the search ended before building it, unless it failed. So is a quantized model as
    given.
    """
    good = [t for t in trials if t.ok and t.phase not in NOT_CANDIDATES]
    champions = [t for t in trials if t.ok and t.incumbent and (not t.placement.sites or fits(t))]
    faster = [t for t in good if t.ratio is not None and t.ratio < 1 and t.placement.sites and fits(t)]
    ranked = sorted(faster, key=lambda t: t.ratio or 0.0)
    roles = {"reference": trials[0].placement}
    last = (t.placement for t in champions[: -most - 1 : -1])
    roles["winner"] = next((p for p in last if not p.sites or admits(p)), roles["reference"])
    others = [t.placement for t in ranked if t.placement != roles["winner"]]
    runner_up = next(filter(admits, others[:most]), None)
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
    tie: float = 0.01,
) -> Selection:
    """The simplest placement inside the best interval, if its gain is proved.

    Simplest means fewest activation pairs. It is at most ``tie`` slower than the best by their medians: more selects
    fewer pairs, and slower models. Proved means that the upper end of the 95 % interval of its mean time over the
    reference's is below ``1 - min_gain``, and below 1 in both conditions of the caches. ``barred`` are digests of
    placements that are not accurate enough. Parts of the reason of an unchanged model are ``shortfall``, how far faster
    candidates missed the accuracy limit, and ``slower``, that all accurate candidates are slower than the reference. If
    candidates were converted from another float type, ``plain`` is the ratio of the converted model without pairs: then
    no placement is selected that is not faster than that one too.
    """
    reference = roles["reference"]
    proved = {
        role: ratio.mean
        for role, ratio in ratios.items()
        if ratio.proves(min_gain) and roles[role].digest not in (reference.digest, *barred)
    }
    converted = converted_text(plain)
    if not proved:
        reason = unchanged_text(roles, ratios, barred, min_gain, shortfall, slower)
        reason = "; ".join(filter(None, (reason, converted)))
        return Selection(role="reference", placement=reference, unchanged=True, reason=reason)
    best = min(proved, key=lambda role: proved[role].median)
    most = min(proved[best].high, (1 + tie) * proved[best].median)
    if plain is not None and plain.mean.median <= most:
        gain = f"{rival_text(roles, best)} {takes_text(proved[best])}"
        reason = f"{gain}, and {converted}: its pairs do not make it faster"
        return Selection(role="reference", placement=reference, unchanged=True, reason=reason)
    inside = [role for role in proved if proved[role].median <= most]
    role = min(inside, key=lambda name: (roles[name].pairs, proved[name].median))
    also = f"as fast as {best} within its interval, with fewer Q/DQ pairs" if role != best else ""
    reason = "; ".join(filter(None, (selected_text(roles, role, proved[role]), also, converted)))
    return Selection(role=role, placement=roles[role], unchanged=False, reason=reason)
