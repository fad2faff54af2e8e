"""The check `parity`: the difference between the tuned model's outputs and the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from qdqspec._core.units import count_text, db_text, pair_text, plain, seconds_text, share_text, texts_apart
from qdqspec.accuracy import NAME_WIDTH, slice_notes, slice_text
from qdqspec.checks.base import WIDTH, CheckParams, unmeasured, verdict, with_content
from qdqspec.checks.parity_params import AGREEMENT, LIMITS, SLICE, WHOLE, Limit, ParityParams, broken
from qdqspec.types import (
    CulpritEvidence,
    Evidence,
    EvidenceKind,
    Outcome,
    ParityEvidence,
    ParitySearch,
    Probe,
    Section,
    TensorParity,
    Verdict,
)
from qdqspec.types.requests import InputRequest, ParityRequest, Request

_BOTH = 2.0  # steps whose error differs by less than this factor are both named
_CULPRITS = 3  # pairs that a verdict lists
_HELPS_DB = 1.0  # least gain of excluding them to advise it
_NAMED, _NODE_WIDTH = 6, 40  # nodes that the advice names
_MOST_DB = 300.0  # beyond, powers of ten exceed the range of a float
QUANTIZATION, RUNTIME = "quantization", "the runtime"
_WORDS_WIDTH = 60


class ParityCheck:
    """Compares each output with each limit; the worst output makes the headline."""

    Params: ClassVar[type[CheckParams]] = ParityParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})

    def requests(self, params: ParityParams) -> tuple[Request, ...]:
        """The comparison, the pairs that cost most if quantization breaks a limit, and the search for an input."""
        compared = ParityRequest(
            top=params.top,
            culpable=partial(culpable_output, params),
            limits_slices=params.asks(SLICE),
            key=params.evidence_key,
            limits=params,
        )
        if params.search is None:
            return (compared,)
        return compared, InputRequest(key=params.evidence_key, limits=params, **dict(params.search))

    def judge(self, params: ParityParams, evidence: Evidence) -> Verdict:
        """Pass if each chosen output keeps each limit; outputs that are not floats must be equal."""
        parity = evidence.parity
        if parity is None or not parity.outputs:
            return unmeasured("no parity was measured", "Run the case again, so that it is measured.")
        if unmatched := params.unmatched(parity.outputs):
            known = ", ".join(plain(out.name, NAME_WIDTH) for out in parity.outputs[:5])
            return verdict("fail", unmatched[0], advice=f"Correct it. The model's outputs: {known}.")
        judged = params.chosen(parity.outputs)
        failures = _find_failures(params, parity)
        searched = evidence.parity_search.get(params.evidence_key) if params.search is not None else None
        # failures on the data take precedence over failures that a search found
        outcome: Outcome = "fail"
        if failures:
            first = failures[0]
            headline, advice = first.words, _advice(first.output, first.step, evidence.culprits)
        elif (missing := _judge_unmeasured(params, evidence, parity, judged)) is not None:
            return missing
        elif searched is not None and searched.found is not None:
            headline, advice = (
                f"for an input found: {searched.found.broken[0]}",
                _probe_advice(searched.found),
            )
        else:
            tried = f"; {searched.tried} inputs tried" if searched is not None and searched.tried else ""
            outcome, headline, advice = "pass", _pass_headline(params, judged) + tried, ""
        top, steps = params.top.key, {"quantization": parity.quantization, "runtime": parity.runtime}
        return verdict(
            outcome,
            headline,
            _outputs_section(params, parity, judged),
            _definition_section(parity),
            *([] if params.asks(SLICE) else [_slices_section(judged)]),
            _steps_section(parity, judged[0].name),
            *([_culprits_section(evidence.culprits)] if any(one.step != RUNTIME for one in failures) else []),
            Section(title="Search", text=_search_text(searched) if searched else ""),
            *(probe_sections(searched.found) if searched and searched.found else ()),
            Section(
                title="The worst input with Polygraphy", text=evidence.replays.get(params.evidence_key, "")
            ),
            numbers={
                **{limit.fact: _worst_value(limit, judged, top) for limit in _choose_columns(params)},
                **{
                    f"{step}_sqnr_db": _worst_value(LIMITS[0], params.chosen(steps[step]), top)
                    for step in steps
                },
                "samples": parity.samples,
                "inputs_tried": searched.tried if searched else math.nan,
            },
            advice=advice,
        )


def culpable_output(params: ParityParams, parity: ParityEvidence) -> str | None:
    """The first failing output that quantization contributes to; ``None`` if there is none."""
    found = (failure.output for failure in _find_failures(params, parity) if failure.step != RUNTIME)
    return next(found, None)


def broken_limits(params: ParityParams, parity: ParityEvidence) -> tuple[str, ...]:
    """A message for each exceeded limit: of the whole, of quantization and of the runtime; first, wrong names."""
    failures = _find_failures(params, parity)
    return (*params.unmatched(parity.outputs), *(failure.words for failure in failures))


class _Failure(NamedTuple):
    """A limit that an output exceeds, and the step that causes it; empty if unknown."""

    output: str
    words: str
    step: str


def _find_failures(params: ParityParams, parity: ParityEvidence) -> list[_Failure]:
    """Each exceeded limit: limits of the total difference first, then limits of the two steps."""
    found = []
    for limits, outputs, alone in (
        (params, parity.outputs, ""),
        (params.quantization, parity.quantization, QUANTIZATION),
        (params.runtime, parity.runtime, RUNTIME),
    ):
        if limits is None:
            continue
        for out in params.chosen(outputs):
            step = alone or _error_source(parity, out.name)
            for words in broken(limits, out, params.top.key):
                by = f"{words}, by {step}" if step and len(f"{words}, by {step}") <= WIDTH else words
                found.append(_Failure(out.name, f"{alone} alone, {words}" if alone else by, step))
    return found


def _judge_unmeasured(
    params: ParityParams, evidence: Evidence, parity: ParityEvidence, judged: list[TensorParity]
) -> Verdict | None:
    """The verdict if something requested could not be measured, or no input be searched."""
    if (params.quantization or params.runtime) and not parity.quantization and parity.undivided:
        return unmeasured(
            "quantization and runtime errors were not measured separately",
            f"It was not possible: {plain(parity.undivided)}. Give limits of the total difference only.",
        )
    limits = [limit.param for limit in (*LIMITS, *WHOLE) if params.asks(limit)]
    if limits == ["min_cosine"] and all(out.is_single and out.sqnr_db < math.inf for out in judged):
        return unmeasured(
            "each output is one number, whose cosine is always 1 or -1", "Give min_sqnr_db or max_abs."
        )
    if params.asks(SLICE) and all(out.slice_sqnr_db is None for out in judged):
        return unmeasured(
            "no output has a slice with enough values",
            "Give more samples (inputs.evaluation), or remove min_slice_sqnr_db.",
        )
    if params.asks(AGREEMENT) and not any(params.top.key in out.agreement for out in judged):
        axis = "" if params.class_axis is None else f" along axis {params.class_axis}"
        return verdict(
            "fail",
            f"no output has more than {count_text(params.top_k, 'class', 'classes')}{axis}: nothing to judge",
            advice="Name the output with the scores in outputs, and their axis in class_axis.",
        )
    searched = evidence.parity_search.get(params.evidence_key)
    if params.search is not None and evidence.status != "unchanged" and not (searched and searched.tried):
        why = f": {plain(searched.missing)}" if searched is not None and searched.missing else ""
        return unmeasured(
            "no input could be searched", f"The data breaks no limit, and no other input was tried{why}."
        )
    return None


def _choose_columns(params: ParityParams) -> tuple[Limit, ...]:
    """The columns: facts of each comparison, and facts of all data together if the check limits them."""
    return (*LIMITS, *(limit for limit in WHOLE if params.asks(limit)))


def _worst_value(limit: Limit, judged: list[TensorParity], top: str) -> float:
    values = (limit.value_of(out, top) for out in judged if out.compared)
    known = [value for value in values if value is not None]
    if not known or any(math.isnan(value) for value in known):
        return math.nan
    return min(known) if limit.floor else max(known)


def _pass_headline(params: ParityParams, judged: list[TensorParity]) -> str:
    """The headline of a pass: each limit with the worst value that kept it."""
    if judged[0].sqnr_db == math.inf:  # the worst output
        return "every output equals the reference's"
    kept = []
    for limit in (*LIMITS, *WHOLE):
        allowed = getattr(params, limit.param)
        if allowed is not None:
            shown, bound = texts_apart(limit.text, _worst_value(limit, judged, params.top.key), allowed)
            kept.append(f"{limit.title} {shown} {'>=' if limit.floor else '<='} {bound}")
    return ", ".join(kept[:2]) or "quantization and runtime keep their limits"


def _outputs_section(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> Section:
    shown, top = _choose_columns(params), params.top.key
    rows = [
        (*_output_row(out, shown, top, 40), "fail" if any(broken(params, out, top)) else "pass")
        for out in judged
    ]
    bounds = []
    for limit in shown:
        allowed = getattr(params, limit.param)
        bounds.append("" if allowed is None else f"{'>=' if limit.floor else '<='} {limit.own_text(allowed)}")
    return Section(
        title=f"Outputs, worst first ({count_text(parity.samples, 'input')} of {parity.data} data)",
        headers=("output", *(top if limit is AGREEMENT else limit.title for limit in shown), "verdict"),
        rows=(*rows, ("limit", *bounds, "")),
    )


def _output_row(out: TensorParity, shown: tuple[Limit, ...], top: str, width: int) -> tuple[str, ...]:
    """An output and its values; in place of the first, within ``width``, why there are none."""
    if not out.compared or not out.matches:
        why = plain(out.note or ("equal" if out.matches else "not equal"), width)
        return (plain(out.name), why, *("" for _ in shown[1:]))
    return (plain(out.name), *(_text_of(limit, out, top) for limit in shown))


def _text_of(limit: Limit, out: TensorParity, top: str = "") -> str:
    """The value that a limit bounds; empty if there is none, and for the cosine of one number."""
    value = limit.value_of(out, top)
    if value is None or (out.is_single and limit.fact == "cosine"):
        return ""
    where = f" ({slice_text(out.worst_slice)})" if limit is SLICE and out.worst_slice is not None else ""
    return limit.text(value) + where


def _slices_section(outputs: Iterable[TensorParity]) -> Section:
    return Section(title="Slices far below their output", text="\n".join(slice_notes(outputs)))


def _error_source(parity: ParityEvidence, output: str) -> str:
    """``quantization``, ``the runtime``, or both; empty if they were not measured separately."""
    noise = _noise(parity, output)
    if noise is None or max(noise) == 0:
        return ""
    quantization, runtime = noise
    if quantization >= _BOTH * runtime:
        return QUANTIZATION
    return RUNTIME if runtime >= _BOTH * quantization else "quantization and runtime"


def _steps_section(parity: ParityEvidence, output: str) -> Section:
    """The steps from the float model to the backend's result, for one output, with the error of each."""
    noise = _noise(parity, output)
    if noise is None:
        title = "Quantization error and runtime error were not measured separately"
        return Section(title=title, text=plain(parity.undivided, 200))
    rows, whole = [], sum(noise)
    definition = parity.definition
    first = "float model" if definition is None or definition.holds else "definition of the given model"
    for name, outputs, own in (
        (f"quantization: {first} > Q/DQ arithmetic", parity.quantization, noise[0]),
        ("runtime: Q/DQ arithmetic > as it runs", parity.runtime, noise[1]),
        (f"both: {first} > as it runs", parity.outputs, None),
    ):
        out = _named(outputs, output)
        assert out is not None
        share = "" if own is None or not 0 < whole < math.inf else share_text(own / whole)
        rows.append((name, *(_text_of(limit, out) for limit in LIMITS), share))
    return Section(
        title=f"Where the difference of '{plain(output, NAME_WIDTH)}' comes from",
        headers=("step", *(limit.title for limit in LIMITS), "of the noise"),
        rows=tuple(rows),
    )


def _definition_section(parity: ParityEvidence) -> Section:
    """A text if the backend does not compute the given model itself as ONNX defines it."""
    found, text = parity.definition, ""
    if found is not None and not found.holds:
        node = f", first at {plain(found.node, _WORDS_WIDTH)}" if found.node else ""
        text = (
            f"{found.sqnr_db:.1f} dB against its definition in ONNX at output '{plain(found.output, NAME_WIDTH)}' on "
            f"{count_text(found.samples, 'sample')}{node}. All figures compare with the definition."
        )
    return Section(title="The given model as it runs here", text=text)


def _culprits_section(culprits: CulpritEvidence | None) -> Section:
    """The pairs that cost most, and the gain of keeping their nodes in float."""
    found, rows = culprits or CulpritEvidence(), []
    for pair in found.pairs[:_CULPRITS]:
        without = "" if pair.without_db is None else f"{pair.without_db:.1f} dB"
        rows.append((pair_text(pair.site), f"{pair.alone_db:.1f} dB", share_text(pair.share), without))
    return Section(
        title=f"Noisiest of {count_text(found.total, 'Q/DQ pair')} at '{plain(found.output, NAME_WIDTH)}' "
        f"({found.together_db:.1f} dB together, over {count_text(found.samples, 'sample')})",
        headers=("pair", "alone", "of the noise", "without these nodes so far"),
        rows=tuple(rows),
    )


def _advice(output: str, step: str, culprits: CulpritEvidence | None) -> str:
    """Advice for an output, by the step and the pairs that cause its error.

    Nodes to exclude are readers of the noisiest pairs if that helps, else those before the output.
    """
    name = plain(output, NAME_WIDTH)
    if step == RUNTIME:
        return (
            f"The Q/DQ arithmetic of '{name}' is within the limit, but the runtime's result differs from it: "
            f"the runtime saturates, rounds or fuses otherwise. `qdqspec explain` shows what runs in integers, "
            f"`qdqspec lint` what may saturate. Exclude these nodes (patterns.nodes.exclude), or reduce the "
            f"runtime's optimizations (--qdq-backend-option)."
        )
    found = culprits.pairs[:_CULPRITS] if culprits is not None else ()
    gains = [culprit.without_db for culprit in found if culprit.without_db is not None]
    if culprits is None or not gains or max(gains) < culprits.together_db + _HELPS_DB:
        spread = "The noise is not caused by a few pairs: exclude" if gains else "Exclude"
        cure = (
            f"{spread} layers before it (patterns.nodes.exclude; qdqspec explain CASE --culprits lists pairs)"
        )
    else:
        worst = found[: gains.index(max(gains)) + 1]
        nodes = dict.fromkeys(plain(node, _NODE_WIDTH) for culprit in worst for node in culprit.nodes)
        named = list(nodes)[:_NAMED] + [f"{len(nodes) - _NAMED} more"] * (len(nodes) > _NAMED)
        ways = [f"exclude {', '.join(named)} (patterns.nodes.exclude)"] if nodes else []
        if any(culprit.makes_output for culprit in worst):
            ways.append("leave graph outputs in float (quantize.outputs)")
        cure = f"For {max(gains):.1f} dB {' and '.join(ways)}"
    where = " in its Q/DQ arithmetic, before any runtime" if step == QUANTIZATION else ""
    return (
        f"Output '{name}' has the largest difference{where}. {cure}, "
        "set tune.min_sqnr_db, try another quantize.calibration, or relax the limit."
    )


def _noise(parity: ParityEvidence, output: str) -> tuple[float, float] | None:
    """Error power over signal power of the two steps, if both are known; infinite if incomparable."""
    powers = []
    for out in (_named(parity.quantization, output), _named(parity.runtime, output)):
        if out is None or not out.compared:
            return None
        if not out.matches or not out.sqnr_db > -math.inf:  # also true for NaN
            powers.append(math.inf)
        else:
            within = max(-_MOST_DB, min(out.sqnr_db, _MOST_DB))
            powers.append(0.0 if out.sqnr_db == math.inf else 10.0 ** (-within / 10))
    quantization, runtime = powers
    return quantization, runtime


def _named(outputs: tuple[TensorParity, ...], name: str) -> TensorParity | None:
    return next((out for out in outputs if out.name == name), None)


def noise_shares(parity: ParityEvidence) -> dict[str, Any] | None:
    """The shares of quantization and runtime in the noise of the worst output; ``None`` if they are not known."""
    worst = min(parity.outputs, key=lambda out: (out.matches, out.sqnr_db), default=None)
    noise = None if worst is None else _noise(parity, worst.name)
    if worst is None or noise is None or not 0 < sum(noise) < math.inf:
        return None
    quantization, runtime = (own / sum(noise) for own in noise)
    return {"output": worst.name, "quantization": quantization, "runtime": runtime}


def probe_sections(probe: Probe) -> tuple[Section, ...]:
    """An input, its outputs, the origin of the difference, and how to reproduce it."""
    rows = tuple(
        (
            plain(one.name, NAME_WIDTH),
            f"{one.dtype} [{', '.join(map(str, one.shape))}]",
            plain(one.words, _WORDS_WIDTH),
            f"{one.low:.5g} to {one.high:.5g}",
            f"{one.known_low:.5g} to {one.known_high:.5g}",
        )
        for one in probe.inputs
    )
    tried = Section(
        title=f"The input ({count_text(len(rows), 'array')})",
        headers=("input", "type", "values", "range", "in the calibration data"),
        rows=rows,
    )
    kept = Section(title=f"Kept in {plain(probe.file, 100)}; try it again with", text=probe.command)
    outputs = comparison_sections(probe.parity, "Outputs for this input, worst first")
    return with_content((tried, *outputs, kept))


def _probe_advice(probe: Probe) -> str:
    """Advice about an input that breaks the limits."""
    if probe.within:
        return (
            "All its values are within the range of the calibration data: add such inputs to it, exclude layers "
            "(patterns.nodes.exclude), or relax the limit. State the valid range of inputs in search.values."
        )
    beyond = next(one for one in probe.inputs if not one.within)
    name = plain(beyond.name, NAME_WIDTH)
    low, high = f"{beyond.known_low:.5g}", f"{beyond.known_high:.5g}"
    return (
        f"Input '{name}' is outside the range of the calibration data ({low} to {high}). If such inputs do not occur, "
        f"state the valid range: search: {{values: {{{name}: [{low}, {high}]}}}}; if they do, calibrate with data that "
        "contains them."
    )


def _search_text(found: ParitySearch) -> str:
    if not found.tried:
        return f"No input was tried: {plain(found.missing, 200)}."
    over = ", when the time was over" if found.late else ""
    text = (
        f"{count_text(found.tried, 'input')} tried in {seconds_text(found.seconds)}{over}, beside the data."
    )
    if found.found is None:
        closest = f" The smallest SQNR was {db_text(found.closest_db)} dB."
        return f"{text} None broke a limit.{closest if math.isfinite(found.closest_db) else ''}"
    where = "within" if found.found.within else "beyond"
    return f"{text} The smallest that breaks a limit is {where} the range of the calibration data."


def comparison_sections(parity: ParityEvidence, title: str, *, slices: bool = False) -> tuple[Section, ...]:
    """The difference of each output, with or without limits, and the origin of the largest.

    ``slices``: slices of the outputs have a limit, and their SQNR is shown; else slices far below their output are.
    """
    if not parity.outputs:
        return ()
    ordered = sorted(parity.outputs, key=lambda out: (out.matches, out.sqnr_db))
    shown = (*LIMITS, SLICE) if slices else LIMITS
    rows = [_output_row(out, shown, "", _WORDS_WIDTH) for out in ordered]
    outputs = Section(title=title, headers=("output", *(limit.title for limit in shown)), rows=tuple(rows))
    far = _slices_section(() if slices else ordered)
    return with_content((outputs, _definition_section(parity), far, _steps_section(parity, ordered[0].name)))


check = ParityCheck()
