"""Selection of the placements to confirm, and of the final one, with the reasons in words. Pure.

A placement that is not proved better than the reference is never selected: an unchanged model is a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qdqspec._core.units import count_text, interval_text, metric_text, ratio_text, share_text
from qdqspec.search.limits import Limits
from qdqspec.types import GIVEN, NOT_CANDIDATES, Interval, Placement, RatioTest, Trial

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
    faster = [t for t in trials if is_candidate(t) and t.ratio is not None and t.ratio < 1 and fits(t)]
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


# ---- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judged:
    """The limit that decides on a placement, the value that it judges, both in words, and the gap between them."""

    limit: str
    found: str
    value: float
    gap: str


def _judged(limits: Limits, placement: Placement) -> _Judged:
    """The limit of the metric decides on a placement that meets that of the SQNR and has a value of the metric."""
    figures, metric, least = limits.figures(placement), limits.metric, limits.min_sqnr_db
    text: Callable[[float], str] = "{:.1f} dB".format
    origin = " (the default)" if limits.asked.source == "default" else ""
    limit = "" if least is None else f"the SQNR limit of {least:g} dB{origin}"
    value, found = figures.sqnr_db, "an unknown SQNR"
    if value is not None:
        found = text(value)
    if metric is not None and figures.score is not None and limits.keeps_sqnr(placement):
        text, least, value = partial(metric_text, metric.rules.metric), metric.least, figures.score
        limit = f"the limit of {metric.rules.key} of {text(least)}"
        found = f"{metric.rules.key} {text(value)}"
    gap = "" if value is None or least is None else text(least - value)
    return _Judged(limit, found, -math.inf if value is None else value, gap)


def missed_text(limits: Limits, placement: Placement) -> str:
    """By how much a placement missed a limit: ``1.9 dB below the SQNR limit of 20 dB (the default)``."""
    judged = _judged(limits, placement)
    return f"{judged.gap} below {judged.limit}" if judged.gap else f"not known to be above {judged.limit}"


def shortfall_text(limits: Limits, trials: Sequence[Trial]) -> str:
    """The gaps by which candidates faster than the reference missed each limit; empty if none did."""
    by_limit: dict[str, dict[str, tuple[_Judged, float]]] = {}
    for trial in trials:
        placement, ratio = trial.placement, trial.ratio or 1.0
        if trial.ok and not trial.subgraph and ratio < 1 and not limits.admits(placement):
            judged = _judged(limits, placement)
            by_limit.setdefault(judged.limit, {})[placement.digest] = judged, ratio
    texts = []
    for limit in sorted(by_limit, reverse=True):
        lost = list(by_limit[limit].values())
        best, ratio = max(lost, key=lambda each: each[0].value)
        verb, least, which = ("misses", "", "it")
        if len(lost) > 1:
            verb, least, which = ("miss", "at least ", "the most accurate of them")
        by = f" by {least}{best.gap}" if best.gap else ""
        has = f"{best.found} in {ratio_text(ratio)} of the reference's time"
        texts.append(f"{count_text(len(lost), 'faster candidate')} {verb} {limit}{by}: {which} has {has}")
    return "; ".join(texts)
