"""Does the tuned model still compute what the reference computes? May import floor 0 and pydantic."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import Whole, require_a_limit
from qdqspec.checks._parity_limits import AGREEMENT, LIMITS, NAME_WIDTH, Limit, ParityLimits, broken, value_of
from qdqspec.checks._parity_words import QUANTIZATION, RUNTIME, advice, blame, culprits_table, steps_table
from qdqspec.checks._verdicts import WIDTH, unmeasured, verdict
from qdqspec.checks.base import CheckParams
from qdqspec.types import Evidence, EvidenceKind, ParityEvidence, Section, TensorParity, TopK, Verdict
from qdqspec.units import plain


class StepLimits(ParityLimits):
    """Limits for one of the two steps between the float model and what runs. At least one."""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names)
        return self


class ParityParams(CheckParams, ParityLimits):
    """How far the outputs may move. At least one limit; every output must keep every limit."""

    kind: Literal["parity"]
    top_k: Whole = Field(1, ge=1, description="How many best classes `min_agreement` looks at.")
    class_axis: Whole | None = Field(
        None,
        description="The axis of the classes, for `min_agreement`; the last one longer than 1 if not said.",
    )
    quantization: StepLimits | None = Field(
        None,
        description="Limits for quantization alone: the float model against its Q/DQ arithmetic, unfused.",
    )
    runtime: StepLimits | None = Field(
        None,
        description="Limits for the runtime alone: that arithmetic against what the backend makes of it.",
    )
    outputs: tuple[str, ...] = Field(
        (), description="Which outputs are held to it, as globs over their names; all where none is named."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names, "quantization", "runtime")
        return self

    @property
    def top(self) -> TopK:
        """The question about classes that the evidence is to answer."""
        return TopK(k=self.top_k, axis=self.class_axis)

    def chosen(self, outputs: tuple[TensorParity, ...]) -> list[TensorParity]:
        """The outputs that are held to it, the worst first."""
        named = (out for out in outputs if not self.outputs or self._names(out))
        return sorted(named, key=_badness)

    def _names(self, out: TensorParity) -> bool:
        return any(fnmatchcase(out.name, glob) for glob in self.outputs)

    def culpable(self, parity: ParityEvidence) -> str | None:
        """The output that leads a failure which quantization has a part in; ``None`` where there is none."""
        found = (failure.output for failure in _failures(self, parity) if failure.step != RUNTIME)
        return next(found, None)

    @property
    def asks_agreement(self) -> bool:
        """Whether any of its limits is about classes."""
        return any(
            limits and limits.min_agreement is not None for limits in (self, self.quantization, self.runtime)
        )


class ParityCheck:
    """Holds every output to every limit; the worst one leads."""

    Params: ClassVar[type[CheckParams]] = ParityParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        """Pass where every output judged keeps every limit; outputs that are no floats must be equal."""
        assert isinstance(params, ParityParams)
        parity = evidence.parity
        if parity is None or not parity.outputs:
            return unmeasured(
                "no parity was measured", "Run without --qdq-mode=plan, so that it is measured."
            )
        judged = params.chosen(parity.outputs)
        if not judged:
            known = ", ".join(plain(out.name, NAME_WIDTH) for out in parity.outputs[:5])
            return unmeasured("no output has a name given in outputs", f"The model's outputs: {known}.")
        failures = _failures(params, parity)
        if not failures and (why := _unknown(params, parity, judged)) is not None:
            return why
        return verdict(
            "fail" if failures else "pass",
            failures[0].words if failures else _kept(params, judged),
            _table(params, parity, judged),
            *steps_table(parity, judged[0].name),
            *(culprits_table(evidence.culprits) if params.culpable(parity) is not None else ()),
            numbers=_numbers(params, parity, judged),
            advice=advice(failures[0].output, failures[0].step, evidence.culprits) if failures else "",
        )


class _Failure(NamedTuple):
    """A limit that an output does not keep, and the step that is to blame; empty where that is not known."""

    output: str
    words: str
    step: str


def _failures(params: ParityParams, parity: ParityEvidence) -> list[_Failure]:
    """Every limit that is not kept: those of the whole first, then those of its two steps."""
    top, found = params.top.key, []
    for out in params.chosen(parity.outputs):
        found += [_blamed(out.name, words, blame(parity, out.name)) for words in broken(params, out, top)]
    for limits, outputs, step in (
        (params.quantization, parity.quantization, QUANTIZATION),
        (params.runtime, parity.runtime, RUNTIME),
    ):
        if limits is not None:
            for out in params.chosen(outputs):
                said = broken(limits, out, top)
                found += [_Failure(out.name, f"{step} alone, {words}", step) for words in said]
    return found


def _blamed(output: str, words: str, step: str) -> _Failure:
    """What does not hold, with the step that it comes from where the line has room for it."""
    longer = f"{words}, by {step}" if step else words
    return _Failure(output, longer if len(longer) <= WIDTH else words, step)


def _unknown(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> Verdict | None:
    """The verdict where something that is asked could not be measured."""
    if (params.quantization or params.runtime) and not parity.quantization and parity.undivided:
        return unmeasured(
            "quantization and runtime were not told apart",
            f"It was not possible: {plain(parity.undivided)}. Ask for limits of the whole only.",
        )
    if params.asks_agreement and not any(params.top.key in out.agreement for out in judged):
        return unmeasured(
            f"no output has more than {params.top_k} classes",
            "Name the output with the scores in outputs, and their axis in class_axis.",
        )
    return None


def _badness(out: TensorParity) -> tuple[bool, float]:
    """Sorts the worst output first: unequal ones and those that are not a number, then by SQNR."""
    lost = math.isnan(out.sqnr_db) or not out.matches
    return not lost, 0.0 if lost else out.sqnr_db


def _shown(params: ParityParams) -> tuple[Limit, ...]:
    """The columns: what every comparison has, and agreement where it is asked for."""
    return (*LIMITS, AGREEMENT) if params.asks_agreement else LIMITS


def _worst(limit: Limit, judged: list[TensorParity], top: str) -> float:
    values = [value_of(limit, out, top) for out in judged if out.compared]
    known = [value for value in values if value is not None]
    if not known or any(math.isnan(value) for value in known):
        return math.nan
    return min(known) if limit.floor else max(known)


def _numbers(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> dict[str, float]:
    """The worst of each fact; SQNR of the two steps too."""
    top = params.top.key
    found = {limit.fact: _worst(limit, judged, top) for limit in _shown(params)}
    for step, outputs in (("quantization", parity.quantization), ("runtime", parity.runtime)):
        if outputs:
            found[f"{step}_sqnr_db"] = _worst(LIMITS[0], params.chosen(outputs), top)
    return {**found, "samples": parity.samples}


def _kept(params: ParityParams, judged: list[TensorParity]) -> str:
    """The headline of a pass: every limit with the worst value that kept it."""
    if judged[0].sqnr_db == math.inf:  # the worst one
        return "every output equals the reference's"
    kept = []
    for limit in (*LIMITS, AGREEMENT):
        allowed = getattr(params, limit.param)
        if allowed is not None:
            shown, bound = limit.texts_apart(_worst(limit, judged, params.top.key), allowed)
            kept.append(f"{limit.title} {shown} {'>=' if limit.floor else '<='} {bound}")
    return ", ".join(kept[:2]) or "quantization and runtime keep their limits"


def _table(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> Section:
    shown = _shown(params)
    limits = ("limit", *(_bound(params, limit) for limit in shown), "")
    rows = [_row(params, out, shown) for out in judged]
    return Section(
        title=f"Outputs, worst first ({parity.samples} samples of {parity.data} data)",
        headers=("output", *(_title(limit, params) for limit in shown), "verdict"),
        rows=(*rows, limits),
    )


def _title(limit: Limit, params: ParityParams) -> str:
    return params.top.key if limit is AGREEMENT else limit.title


def _bound(params: ParityParams, limit: Limit) -> str:
    allowed = getattr(params, limit.param)
    return "" if allowed is None else f"{'>=' if limit.floor else '<='} {limit.text(allowed)}"


def _row(params: ParityParams, out: TensorParity, shown: tuple[Limit, ...]) -> tuple[str, ...]:
    top = params.top.key
    outcome = "fail" if any(broken(params, out, top)) else "pass"
    if not out.compared or not out.matches:
        said = plain(out.note or ("equal" if out.matches else "not equal"), 40)
        return (plain(out.name), said, *("" for _ in shown[1:]), outcome)
    values = ((limit, value_of(limit, out, top)) for limit in shown)
    return (
        plain(out.name),
        *("" if value is None else limit.text(value) for limit, value in values),
        outcome,
    )


check = ParityCheck()
