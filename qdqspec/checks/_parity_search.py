"""Renders the result of a search for inputs that break the limits."""

from __future__ import annotations

import math

from qdqspec.checks._parity_limits import LIMITS, NAME_WIDTH
from qdqspec.checks._parity_words import steps_table
from qdqspec.types import ParityEvidence, ParitySearch, Probe, Section, TriedInput
from qdqspec.units import count_text, db_text, plain, seconds_text

_WORDS_WIDTH = 60


def search_sections(found: ParitySearch) -> tuple[Section, ...]:
    """The inputs tried; for an input that breaks the limits all details, and how to reproduce it."""
    summary = Section(title="Search", text=_summary(found))
    return (summary,) if found.found is None else (summary, *probe_sections(found.found))


def probe_sections(probe: Probe) -> tuple[Section, ...]:
    """An input, its outputs, the origin of the difference, and how to reproduce it."""
    found = [_inputs(probe)] if probe.inputs else []
    found += comparison_sections(probe.parity, "What comes out for it, worst first")
    if probe.command:
        found.append(
            Section(title=f"Kept in {plain(probe.file, 100)}; try it again with", text=probe.command)
        )
    return tuple(found)


def search_advice(probe: Probe) -> str:
    """Advice about an input that breaks the limits."""
    if probe.within:
        return (
            "Its values are all within what the calibration data has: give the calibration such inputs, exclude "
            "layers (patterns.nodes.exclude), or accept less. Say in search.values what inputs there are."
        )
    beyond = next(one for one in probe.inputs if not one.within)
    name = plain(beyond.name, NAME_WIDTH)
    return (
        f"Input '{name}' leaves what the calibration data has ({_range(beyond)}). Where such inputs never come, say "
        f"so: search: {{values: {{{name}: [{beyond.known_low:.5g}, {beyond.known_high:.5g}]}}}}; where they do, "
        "calibrate with data that has them."
    )


def _summary(found: ParitySearch) -> str:
    if not found.tried:
        return f"No input was tried: {plain(found.missing, 200)}."
    over = ", when the time was over" if found.late else ""
    text = (
        f"{count_text(found.tried, 'input')} tried in {seconds_text(found.seconds)}{over}, beside the data."
    )
    if found.found is None:
        closest = (
            f" The closest came to {db_text(found.closest_db)} dB." if math.isfinite(found.closest_db) else ""
        )
        return f"{text} None broke a limit.{closest}"
    where = "within" if found.found.within else "beyond"
    return f"{text} The smallest that breaks a limit lies {where} the range of the calibration data."


def _inputs(probe: Probe) -> Section:
    rows = tuple(
        (
            plain(one.name, NAME_WIDTH),
            f"{one.dtype} [{', '.join(map(str, one.shape))}]",
            plain(one.words, _WORDS_WIDTH),
            f"{one.low:.5g} to {one.high:.5g}",
            _range(one),
        )
        for one in probe.inputs
    )
    return Section(
        title=f"The input ({count_text(len(rows), 'array')})",
        headers=("input", "type", "values", "range", "in the calibration data"),
        rows=rows,
    )


def _range(one: TriedInput) -> str:
    return f"{one.known_low:.5g} to {one.known_high:.5g}"


def comparison_sections(parity: ParityEvidence, title: str) -> tuple[Section, ...]:
    """How far each output moved, whatever its limits, and the origin of the difference of the worst."""
    if not parity.outputs:
        return ()
    ordered = sorted(parity.outputs, key=lambda out: (out.matches, out.sqnr_db))
    rows = []
    for out in ordered:
        if not out.compared or not out.matches:
            said = plain(out.note or ("equal" if out.matches else "not equal"), _WORDS_WIDTH)
            rows.append((plain(out.name), said, *("" for _ in LIMITS[1:])))
        else:
            rows.append((plain(out.name), *(limit.text(getattr(out, limit.fact)) for limit in LIMITS)))
    outputs = Section(title=title, headers=("output", *(limit.title for limit in LIMITS)), rows=tuple(rows))
    return (outputs, *steps_table(parity, ordered[0].name))
