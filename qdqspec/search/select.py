"""Selection of the placements to confirm, and of the final one, with the reasons in words. Pure.

A placement that is not proved better than the reference is never selected: an unchanged model is a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from qdqspec._core.units import interval_text, ratio_text, share_text
from qdqspec.types import GIVEN, Interval, Placement, RatioTest, Trial

_OWN = "the given model's own placement"
_NAMES = {
    "winner": "the best candidate",
    "runner-up": "the fastest other candidate",
    "everything": "everything quantized",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected placement, the role under which it was confirmed, and the reason."""

    role: str
    placement: Placement
    reason: str

    @property
    def unchanged(self) -> bool:
        """Whether the reference is selected."""
        return self.role == "reference"


def finalists(
    trials: Sequence[Trial],
    everything: Placement,
    *,
    fits: Callable[[Trial], bool] = lambda _: True,
    admits: Callable[[Placement], bool] = lambda _: True,
    most: int = 6,
) -> dict[str, Placement]:
    """The roles to confirm: reference, winner, runner-up, everything quantized, and the model as given if it ran.

    Winner and runner-up are accurate enough: ``fits`` checks a trial's known values, ``admits`` measures a placement.
    It is called for the last ``most`` race winners, and the ``most`` fastest candidates: more take longer, and find a
    winner where many miss the limits on all data. Everything quantized, even if it was not built, and a quantized model
    as given are confirmed for comparison.
    """
    champions = [t for t in trials if t.ok and t.incumbent and (not t.placement.sites or fits(t))]
    faster = [t for t in trials if t.is_candidate and t.ratio is not None and t.ratio < 1 and fits(t)]
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


def front_of(trials: Sequence[Trial], limit: int) -> list[Trial]:
    """At most ``limit`` trials, thinned out evenly, that no other beats in both latency and accuracy, fastest first."""
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

    Simplest means fewest activation pairs, at most ``tie`` slower than the best by their medians: more selects fewer
    pairs, and slower models. Proved means a saving of more than ``min_gain`` by the 95 % interval, and any saving in
    both conditions of the caches. ``barred`` are digests of placements that are not accurate enough. Parts of the
    reason of an unchanged model are ``shortfall``, how far faster candidates missed the accuracy limit, and ``slower``,
    that all accurate candidates are slower. ``plain`` is the ratio of the converted model without pairs, if candidates
    were converted: no placement is selected that is not faster than that one too.
    """
    reference, converted, plain_ms = roles["reference"], "", math.inf
    rivals = {role: ratio for role, ratio in ratios.items() if roles[role].digest != reference.digest}
    names = {role: _OWN if roles[role].given else _NAMES.get(role, role) for role in rivals}
    accurate = {role: ratio for role, ratio in rivals.items() if roles[role].digest not in barred}
    proved = {role: ratio.mean for role, ratio in accurate.items() if ratio.proves(min_gain)}
    if plain is not None:
        plain_ms = plain.mean.median
        takes = f"{ratio_text(plain_ms)} (95 %: {interval_text(plain.mean)})"
        converted = f"converted to float32 without pairs it takes {takes}"
    best = min(proved, key=lambda role: proved[role].median, default="")
    most = min(proved[best].high, (1 + tie) * proved[best].median) if best else 0.0
    if best and plain_ms > most:
        inside = [role for role in proved if proved[role].median <= most]
        role = min(inside, key=lambda name: (roles[name].pairs, proved[name].median))
        name, ratio = _OWN if roles[role].given else role, proved[role]
        selected = f"{name}: {ratio.median:.3f} of the reference's time [{ratio.low:.3f}, {ratio.high:.3f}]"
        also = f"as fast as {best} within its interval, with fewer Q/DQ pairs" if role != best else ""
        reason = "; ".join(filter(None, (selected, also, converted)))
        return Selection(role=role, placement=roles[role], reason=reason)
    if best:
        reason = f"{names[best]} {_takes(proved[best])}, and {converted}: its pairs do not make it faster"
        return Selection(role="reference", placement=reference, reason=reason)
    reasons = [shortfall]
    fastest = sorted(rivals, key=lambda role: rivals[role].mean.median)
    missed = next((role for role in fastest if role not in accurate), None)
    if not shortfall and missed is not None and rivals[missed].mean.median < 1:
        reasons.append(f"{names[missed]} {_takes(rivals[missed].mean)}, but is not accurate enough")
    if slower and not any(ratio.mean.median < 1 for ratio in accurate.values()):
        reasons.append(slower)
    elif first := next((role for role in fastest if role in accurate), ""):
        reasons.append(_unproved_text(names[first], accurate[first], min_gain))
    reasons = ["; ".join(filter(None, reasons)) or "no quantized candidate ran", converted]
    return Selection(role="reference", placement=reference, reason="; ".join(filter(None, reasons)))


def _unproved_text(name: str, test: RatioTest, min_gain: float) -> str:
    """Why the gain of the fastest accurate placement is not proved."""
    ratio = test.mean
    if ratio.high < 1 - min_gain:
        worst = f"up to {test.enclosing.high:.3f} in one of the conditions of the caches"
        return f"the gain is not proved: {name} {_takes(ratio)}, and {worst}"
    if ratio.median >= 1:
        return f"no candidate is faster: {name} {_takes(ratio)}"
    gain, low, high = (share_text(1 - value) for value in (ratio.median, ratio.high, ratio.low))
    asked = f", and tune.min_gain asks for {100 * min_gain:g} %" if min_gain else ""
    return f"the gain is not proved: {name} saves {gain} of the time (95 %: {low} to {high}){asked}"


def _takes(ratio: Interval) -> str:
    return f"takes {ratio_text(ratio.median)} of the reference's time (95 %: {interval_text(ratio)})"
