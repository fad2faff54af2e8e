"""The check `parity`: the difference between the tuned model's outputs and the reference's."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, NamedTuple

from qdqspec.checks._parity_params import (
    AGREEMENT,
    LIMITS,
    NAME_WIDTH,
    Limit,
    ParityParams,
    SearchParams,
    broken,
    value_of,
)
from qdqspec.checks._parity_text import (
    QUANTIZATION,
    RUNTIME,
    advice,
    blame,
    comparison_sections,
    culprits_table,
    probe_sections,
    search_advice,
    search_sections,
    steps_table,
)
from qdqspec.checks.base import CheckParams
from qdqspec.checks.verdicts import WIDTH, is_unchanged, unmeasured, verdict
from qdqspec.types import (
    Evidence,
    EvidenceKind,
    Outcome,
    ParityEvidence,
    ParitySearch,
    Section,
    TensorParity,
    Verdict,
)
from qdqspec.types.requests import InputRequest, ParityRequest, Request
from qdqspec.units import count_text, plain

__all__ = [
    "ParityCheck",
    "ParityParams",
    "SearchParams",
    "check",
    "comparison_sections",
    "culpable_output",
    "probe_sections",
]


class ParityCheck:
    """Compares each output with each limit; the worst output makes the headline."""

    Params: ClassVar[type[CheckParams]] = ParityParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})

    def requests(self, params: CheckParams) -> tuple[Request, ...]:
        """The comparison, the pairs that cost most if quantization breaks a limit, and the search for an input."""
        assert isinstance(params, ParityParams)
        compared = ParityRequest(top=params.top, culpable=partial(culpable_output, params))
        return compared, *(() if params.search is None else (_input_request(params, params.search),))

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        """Pass if each chosen output keeps each limit; outputs that are not floats must be equal."""
        assert isinstance(params, ParityParams)
        parity = evidence.parity
        if parity is None or not parity.outputs:
            return unmeasured("no parity was measured", "Run the case again, so that it is measured.")
        judged = params.chosen(parity.outputs)
        if not judged:
            known = ", ".join(plain(out.name, NAME_WIDTH) for out in parity.outputs[:5])
            return unmeasured("no output has a name given in outputs", f"The model's outputs: {known}.")
        failures = _failures(params, parity)
        searched = evidence.parity_search.get(params.evidence_key) if params.search is not None else None
        if (
            not failures
            and (why := _unknown(params, parity, judged) or _unsearched(params, evidence)) is not None
        ):
            return why
        outcome, headline, advised = _conclusion(params, evidence, judged, failures, searched)
        return verdict(
            outcome,
            headline,
            _table(params, parity, judged),
            *steps_table(parity, judged[0].name),
            *(culprits_table(evidence.culprits) if culpable_output(params, parity) is not None else ()),
            *(search_sections(searched) if searched is not None else ()),
            numbers={
                **_numbers(params, parity, judged),
                "inputs_tried": searched.tried if searched else math.nan,
            },
            advice=advised,
        )


def _input_request(params: ParityParams, search: SearchParams) -> InputRequest:
    return InputRequest(
        key=params.evidence_key,
        limits=params,
        examples=search.examples,
        seconds=search.seconds,
        beyond=search.beyond,
        values=search.values,
    )


def _conclusion(
    params: ParityParams,
    evidence: Evidence,
    judged: list[TensorParity],
    failures: list[_Failure],
    searched: ParitySearch | None,
) -> tuple[Outcome, str, str]:
    """Outcome, headline and advice: failures on the data take precedence over those that a search found."""
    if failures:
        first = failures[0]
        return "fail", first.words, advice(first.output, first.step, evidence.culprits)
    if searched is not None and searched.found is not None:
        return "fail", f"for an input found: {searched.found.broken[0]}", search_advice(searched.found)
    tried = f"; {searched.tried} inputs tried" if searched is not None and searched.tried else ""
    return "pass", _kept(params, judged) + tried, ""


def _unsearched(params: ParityParams, evidence: Evidence) -> Verdict | None:
    """The verdict if a search was requested and could not be made."""
    if params.search is None or is_unchanged(evidence):
        return None
    searched = evidence.parity_search.get(params.evidence_key)
    if searched is not None and searched.tried:
        return None
    why = f": {plain(searched.missing)}" if searched is not None and searched.missing else ""
    return unmeasured(
        "no input could be searched", f"The data breaks no limit, and no other input was tried{why}."
    )


def culpable_output(params: ParityParams, parity: ParityEvidence) -> str | None:
    """The first failing output that quantization contributes to; ``None`` if there is none."""
    found = (failure.output for failure in _failures(params, parity) if failure.step != RUNTIME)
    return next(found, None)


class _Failure(NamedTuple):
    """A limit that an output exceeds, and the step that causes it; empty if unknown."""

    output: str
    words: str
    step: str


def _failures(params: ParityParams, parity: ParityEvidence) -> list[_Failure]:
    """Each exceeded limit: those of the whole first, then those of the two steps."""
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
    """A failure, with the step that causes it if the line is short enough."""
    longer = f"{words}, by {step}" if step else words
    return _Failure(output, longer if len(longer) <= WIDTH else words, step)


def _unknown(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> Verdict | None:
    """The verdict if something requested could not be measured."""
    if (params.quantization or params.runtime) and not parity.quantization and parity.undivided:
        return unmeasured(
            "quantization and runtime errors were not measured separately",
            f"It was not possible: {plain(parity.undivided)}. Give limits of the total difference only.",
        )
    if params.asks_agreement and not any(params.top.key in out.agreement for out in judged):
        return unmeasured(
            f"no output has more than {params.top_k} classes",
            "Name the output with the scores in outputs, and their axis in class_axis.",
        )
    return None


def _shown(params: ParityParams) -> tuple[Limit, ...]:
    """The columns: the facts of each comparison, and agreement if requested."""
    return (*LIMITS, AGREEMENT) if params.asks_agreement else LIMITS


def _worst(limit: Limit, judged: list[TensorParity], top: str) -> float:
    values = [value_of(limit, out, top) for out in judged if out.compared]
    known = [value for value in values if value is not None]
    if not known or any(math.isnan(value) for value in known):
        return math.nan
    return min(known) if limit.floor else max(known)


def _numbers(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> dict[str, float]:
    """The worst value of each fact; also the SQNR of the two steps."""
    top = params.top.key
    found = {limit.fact: _worst(limit, judged, top) for limit in _shown(params)}
    for step, outputs in (("quantization", parity.quantization), ("runtime", parity.runtime)):
        if outputs:
            found[f"{step}_sqnr_db"] = _worst(LIMITS[0], params.chosen(outputs), top)
    return {**found, "samples": parity.samples}


def _kept(params: ParityParams, judged: list[TensorParity]) -> str:
    """The headline of a pass: each limit with the worst value that kept it."""
    if judged[0].sqnr_db == math.inf:  # the worst output
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
        title=f"Outputs, worst first ({count_text(parity.samples, 'input')} of {parity.data} data)",
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
