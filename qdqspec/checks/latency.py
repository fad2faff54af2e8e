"""Is the tuned model within its time budget? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from qdqspec.checks._params import Positive
from qdqspec.checks._verdicts import faster_advice, unmeasured, verdict
from qdqspec.checks.base import CheckParams, longest_match
from qdqspec.types import Clock, Evidence, EvidenceKind, LatencyEvidence, Outcome, Samples, Section, Verdict
from qdqspec.units import interval_text, ms_text, ms_texts_apart, percent_text, plain, ratio_text

ANY = "any"  # the budget table's entry for every target without one of its own


def _table(value: object) -> object:
    """A single number is the budget of any target."""
    return value if isinstance(value, dict) else {ANY: value}


Table = Annotated[dict[str, Positive], Field(min_length=1)]
Budgets = Annotated[Table, BeforeValidator(_table, json_schema_input_type=Positive | Table)]


class LatencyParams(CheckParams):
    """A time budget in milliseconds, one for all targets or one for each."""

    kind: Literal["latency"]
    max_ms: Budgets = Field(
        description="Budget in milliseconds: a number, or a table of numbers by target or backend "
        "(onnxruntime-cpu, onnxruntime, tensorrt; 'any' for all others)."
    )
    percentile: float = Field(
        50, ge=0, le=100, allow_inf_nan=False, description="Which percentile of the runs is held to it."
    )
    profile: int | None = Field(
        None,
        ge=0,
        description="Which shape profile is held to it, counted from 0 in the order of inputs.shapes; without it their "
        "weighted geometric mean is.",
    )
    clock: Literal["auto", "cpu", "wall"] = Field(
        "auto", description="Thread CPU time or wall time; auto takes the clock that the search used."
    )


class LatencyCheck:
    """Holds a percentile of the tuned model's runs to the budget of the target that ran it."""

    Params: ClassVar[type[CheckParams]] = LatencyParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        """Pass where the percentile is not above the budget."""
        assert isinstance(params, LatencyParams)
        latency = evidence.latency
        if latency is None or not latency.samples.get("tuned"):
            return unmeasured(
                "no latency was measured", "Run without --qdq-mode=plan, so that it is measured."
            )
        budget = longest_match(params.max_ms, evidence.target) or params.max_ms.get(ANY)
        if budget is None:
            return _no_budget(params, evidence.target)
        count = max(len(latency.profiles), 1)
        if params.profile is not None and params.profile >= count:
            return unmeasured(
                f"there is no shape profile {params.profile}: {count} measured",
                "Number profiles from 0, in the order of inputs.shapes.",
            )
        clock = latency.clock if params.clock == "auto" else params.clock
        if clock == "cpu" and not latency.samples["tuned"].cpu_ms:
            return unmeasured(
                f"{plain(evidence.target, 30)} takes no thread CPU time",
                "Judge this target with clock: wall.",
            )
        return _compare(params, evidence, latency, budget, clock)


def _compare(
    params: LatencyParams, evidence: Evidence, latency: LatencyEvidence, budget: float, clock: Clock
) -> Verdict:
    name = "median" if params.percentile == 50 else f"p{params.percentile:g}"
    if params.profile is not None and latency.profiles:
        name += f" at {plain(latency.profiles[params.profile].name, 40)}"
    value = percentile(_held(params, latency).on(clock), params.percentile)
    over = value / budget - 1
    shown, allowed = ms_texts_apart(value, budget)
    sign = ">" if value > budget else "<="
    outcome: Outcome = "fail" if value > budget else "pass"
    table = Section(
        title="Budget",
        headers=("metric", "value", "budget", "difference", "clock", "target", "verdict"),
        rows=((f"{name} ms", shown, allowed, percent_text(over), clock, plain(evidence.target), outcome),),
    )
    return verdict(
        outcome,
        f"{name} {shown} ms {sign} budget {allowed} ms ({percent_text(over)})",
        table,
        measured_section(latency, clock),
        numbers={"value_ms": value, "budget_ms": budget, "over": over, "percentile": params.percentile},
        advice=faster_advice(evidence, "raise the budget"),
    )


def _held(params: LatencyParams, latency: LatencyEvidence) -> Samples:
    """What is held to the budget: all profiles together, or the one that is named."""
    tuned = latency.samples["tuned"]
    return tuned.profiles[params.profile] if params.profile is not None and tuned.profiles else tuned


def _no_budget(params: LatencyParams, target: str) -> Verdict:
    known = ", ".join(plain(name) for name in params.max_ms)
    return verdict(
        "inconclusive",
        f"no budget for {plain(target, 30)} in max_ms",
        Section(title="Budget", text=f"max_ms names {known}; this run is on {plain(target)}."),
        advice=f"Add '{plain(target)}: <milliseconds>' (or '{ANY}: <milliseconds>') to max_ms.",
    )


def measured_section(latency: LatencyEvidence, clock: Clock) -> Section:
    """Every measured role with its median and its time against the reference."""
    rows = []
    for line in latency.lines():
        ratio, samples = line.ratio, line.samples
        name = f"{line.role} {plain(line.at, 60)}".rstrip()
        against = "" if ratio is None else ratio_text(ratio.median)
        bounds = "" if ratio is None or ratio.low == ratio.high else interval_text(ratio)
        rows.append((name, ms_text(samples.median_ms(clock)), against, bounds, str(len(samples.on(clock)))))
    return Section(
        title=f"Latency ({latency.provenance}, {latency.builds} builds each, {clock} clock)",
        headers=("role", "median ms", "of reference", "95 % interval", "runs"),
        rows=tuple(rows),
    )


def percentile(values: tuple[float, ...], percent: float) -> float:
    """The percentile of at least one value, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


check = LatencyCheck()
