"""The check `latency`: a time budget of the tuned model."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from qdqspec._core.registry import did_you_mean, names
from qdqspec._core.units import (
    interval_text,
    ms_text,
    ms_texts_apart,
    origin_text,
    percent_text,
    plain,
    ratio_text,
)
from qdqspec.checks.base import CheckParams, Whole, longest_match, unmeasured, untimed, verdict
from qdqspec.checks.rejected import faster_advice
from qdqspec.spec import Number, Positive
from qdqspec.types import (
    Clock,
    ClockChoice,
    Evidence,
    EvidenceKind,
    LatencyEvidence,
    Outcome,
    Section,
    Verdict,
)

ANY = "any"  # the table's entry for each device without one of its own

_PERCENTILE = re.compile(r"p(100|\d{1,2}(?:\.\d{1,3})?)")
_GLOB = re.compile(r"[*?\[]")


def _by_device(value: object) -> object:
    """A number is the budget of the check's percentile; without a device, a budget is that of any."""
    if not isinstance(value, dict) or (value and all(_PERCENTILE.fullmatch(str(key)) for key in value)):
        value = {ANY: value}
    return {name: budget if isinstance(budget, dict) else {"": budget} for name, budget in value.items()}


def _as_written(table: dict[str, dict[str, float]]) -> dict[str, float | dict[str, float]]:
    return {name: budget.get("", budget) for name, budget in table.items()}


def _require_percentiles(budget: dict[str, float]) -> dict[str, float]:
    for name in budget:
        if name and not _PERCENTILE.fullmatch(name):
            raise ValueError(f"'{name}' is no percentile such as p50, p99 or p99.9")
    return budget


def _require_devices(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Reject a misspelt backend: its budget would never apply."""
    backends = names("backend")
    for name in table:
        device = _GLOB.search(name) or any(part in backends for part in re.split(r"[- ]", name))
        if name != ANY and not device:
            near = did_you_mean(name.partition("-")[0], backends)
            raise ValueError(f"'{name}' is no backend, target or device{near}; for all others write '{ANY}'")
    return table


def _of_hundred(percent: float) -> float:
    if 0 < percent < 1:
        raise ValueError(f"{percent:g} is not between 1 and 100: write {100 * percent:g}")
    return percent


Percentiles: TypeAlias = Annotated[
    dict[str, Positive], Field(min_length=1), AfterValidator(_require_percentiles)
]
Budgets: TypeAlias = Annotated[
    dict[str, Percentiles],
    Field(min_length=1),
    AfterValidator(_require_devices),
    BeforeValidator(
        _by_device,
        json_schema_input_type=Positive
        | Percentiles
        | Annotated[dict[str, Positive | Percentiles], Field(min_length=1)],
    ),
    PlainSerializer(_as_written),
]


class LatencyCheck(CheckParams):
    """A time budget in milliseconds, one for all devices or one for each, of one percentile or several."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})
    kind: Literal["latency"]
    max_ms: Budgets = Field(
        description="Budget in milliseconds: a number, or a table by device (a glob such as '*h100*'), target or "
        "backend ('any' for all others). In place of a number, several by percentile: {p50: 9, p99: 12}."
    )
    percentile: Annotated[Number, AfterValidator(_of_hundred)] = Field(
        50,
        ge=0,
        le=100,
        description="The percentile of the runs to which a single number applies.",
    )
    profile: Whole | None = Field(
        None,
        ge=0,
        description="The shape profile that is compared, counted from 0 in the order of inputs.shapes (default: the "
        "weighted geometric mean of all).",
    )
    clock: ClockChoice = Field(
        "auto", description="Thread CPU time or wall time; auto takes the clock that the search used."
    )

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if no percentile exceeds its budget; inconclusive if a single slow run decides."""
        latency = evidence.latency
        if latency is None or not latency.samples.get("tuned"):
            return untimed("latency", evidence)
        target = plain(evidence.target)
        # A glob over the device's key takes precedence over its target, the target over its backend, and `any` is last;
        # of several that match, the longest applies.
        key = evidence.device.key
        devices = [
            name for name in self.max_ms if name == key or (_GLOB.search(name) and fnmatchcase(key, name))
        ]
        name = max(devices, key=len) if devices else longest_match(self.max_ms, evidence.target) or ANY
        if name not in self.max_ms:
            known = ", ".join(plain(name) for name in self.max_ms)
            text = f"max_ms names {known}; this run is on {target} ({plain(evidence.device.key)})."
            return verdict(
                "inconclusive",
                f"no budget for {plain(evidence.target, 30)} in max_ms",
                Section(title="Budget", text=text),
                advice=f"Add '{target}: <milliseconds>' (or '{ANY}: <milliseconds>') to max_ms.",
            )
        count = max(len(latency.profiles), 1)
        if self.profile is not None and self.profile >= count:
            what = f"shape profile {self.profile} was not among the {count} measured"
            return verdict("fail", what, advice="Number profiles from 0, in the order of inputs.shapes.")
        clock = latency.clock if self.clock == "auto" else self.clock
        if clock == "cpu" and not latency.samples["tuned"].cpu_ms:
            return unmeasured(
                f"{plain(evidence.target, 30)} takes no thread CPU time",
                "Judge this target with clock: wall.",
            )
        # The measurement to compare with the budget: all profiles together, or the named one.
        line = latency.line("tuned", self.profile if latency.profiles else None)
        where = ""
        if self.profile is not None and latency.profiles:
            where = f" at {plain(latency.profiles[self.profile].name, 40)}"
        budget = {
            float(p.removeprefix("p") or self.percentile): most for p, most in self.max_ms[name].items()
        }
        limits = [_judge(percent, budget[percent], line.run_ms(clock), where) for percent in sorted(budget)]
        order = ("pass", "inconclusive", "fail")
        worst = max(limits, key=lambda limit: (order.index(limit.outcome), limit.over))
        advice = faster_advice(evidence, "raise the budget", gap=worst.value / worst.allowed)
        if worst.outcome == "inconclusive":
            enough = "no number of runs is enough"
            if worst.percent < 100:
                enough = f"a p{worst.percent:g} takes at least {math.ceil(100 / (100 - worst.percent))} runs"
            advice = (
                f"One slow run of {worst.runs} decides the result; {enough}. Use a lower percentile, or raise the "
                "budget."
            )
        return verdict(
            worst.outcome,
            worst.headline,
            Section(
                title="Budget",
                headers=("metric", "value", "budget", "difference", "clock", "target", "verdict"),
                rows=tuple((f"{one.name} ms", *one.texts, clock, target, one.outcome) for one in limits),
            ),
            measured_section(latency, clock),
            numbers={
                "value_ms": worst.value,
                "budget_ms": worst.allowed,
                "over": worst.over,
                "percentile": worst.percent,
                **{f"p{limit.percent:g}_ms": limit.value for limit in limits},
            },
            advice=advice,
        )


class _Limit(NamedTuple):
    """One percentile and its budget: its name, the ``texts`` of value, budget and excess, and the headline for it."""

    percent: float
    name: str
    value: float
    allowed: float
    over: float  # the excess, as a share of the budget
    runs: int
    outcome: Outcome
    texts: tuple[str, str, str]
    headline: str


def _judge(percent: float, allowed: float, runs: tuple[float, ...], where: str) -> _Limit:
    """Judge a percentile; inconclusive if it exceeds the limit only because of the slowest run."""
    import numpy as np

    name = ("median" if percent == 50 else f"p{percent:g}") + where
    value, known = np.percentile(runs, [percent, min(percent, 100 * (1 - 1 / len(runs)))]).tolist()
    outcome: Outcome = "pass" if value <= allowed else "fail" if known > allowed else "inconclusive"
    over = value / allowed - 1
    excess = percent_text(over) if over < 9 else f"{over + 1:.0f}x"
    shown, budget = ms_texts_apart(value, allowed)
    headline = f"{name} {shown} ms {'<=' if outcome == 'pass' else '>'} budget {budget} ms ({excess})"
    if outcome == "inconclusive":
        headline = f"{name} {shown} ms of {len(runs)} runs: too few to judge against budget {budget} ms"
    return _Limit(percent, name, value, allowed, over, len(runs), outcome, (shown, budget, excess), headline)


def measured_section(latency: LatencyEvidence, clock: Clock) -> Section:
    """Each measured role with its median and its time against the reference."""
    rows = []
    for line in latency.lines():
        ratio, samples = line.ratio, line.samples
        name = f"{line.role} {plain(line.at, 60)}".rstrip()
        against = "" if ratio is None else ratio_text(ratio.median)
        bounds = "" if ratio is None or ratio.low == ratio.high else interval_text(ratio)
        median = line.median_ms if clock == latency.clock else samples.median_ms(clock)
        rows.append((name, ms_text(median), against, bounds, str(len(samples.on(clock)))))
    return Section(
        title=f"Latency ({origin_text(latency.provenance)}, {latency.builds} builds each, {clock} clock)",
        headers=("role", "median ms", "of reference", "95 % prediction", "runs"),
        rows=tuple(rows),
    )


check = LatencyCheck
