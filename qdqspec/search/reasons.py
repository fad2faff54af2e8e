"""The reasons of a selection in words: why placements were not selected, and which limits they missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qdqspec._core.units import count_text, interval_text, metric_text, ratio_text, share_text
from qdqspec.accuracy.gate import SAMPLES
from qdqspec.search.limits import Limits
from qdqspec.types import Interval, Placement, RatioTest, Trial

_NAMES = {
    "winner": "the best candidate",
    "runner-up": "the fastest other candidate",
    "everything": "everything quantized",
}

# ---- times --------------------------------------------------------------------------------------


def selected_text(roles: Mapping[str, Placement], role: str, ratio: Interval) -> str:
    """The selected role with its time."""
    name = "the given model's own placement" if roles[role].given else role
    return f"{name}: {ratio.median:.3f} of the reference's time [{ratio.low:.3f}, {ratio.high:.3f}]"


def unchanged_text(
    roles: Mapping[str, Placement],
    ratios: Mapping[str, RatioTest],
    barred: Collection[str],
    min_gain: float,
    shortfall: str,
    slower: str,
) -> str:
    """Why no placement is selected; see `qdqspec.search.select.choose`."""
    reference = roles["reference"].digest
    rivals = {role: each for role, each in ratios.items() if roles[role].digest != reference}
    accurate = {role: each for role, each in rivals.items() if roles[role].digest not in barred}
    inaccurate = {role: each for role, each in rivals.items() if role not in accurate}
    is_close = any(ratio.mean.median < 1 for ratio in accurate.values())
    reasons = (
        shortfall or _inaccurate(roles, inaccurate),
        slower if slower and not is_close else _not_faster(roles, accurate, min_gain),
    )
    return "; ".join(filter(None, reasons)) or "no quantized candidate ran"


def converted_text(plain: RatioTest | None) -> str:
    """The time of the converted model without pairs; empty if candidates are not converted."""
    if plain is None:
        return ""
    bounds = interval_text(plain.mean)
    return f"converted to float32 without pairs it takes {ratio_text(plain.mean.median)} (95 %: {bounds})"


def rival_text(roles: Mapping[str, Placement], role: str) -> str:
    """A role that was not selected."""
    return "the given model's own placement" if roles[role].given else _NAMES.get(role, role)


def takes_text(ratio: Interval) -> str:
    """A time with its interval."""
    return f"takes {ratio_text(ratio.median)} of the reference's time (95 %: {interval_text(ratio)})"


def _inaccurate(roles: Mapping[str, Placement], ratios: Mapping[str, RatioTest]) -> str:
    """The fastest of placements that are not accurate enough, if it is faster than the reference."""
    role = min(ratios, key=lambda each: ratios[each].mean.median, default="")
    if not role or ratios[role].mean.median >= 1:
        return ""
    return f"{rival_text(roles, role)} {takes_text(ratios[role].mean)}, but is not accurate enough"


def _not_faster(roles: Mapping[str, Placement], ratios: Mapping[str, RatioTest], min_gain: float) -> str:
    """Why the fastest of accurate placements is not selected; empty if there is none."""
    if not ratios:
        return ""
    role = min(ratios, key=lambda each: ratios[each].mean.median)
    ratio, name = ratios[role].mean, rival_text(roles, role)
    if ratio.high < 1 - min_gain:
        worst = f"up to {ratios[role].enclosing.high:.3f} in one of the conditions of the caches"
        return f"the gain is not proved: {name} {takes_text(ratio)}, and {worst}"
    if ratio.median >= 1:
        return f"no candidate is faster: {name} {takes_text(ratio)}"
    gain, low, high = (share_text(1 - value) for value in (ratio.median, ratio.high, ratio.low))
    asked = f", and tune.min_gain asks for {100 * min_gain:g} %" if min_gain else ""
    return f"the gain is not proved: {name} saves {gain} of the time (95 %: {low} to {high}){asked}"


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
    return "; ".join(_missed(list(by_limit[limit].values())) for limit in sorted(by_limit, reverse=True))


def _missed(lost: Sequence[tuple[_Judged, float]]) -> str:
    """The gap by which the most accurate of these candidates misses a limit, with its time."""
    best, ratio = max(lost, key=lambda each: each[0].value)
    verb, least, which = (
        ("miss", "at least ", "the most accurate of them") if len(lost) > 1 else ("misses", "", "it")
    )
    by = f" by {least}{best.gap}" if best.gap else ""
    has = f"{best.found} in {ratio_text(ratio)} of the reference's time"
    return f"{count_text(len(lost), 'faster candidate')} {verb} {best.limit}{by}: {which} has {has}"


def refused_text(limits: Limits, trials: Sequence[Trial]) -> str:
    """Candidates that met the SQNR limit on the first samples but not on all data; empty for none."""
    least = limits.min_sqnr_db
    if least is None:
        return ""
    met = {t.placement.digest for t in trials if t.sqnr_db is not None and t.sqnr_db >= least}
    known = [limits.known[digest] for digest in met if digest in limits.known]
    found = [each for each in known if each.all_db is not None and each.all_db < least]
    if not found:
        return ""
    amount = "more" if any(each.is_part for each in found) else "all"
    return (
        f"{count_text(len(found), 'candidate')} reached {least:g} dB on the first {SAMPLES} samples and "
        f"{max(each.all_db or 0.0 for each in found):.1f} dB at most on {amount} {limits.data} data"
    )
