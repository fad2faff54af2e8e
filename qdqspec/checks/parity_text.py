"""Texts of the check `parity`: limits and values, outputs, where their error comes from, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qdqspec._core.units import count_text, db_text, digits_of, pair_text, plain, seconds_text, share_text
from qdqspec.checks.base import with_content
from qdqspec.types import (
    NO_NUMBER,
    NO_SIGNAL,
    CulpritEvidence,
    ParityEvidence,
    ParitySearch,
    Probe,
    Section,
    TensorParity,
)

NAME_WIDTH = 30  # characters of an output's name
_BOTH = 2.0  # steps whose error differs by less than this factor are both named
_CULPRITS = 3  # pairs that a verdict lists
_HELPS_DB = 1.0  # least gain of excluding them to advise it
_NAMED, _NODE_WIDTH = 6, 40  # nodes that the advice names
_MOST_DB = 300.0  # beyond, powers of ten exceed the range of a float
QUANTIZATION, RUNTIME = "quantization", "the runtime"
_WORDS_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit's parameter, the fact of `TensorParity` it bounds, and how both are displayed."""

    param: str
    fact: str
    title: str
    unit: str
    floor: bool  # whether the limit is the smallest value allowed, else the largest
    digits: int

    def keeps(self, value: float, allowed: float) -> bool:
        """Whether the value is within the limit; NaN never is."""
        return value >= allowed if self.floor else value <= allowed

    def value_of(self, out: TensorParity, top: str) -> float | None:
        """The value of an output; ``None`` for the agreement of an output without classes, or without slices."""
        value: float | None = out.agreement.get(top) if self is AGREEMENT else getattr(out, self.fact)
        return value

    def text(self, value: float, more: int = 0) -> str:
        """The value as text for people."""
        if not math.isfinite(value):
            return db_text(value)
        if self.unit == " %":
            return share_text(value) if not more else f"{100 * value:.{self.digits + more}f} %"
        kind = "f" if self.floor else "g"
        return f"{value:.{self.digits + more}{kind}}{self.unit}"

    def bound_text(self, allowed: float) -> str:
        """The limit as it was given."""
        return f"{'>=' if self.floor else '<='} {self.text(allowed, digits_of(self.text, allowed))}"


LIMITS = (  # in the order of preference for headlines
    Limit("min_sqnr_db", "sqnr_db", "SQNR", " dB", True, 1),
    Limit("min_cosine", "cosine", "cosine", "", True, 4),
    Limit("max_abs", "max_abs", "max difference", "", False, 3),
    Limit("max_steps", "max_steps", "max steps", "", False, 3),
)
SLICE = Limit("min_slice_sqnr_db", "slice_sqnr_db", "worst slice", " dB", True, 1)
AGREEMENT = Limit("min_agreement", "agreement", "agreement", " %", True, 1)
WHOLE = (SLICE, AGREEMENT)  # limits on all data together, which mean nothing for a single input


def worst_value(limit: Limit, outputs: Iterable[TensorParity], top: str) -> float:
    """The worst value of all outputs that have one; NaN if none has."""
    values = (limit.value_of(out, top) for out in outputs if out.compared)
    known = [value for value in values if value is not None]
    if not known or any(math.isnan(value) for value in known):
        return math.nan
    return min(known) if limit.floor else max(known)


def worst_first(outputs: Iterable[TensorParity]) -> list[TensorParity]:
    """The outputs in order: unequal ones and those with NaN, then by SQNR."""
    return sorted(
        outputs, key=lambda out: out.sqnr_db if out.matches and not math.isnan(out.sqnr_db) else -math.inf
    )


def comparison_sections(
    parity: ParityEvidence,
    title: str,
    columns: Sequence[Limit] = LIMITS,
    outputs: Sequence[TensorParity] = (),
    top: str = "",
) -> tuple[Section, ...]:
    """The difference of each output, of those given if any, and the origin of the largest.

    Slices far below their output are listed, unless the SQNR of slices is among the ``columns``.
    """
    if not parity.outputs:
        return ()
    rows, shown = [], outputs or worst_first(parity.outputs)
    for out in shown:
        values = [_text_of(limit, out, top) for limit in columns]
        if not out.compared or not out.matches:
            why = plain(out.note or ("equal" if out.matches else "not equal"), _WORDS_WIDTH)
            values = [why, *("" for _ in columns[1:])]
        rows.append((plain(out.name), *values))
    headers = ("output", *(top if limit is AGREEMENT else limit.title for limit in columns))
    far = () if SLICE in columns else slice_notes(shown)
    return with_content(
        (
            Section(title=title, headers=headers, rows=tuple(rows)),
            _definition_section(parity),
            Section(title="Slices far below their output", text="\n".join(far)),
            _steps_section(parity, shown[0].name),
        )
    )


def _text_of(limit: Limit, out: TensorParity, top: str = "") -> str:
    """The value that a limit bounds; empty if there is none, and for the cosine of one number."""
    value = limit.value_of(out, top)
    if value is None or (out.is_single and limit.fact == "cosine"):
        return ""
    where = f" ({out.worst_slice.text})" if limit is SLICE and out.worst_slice is not None else ""
    return limit.text(value) + where


def number_notes(outputs: Iterable[TensorParity]) -> Iterator[str]:
    """A line for each output that has no number to compare, or only zeros."""
    for out in outputs:
        if out.note in (NO_NUMBER, NO_SIGNAL):
            yield (
                f"output '{plain(out.name, NAME_WIDTH)}' is {out.note.removeprefix('equal: ')}, of the given model "
                "too: that it is equal proves nothing about other data"
            )


def slice_notes(outputs: Iterable[TensorParity]) -> Iterator[str]:
    """A line for each output with a slice far below the whole, with the cure."""
    for out in outputs:
        if (found := out.far_slice()) is not None:
            yield (
                f"output '{plain(out.name, NAME_WIDTH)}' has {db_text(out.sqnr_db)} dB over all, but "
                f"{found.text} has {db_text(found.sqnr_db)} dB, as where large and small values share a scale: "
                "keep the nodes that join them in float (patterns.nodes.exclude, quantize.outputs), and limit "
                "min_slice_sqnr_db of check parity"
            )


def error_source(parity: ParityEvidence, output: str) -> str:
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
        out = next(out for out in outputs if out.name == output)
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


def culprits_section(culprits: CulpritEvidence | None) -> Section:
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


def advice_of(output: str, step: str, culprits: CulpritEvidence | None) -> str:
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


def _noise(parity: ParityEvidence, output: str) -> tuple[float, ...] | None:
    """Error power over signal power of the two steps, if both are known; infinite if incomparable."""
    powers = []
    for outputs in (parity.quantization, parity.runtime):
        out = next((out for out in outputs if out.name == output), None)
        if out is None or not out.compared:
            return None
        is_known = out.matches and out.sqnr_db > -math.inf  # false for NaN
        powers.append(10.0 ** (-max(-_MOST_DB, out.sqnr_db) / 10) if is_known else math.inf)
    return tuple(powers)


def noise_shares(parity: ParityEvidence) -> dict[str, Any] | None:
    """The shares of quantization and runtime in the noise of the worst output; ``None`` if they are not known."""
    for worst in worst_first(parity.outputs)[:1]:
        noise = _noise(parity, worst.name)
        if noise is not None and 0 < sum(noise) < math.inf:
            quantization, runtime = (own / sum(noise) for own in noise)
            return {"output": worst.name, "quantization": quantization, "runtime": runtime}
    return None


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


def probe_advice(probe: Probe) -> str:
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


def search_text(found: ParitySearch) -> str:
    """The inputs that a search tried, and what it found."""
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
