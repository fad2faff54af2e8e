"""Parts that the verdicts of several checks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qdqspec._core.units import count_text, plain
from qdqspec.errors import QdqspecError
from qdqspec.types import ERROR_TITLE, Evidence, Outcome, SearchResult, Section, Verdict

_LONGEST = 400  # characters of a line of an error's text
WIDTH = 79  # a headline is a summary line of pytest and a heading of reports


def verdict(
    outcome: Outcome,
    headline: str,
    *sections: Section,
    numbers: Mapping[str, float] | None = None,
    advice: str = "",
    command: str = "",
) -> Verdict:
    """A verdict with the headline cut to one line; numbers that are not finite are omitted."""
    finite = {name: float(value) for name, value in (numbers or {}).items() if math.isfinite(value)}
    return Verdict(
        outcome=outcome,
        headline=plain(headline, WIDTH),
        sections=sections,
        numbers=finite,
        advice="" if outcome == "pass" else advice,
        command=command,
    )


class LimitResult(NamedTuple):
    """A limit of a check that was compared: the headline, whether it holds, and its table row without the verdict."""

    headline: str
    holds: bool
    row: tuple[str, ...]


def verdict_of_limits(
    limits: Sequence[LimitResult], *sections: Section, numbers: Mapping[str, float], advice: str
) -> Verdict:
    """Pass if each limit holds. The headline states the first broken limit, else the first limit."""
    broken = [limit for limit in limits if not limit.holds]
    budget = Section(
        title="Budget",
        headers=("metric", "value", "budget", "verdict"),
        rows=tuple((*limit.row, "pass" if limit.holds else "fail") for limit in limits),
    )
    decisive = broken[0] if broken else limits[0]
    outcome: Outcome = "fail" if broken else "pass"
    return verdict(outcome, decisive.headline, budget, *sections, numbers=numbers, advice=advice)


def raised(error: Exception) -> Verdict:
    """The verdict of a check whose data, metric or backend raised an error."""
    ours = isinstance(error, QdqspecError)
    what = error.what if isinstance(error, QdqspecError) else f"{type(error).__name__}: {error}"
    text = "\n".join(plain(line, _LONGEST) for line in str(error).splitlines() if line.strip())
    return verdict(
        "fail",
        f"not judged: {plain(what, _LONGEST)}",
        Section(title=ERROR_TITLE, text=text if ours else f"{type(error).__name__}: {text}"),
        advice=(error.cure or "") if isinstance(error, QdqspecError) else "",
    )


def timed_out(limit: str, known: Verdict | None = None) -> Verdict:
    """The verdict of a check that was not decided within the run's time limit; ``known`` is its state at the limit."""
    return verdict(
        "inconclusive",
        f"not decided within the time limit of {limit}",
        *(() if known is None else (Section(title="Known by then", text=known.headline), *known.sections)),
        numbers={} if known is None else known.numbers,
        advice="Run it again: it continues where this run stopped. Or raise --qdq-time-limit.",
    )


def unmeasured(what: str, advice: str) -> Verdict:
    """The verdict of a check whose evidence is missing."""
    return verdict("inconclusive", f"{what}: nothing to judge", advice=advice)


def untimed(what: str, evidence: Evidence) -> Verdict:
    """The verdict of a check of times in a run that takes none."""
    if evidence.status == "untimed":
        return unmeasured(
            f"no {what}: selected by coverage, not timed",
            "Time it on a machine with the device: tune with --start-from this scheme, or --qdq-mode=measure.",
        )
    return unmeasured(f"no {what} was measured, as in mode 'verify'", "Run without --qdq-mode=verify.")


def is_unchanged(evidence: Evidence) -> bool:
    """Whether the search selected the reference itself."""
    return evidence.search is not None and evidence.search.unchanged


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


FAR = 1.5  # asked over found: more candidates of the same space do not close such a gap


def faster_advice(evidence: Evidence, otherwise: str, *, gap: float = 1.0) -> str:
    """Advice on how the model may become faster by the factor ``gap`` it lacks; ``otherwise`` ends the sentence."""
    search = evidence.search
    if search is None:
        return f"Tune the model again, or {otherwise}."
    if gap >= FAR:
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
    if search.ended_by:  # else more builds would not be used
        limits = {"build": "tune.trials", "run": "--qdq-time-limit"}
        name = next((name for word, name in limits.items() if word in search.ended_by), "tune.minutes")
        ways.append(f"raise {name}" if search.unchanged else f"raise {name} ({tried})")
    advice = f"{', '.join(ways or ['use another number format'])}, or {otherwise}."
    advice = advice[0].upper() + advice[1:]
    return (
        f"The model is unchanged ({plain(search.reason)}; {tried}). {advice}" if search.unchanged else advice
    )
