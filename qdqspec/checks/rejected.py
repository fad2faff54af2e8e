"""Candidates that a search did not select, as text: why they are slower, and what a limit costs."""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec._core.units import count_text, db_text, interval_text, list_text, ms_text, plain, ratio_text
from qdqspec.types import (
    SLOWER,
    UNPROVED,
    Evidence,
    KernelComparison,
    RejectedCandidate,
    SearchResult,
    Section,
)

_HEADERS = (
    "candidate",
    "of reference",
    "95 % interval",
    "SQNR dB",
    "pairs",
    "integer kernels",
    "left in float",
    "Q/DQ alone",
    "not selected because",
)


def _candidate_row(one: RejectedCandidate) -> tuple[str, ...]:
    """A candidate under `_HEADERS`; kernels are unknown without a profile."""
    kernels = one.kernels
    counts = ("", "", "")
    if kernels is not None:
        left = sum(kernels.left_in_float.values())
        counts = (f"{kernels.integer} of {kernels.kernels}", str(left), str(kernels.unfused))
    return (
        one.role,
        ratio_text(one.ratio.median),
        interval_text(one.ratio) if one.is_confirmed else "one race",
        "" if one.sqnr_db is None else db_text(one.sqnr_db),
        str(one.pairs),
        *counts,
        plain(one.reason),
    )


def candidates_section(search: SearchResult) -> Section:
    """The candidates that were not selected, with the kernels that make them slower."""
    return Section(
        title="Candidates that were not selected",
        headers=_HEADERS,
        rows=tuple(map(_candidate_row, search.rejected)),
        text="\n".join(kernel_lines(search)),
    )


def kernel_lines(search: SearchResult) -> list[str]:
    """A sentence for each candidate with a profile: what costs time in it, and what does not run in integers."""
    known = ((one.role, slower_text(one.kernels)) for one in search.rejected if one.kernels is not None)
    return [f"{role}: {text}." for role, text in known if text]


def why_text(rejected: Sequence[RejectedCandidate]) -> str:
    """The reason that candidates within the limits gain too little, by kernels of one of them; empty if unknown.

    It is the fastest whose profile shows why: it takes longer than the reference's, or has parts that are not fused.
    """
    for one in rejected:
        kernels = one.kernels
        if kernels is None or one.reason not in (SLOWER, UNPROVED):
            continue
        is_shown = one.reason == SLOWER and kernels.tuned_ms > kernels.reference_ms
        if text := slower_text(kernels) if is_shown else unfused_text(kernels):
            return f"in the profile of {'the ' if 'candidate' in one.role else ''}{one.role}, {text}"
    return ""


def slower_text(kernels: KernelComparison) -> str:
    """The kernels that are slower in a candidate than in the reference, and the kernels that do not run in integers."""
    places = list_text([plain(place.place) for place in kernels.slower], 1)
    costs = [
        (kernels.conversions_ms, "Q, DQ and conversions", ""),
        (kernels.slower_ms, "slower kernels", f" ({places})"),
    ]
    least = 0.01 * kernels.reference_ms  # smaller differences are noise
    parts = [
        f"{what} take {ms_text(spent)} ms more{details}"
        for spent, what, details in sorted(costs, reverse=True)
        if spent > least
    ]
    if parts and -kernels.faster_ms > least:
        parts.append(f"faster kernels take {ms_text(-kernels.faster_ms)} ms less")
    return ", ".join(filter(None, [*parts, unfused_text(kernels)]))


def unfused_text(kernels: KernelComparison) -> str:
    """The Q and DQ of a candidate that were not fused, and its kernels in float between them; empty for none."""
    parts = []
    if kernels.unfused:
        parts.append(f"{count_text(kernels.unfused, 'Q or DQ is', 'Q or DQ are')} not fused")
    if left := sum(kernels.left_in_float.values()):
        ops = list_text(sorted(kernels.left_in_float, key=lambda op: -kernels.left_in_float[op]), 3)
        what = "kernel with quantized inputs runs" if left == 1 else "kernels with quantized inputs run"
        parts.append(f"{left} {what} in float ({plain(ops)}): no integer kernel for these types")
    return ", ".join(parts)


def _faster_below_limit(search: SearchResult) -> int:
    """The number of candidates that are faster than the selected model, and below the SQNR limit."""
    least = search.limits.min_sqnr_db
    own = next((trial for trial in search.trials if trial.placement == search.winner), None)
    bound = 1.0 if search.unchanged or own is None or own.ratio is None else own.ratio
    faster = [t for t in search.trials if t.ok and not t.subgraph and t.ratio is not None and t.ratio < bound]
    found = {t.placement.digest: t.sqnr_db if t.all_data_db is None else t.all_data_db for t in faster}
    # everything quantized may have been timed by the confirmation alone
    found |= {one.placement: one.sqnr_db for one in search.rejected if one.ratio.median < bound}
    return sum(db is not None and least is not None and db < least for db in found.values())


def faster_advice(evidence: Evidence, otherwise: str, *, gap: float = 1.0, far: float = 1.5) -> str:
    """Advice on how the model may become faster by the factor ``gap`` it lacks; ``otherwise`` ends the sentence.

    More candidates of the same space do not close a gap of ``far`` and more.
    """
    search = evidence.search
    if search is None:
        return f"Tune the model again, or {otherwise}."
    if gap >= far:
        unchanged = f"The model is unchanged ({plain(search.reason)}). " if search.unchanged else ""
        return (
            f"{unchanged}It would have to be {gap:.1f}x faster still; other placements rarely gain so much. "
            f"`qdqspec explain` shows the time of each layer. Use another backend, device or number format, or "
            f"{otherwise}."
        )
    tried = f"{count_text(search.built, 'candidate')} built, {search.failed} failed"
    rules = evidence.case.patterns
    ways = ["allow more patterns"] if rules.allow or rules.deny or rules.exclude else []
    if below := _faster_below_limit(search):
        ways.append(f"lower tune.min_sqnr_db ({count_text(below, 'faster candidate')} below it)")
    if search.ended_by and not search.ended:  # else more builds would not be used
        limits = {"build": "tune.trials", "run": "--qdq-time-limit"}
        name = next((name for word, name in limits.items() if word in search.ended_by), "tune.minutes")
        ways.append(f"raise {name}" if search.unchanged else f"raise {name} ({tried})")
    advice = f"{', '.join(ways or ['use another number format'])}, or {otherwise}."
    advice = advice[0].upper() + advice[1:]
    return (
        f"The model is unchanged ({plain(search.reason)}; {tried}). {advice}" if search.unchanged else advice
    )
