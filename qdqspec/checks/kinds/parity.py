"""The check `parity`: the difference between the tuned model's outputs and the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text, plain, texts_apart
from qdqspec.checks.base import WIDTH, CheckParams, NotNegative, Whole, require_a_limit, unmeasured, verdict
from qdqspec.checks.parity_text import (
    AGREEMENT,
    LIMITS,
    NAME_WIDTH,
    QUANTIZATION,
    RUNTIME,
    SLICE,
    WHOLE,
    Limit,
    advice_of,
    comparison_sections,
    culprits_section,
    error_source,
    probe_advice,
    probe_sections,
    search_text,
    worst_first,
    worst_value,
)
from qdqspec.spec import Fraction, Number
from qdqspec.types import (
    Evidence,
    EvidenceKind,
    Outcome,
    ParityEvidence,
    Probe,
    Section,
    TensorParity,
    TopK,
    Verdict,
)
from qdqspec.types.requests import InputRequest, ParityRequest, Request

_WORST = 1e9  # the value used for NaN and infinity


class ParityLimits(BaseModel):
    """Limits on the difference of an output between two computations of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: ClassVar[tuple[str, ...]] = tuple(limit.param for limit in (*LIMITS, *WHOLE))

    min_sqnr_db: Number | None = Field(
        None, description="Smallest signal to quantization-noise ratio, in dB."
    )
    min_cosine: Number | None = Field(None, ge=-1, le=1, description="Smallest cosine similarity, at most 1.")
    max_abs: NotNegative | None = Field(
        None, description="Largest absolute difference, in the output's own unit."
    )
    max_steps: NotNegative | None = Field(
        None, description="Largest difference in steps of an 8-bit grid over the reference's range."
    )
    min_slice_sqnr_db: Number | None = Field(
        None,
        description="Smallest SQNR of a slice of the output along an axis, such as one channel, in dB.",
    )
    min_agreement: Annotated[Fraction, Field(ge=0, le=1)] | None = Field(
        None,
        description="Smallest share of the reference's `top_k` best classes that are among the tuned model's: 99%.",
    )

    def broken(self, out: TensorParity, top: str) -> Iterator[str]:
        """A message for each limit that an output exceeds."""
        name = plain(out.name, NAME_WIDTH)
        if not out.matches:
            yield f"output '{name}': {out.note or 'not equal'}"
            return
        for limit in (*LIMITS, *WHOLE):
            allowed, value = getattr(self, limit.param), limit.value_of(out, top)
            if allowed is not None and value is not None and not limit.keeps(value, allowed):
                shown, bound = texts_apart(limit.text, value, allowed)
                title = f"{top} agreement" if limit is AGREEMENT else limit.title
                if limit is SLICE and out.worst_slice is not None:
                    title = f"{out.worst_slice.text}:"
                yield f"output '{name}': {title} {shown} {'<' if limit.floor else '>'} {bound}"


class StepLimits(ParityLimits):
    """Limits for one of the two steps between the float model and the backend's result. At least one."""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names)
        return self


class SearchParams(BaseModel):
    """The range, the number of inputs and the time of a search for an input that breaks the limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    examples: Whole = Field(200, ge=1, description="Number of inputs.")
    seconds: Number = Field(60, gt=0, description="Time limit in seconds; inputs found by then are reported.")
    beyond: Number = Field(
        2,
        ge=1,
        description="Range of floats, as a multiple of the range of the calibration data.",
    )
    values: Mapping[str, tuple[Number, Number]] = Field(
        {}, description="By input, the smallest and the largest valid value; values outside are not tried."
    )

    @field_validator("values")
    @classmethod
    def _in_order(cls, values: Mapping[str, tuple[Number, Number]]) -> Mapping[str, tuple[Number, Number]]:
        for name, (low, high) in values.items():
            if not -math.inf < low <= high < math.inf:
                raise ValueError(
                    f"[{low:g}, {high:g}] for '{name}' is no range: the smaller number comes first"
                )
        return values


def _budget(value: object) -> object:
    """``200`` is a number of examples."""
    return {"examples": value} if isinstance(value, int) and not isinstance(value, bool) else value


class _Failure(NamedTuple):
    """A limit that an output exceeds, and the step that causes it; empty if unknown."""

    output: str
    words: str
    step: str


class ParityCheck(CheckParams, ParityLimits):
    """Limits on the difference of the outputs. At least one limit; every output must meet every limit."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})
    kind: Literal["parity"]
    top_k: Whole = Field(1, ge=1, description="The number of best classes that `min_agreement` compares.")
    class_axis: Whole | None = Field(
        None,
        description="The axis of the classes, for `min_agreement` (default: the last axis longer than 1).",
    )
    quantization: StepLimits | None = Field(
        None,
        description="Limits for the quantization error: the float model against the Q/DQ arithmetic as ONNX defines "
        "it.",
    )
    runtime: StepLimits | None = Field(
        None,
        description="Limits for the runtime error: the Q/DQ arithmetic against the backend's result.",
    )
    search: (
        Annotated[SearchParams, BeforeValidator(_budget, json_schema_input_type=int | SearchParams)] | None
    ) = Field(
        None,
        description="A search for inputs outside the data that break the limits: the number of inputs, or a table.",
    )
    outputs: tuple[str, ...] = Field(
        (), description="The outputs that are compared, as globs over their names (default: all)."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names, "quantization", "runtime")
        if self.search is not None and self._leading is None:
            known = ", ".join(limit.param for limit in LIMITS)
            raise ValueError(
                f"nothing to search for: give at least one of {known}, which single inputs can break"
            )
        return self

    @property
    def evidence_key(self) -> str:
        """The key of ``Evidence.parity_search`` that answers it; checks with equal parameters share one search."""
        return self.model_dump_json(exclude={"id", "severity"}, exclude_none=True)

    def broken_by(self, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
        """A message for each limit that outputs exceed."""
        found = (words for out in self.chosen(outputs) for words in self.broken(out, self.top.key))
        return (*self.unmatched(outputs), *found)

    def unmatched(self, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
        """A message for each name or glob of outputs that matches none: nothing would be judged."""
        names = [out.name for out in outputs]
        return tuple(
            f"no output has the name '{plain(glob, NAME_WIDTH)}' given in outputs{did_you_mean(glob, names)}"
            for glob in self.outputs
            if not any(fnmatchcase(name, glob) for name in names)
        )

    def error_excess(self, outputs: tuple[TensorParity, ...]) -> float:
        """The distance of an input's error from the first limit: larger is worse."""
        assert self._leading is not None
        signed = []
        for out in self.chosen(outputs):
            value = getattr(out, self._leading.fact)
            if out.compared and math.isnan(value):
                signed.append(_WORST)
            elif out.compared:
                signed.append(max(-_WORST, min(-value if self._leading.floor else value, _WORST)))
        return max(signed, default=0.0)

    def polygraphy_words(self, outputs: tuple[TensorParity, ...]) -> list[str]:
        """The options of `polygraphy run` for the limits that it knows; empty if it knows none of them.

        A limit in steps is one of the difference, by the step of each output. Outputs that must be equal and are not
        have one of zero.
        """
        chosen = {out.name: out for out in self.chosen(outputs) if out.compared}
        sqnr, cosine = dict.fromkeys(chosen, self.min_sqnr_db), dict.fromkeys(chosen, self.min_cosine)
        most: dict[str, float | None] = {}
        for name, out in chosen.items():
            steps = self.max_steps
            of_steps = None if steps is None or not out.max_steps else steps * out.max_abs / out.max_steps
            most[name] = min((each for each in (self.max_abs, of_steps) if each is not None), default=None)
        most |= {out.name: 0.0 for out in self.chosen(outputs) if not (out.compared or out.matches)}
        names, words = list[str](), list[str]()
        for name, option, others, limits in (
            ("snr", "--snr-threshold", f":{-_WORST:g}", sqnr),
            ("cosine_similarity", "--cosine-similarity-threshold", ":-1", cosine),
            ("simple", "--atol", f":{_WORST:g}", most),
        ):
            given = [f"{output}:{limit:.9g}" for output, limit in limits.items() if limit is not None]
            if given:
                names.append(name)
                words += [option, others, *given]
        exact = ["--rtol", "0", "--check-error-stat", "max"] if "simple" in names else []
        return ["--compare", *names, *words, *exact] if names else []

    @property
    def _leading(self) -> Limit | None:
        return next((limit for limit in LIMITS if getattr(self, limit.param) is not None), None)

    @property
    def top(self) -> TopK:
        """The parameters of the agreement that the evidence must contain."""
        return TopK(k=self.top_k, axis=self.class_axis)

    def chosen(self, outputs: tuple[TensorParity, ...]) -> list[TensorParity]:
        """The outputs that the check applies to, the worst first."""
        globs = self.outputs or ("*",)
        named = (out for out in outputs if any(fnmatchcase(out.name, glob) for glob in globs))
        return worst_first(named)

    def asks(self, limit: Limit) -> bool:
        """Whether any of its limits is this one."""
        every = (self, self.quantization, self.runtime)
        return any(limits and getattr(limits, limit.param) is not None for limits in every)

    def requests(self) -> tuple[Request, ...]:
        """The comparison, the pairs that cost most if quantization breaks a limit, and the search for an input."""
        compared = ParityRequest(
            top=self.top,
            culpable=self.culpable_output,
            limits_slices=self.asks(SLICE),
            key=self.evidence_key,
            limits=self,
        )
        if self.search is None:
            return (compared,)
        return compared, InputRequest(key=self.evidence_key, limits=self, **dict(self.search))

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if each chosen output keeps each limit; outputs that are not floats must be equal."""
        parity = evidence.parity
        if parity is None or not parity.outputs:
            return unmeasured("no parity was measured", "Run the case again, so that it is measured.")
        if unmatched := self.unmatched(parity.outputs):
            known = ", ".join(plain(out.name, NAME_WIDTH) for out in parity.outputs[:5])
            return verdict("fail", unmatched[0], advice=f"Correct it. The model's outputs: {known}.")
        judged = self.chosen(parity.outputs)
        failures = self._failures(parity)
        searched = evidence.parity_search.get(self.evidence_key) if self.search is not None else None
        # failures on the data take precedence over failures that a search found
        outcome: Outcome = "fail"
        if failures:
            first = failures[0]
            headline, advice = first.words, advice_of(first.output, first.step, evidence.culprits)
        elif (missing := self._judge_unmeasured(evidence, parity, judged)) is not None:
            return missing
        elif searched is not None and searched.found is not None:
            headline, advice = (
                f"for an input found: {searched.found.broken[0]}",
                probe_advice(searched.found),
            )
        else:
            tried = f"; {searched.tried} inputs tried" if searched is not None and searched.tried else ""
            outcome, headline, advice = "pass", self._pass_headline(judged) + tried, ""
        top, steps = self.top.key, {"quantization": parity.quantization, "runtime": parity.runtime}
        columns = (*LIMITS, *(limit for limit in WHOLE if self.asks(limit)))
        title = f"Outputs, worst first ({count_text(parity.samples, 'input')} of {parity.data} data)"
        table, *origins = comparison_sections(parity, title, columns, judged, top)
        return verdict(
            outcome,
            headline,
            self._with_verdicts(table, judged, columns),
            *origins,
            *([culprits_section(evidence.culprits)] if any(one.step != RUNTIME for one in failures) else []),
            Section(title="Search", text=search_text(searched) if searched else ""),
            *(probe_sections(searched.found) if searched and searched.found else ()),
            Section(
                title="The worst input with Polygraphy", text=evidence.replays.get(self.evidence_key, "")
            ),
            numbers={
                **{limit.fact: worst_value(limit, judged, top) for limit in columns},
                **{
                    f"{step}_sqnr_db": worst_value(LIMITS[0], self.chosen(steps[step]), top) for step in steps
                },
                "samples": parity.samples,
                "inputs_tried": searched.tried if searched else math.nan,
            },
            advice=advice,
        )

    def culpable_output(self, parity: ParityEvidence) -> str | None:
        """The first failing output that quantization contributes to; ``None`` if there is none."""
        found = (failure.output for failure in self._failures(parity) if failure.step != RUNTIME)
        return next(found, None)

    def broken_limits(self, parity: ParityEvidence) -> tuple[str, ...]:
        """A message for each exceeded limit: of the whole, of quantization and of the runtime; first, wrong names."""
        failures = self._failures(parity)
        return (*self.unmatched(parity.outputs), *(failure.words for failure in failures))

    def _failures(self, parity: ParityEvidence) -> list[_Failure]:
        """Each exceeded limit: limits of the total difference first, then limits of the two steps."""
        found = []
        for limits, outputs, alone in (
            (self, parity.outputs, ""),
            (self.quantization, parity.quantization, QUANTIZATION),
            (self.runtime, parity.runtime, RUNTIME),
        ):
            if limits is None:
                continue
            for out in self.chosen(outputs):
                step = alone or error_source(parity, out.name)
                for words in limits.broken(out, self.top.key):
                    by = f"{words}, by {step}" if step and len(f"{words}, by {step}") <= WIDTH else words
                    found.append(_Failure(out.name, f"{alone} alone, {words}" if alone else by, step))
        return found

    def _judge_unmeasured(
        self, evidence: Evidence, parity: ParityEvidence, judged: list[TensorParity]
    ) -> Verdict | None:
        """The verdict if something requested could not be measured, or no input be searched."""
        if (self.quantization or self.runtime) and not parity.quantization and parity.undivided:
            return unmeasured(
                "quantization and runtime errors were not measured separately",
                f"It was not possible: {plain(parity.undivided)}. Give limits of the total difference only.",
            )
        limits = [limit.param for limit in (*LIMITS, *WHOLE) if self.asks(limit)]
        if limits == ["min_cosine"] and all(out.is_single and out.sqnr_db < math.inf for out in judged):
            return unmeasured(
                "each output is one number, whose cosine is always 1 or -1", "Give min_sqnr_db or max_abs."
            )
        if self.asks(SLICE) and all(out.slice_sqnr_db is None for out in judged):
            return unmeasured(
                "no output has a slice with enough values",
                "Give more samples (inputs.evaluation), or remove min_slice_sqnr_db.",
            )
        if self.asks(AGREEMENT) and not any(self.top.key in out.agreement for out in judged):
            axis = "" if self.class_axis is None else f" along axis {self.class_axis}"
            return verdict(
                "fail",
                f"no output has more than {count_text(self.top_k, 'class', 'classes')}{axis}: nothing to judge",
                advice="Name the output with the scores in outputs, and their axis in class_axis.",
            )
        searched = evidence.parity_search.get(self.evidence_key)
        if self.search is not None and evidence.status != "unchanged" and not (searched and searched.tried):
            why = f": {plain(searched.missing)}" if searched is not None and searched.missing else ""
            return unmeasured(
                "no input could be searched", f"The data breaks no limit, and no other input was tried{why}."
            )
        return None

    def _pass_headline(self, judged: list[TensorParity]) -> str:
        """The headline of a pass: each limit with the worst value that kept it."""
        if judged[0].sqnr_db == math.inf:  # the worst output
            return "every output equals the reference's"
        kept = []
        for limit in (*LIMITS, *WHOLE):
            allowed = getattr(self, limit.param)
            if allowed is not None:
                shown, bound = texts_apart(limit.text, worst_value(limit, judged, self.top.key), allowed)
                kept.append(f"{limit.title} {shown} {'>=' if limit.floor else '<='} {bound}")
        return ", ".join(kept[:2]) or "quantization and runtime keep their limits"

    def _with_verdicts(
        self, table: Section, judged: list[TensorParity], columns: tuple[Limit, ...]
    ) -> Section:
        """The table of outputs with the verdict of each, and the limits."""
        verdicts = ("fail" if any(self.broken(out, self.top.key)) else "pass" for out in judged)
        rows = [(*row, word) for row, word in zip(table.rows, verdicts, strict=True)]
        allowed = ((limit, getattr(self, limit.param)) for limit in columns)
        bounds = ("" if most is None else limit.bound_text(most) for limit, most in allowed)
        return replace(table, headers=(*table.headers, "verdict"), rows=(*rows, ("limit", *bounds, "")))


def compared_sections(probe: Probe, limits: Iterable[ParityCheck]) -> tuple[Section, ...]:
    """A single input with its outputs, or the outputs on all data, with slices if one of the ``limits`` has one."""
    if probe.inputs:
        return probe_sections(probe)
    parity = probe.parity
    title = f"Outputs, worst first ({parity.samples} samples of {parity.data} data)"
    columns = (*LIMITS, SLICE) if any(one.asks(SLICE) for one in limits) else LIMITS
    return comparison_sections(parity, title, columns)


check = ParityCheck
