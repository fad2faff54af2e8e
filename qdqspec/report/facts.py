"""Contents of the report of one case, as tables of plain cells that each format renders.

Each cell is one printable line. Each format escapes its own syntax.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from qdqspec.report.tables import latency_of, limit_text, provenance_text, shown_columns
from qdqspec.types import (
    ERROR_TITLE,
    AccuracyBound,
    BlockError,
    CaseRecord,
    CheckResult,
    CorrectionGain,
    Evidence,
    PlacedPair,
    RunRecord,
    SearchResult,
    TensorParity,
)
from qdqspec.units import (
    count_text,
    db_text,
    interval_text,
    list_text,
    metric_text,
    ms_text,
    percent_text,
    plain,
    ratio_text,
    seconds_text,
    share_text,
    size_text,
)

MAX_ROWS = 500  # of the summary table
_UTC = re.compile(r"(Z|\+00:00)$")
LONG = 400  # characters of a free text, which comes from a spec or a runtime and may be long
ROLES = {
    "reference": "reference",
    "tuned": "tuned",
    "everything": "everything quantized",
    "runner-up": "runner-up",
    "float16": "reference in float16",
}

MOST_BLOCKS = 12  # in the table and chart of errors


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; ``numbers`` are the indices of right-aligned columns."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()

    @property
    def align(self) -> str:
        """The alignment of each column: ``l`` or ``r``."""
        return "".join("r" if column in self.numbers else "l" for column in range(len(self.headers)))


def grid(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table as text, without spaces at the ends of lines; ``align`` has ``l`` or ``r`` for each column."""
    sides = ["right" if letter == "r" else "left" for letter in align] if rows else None
    text = tabulate(rows, headers=headers, colalign=sides, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def run_line(record: RunRecord) -> str:
    """Number of cases and checks, start time and duration."""
    words = Counter(verdict_word(result) for case in record.cases for result in case.results)
    said = [count_text(len(record.cases), "case")]
    said += [f"{words['pass']} of {count_text(words.total(), 'check')} passed"] if words else []
    said += [f"{words['FAIL']} failed"] if words["FAIL"] else []
    said += [count_text(words["WARN"], "warning")] if words["WARN"] else []
    said += [f"{words['inconclusive']} inconclusive"] if words["inconclusive"] else []
    when = plain(_UTC.sub(" UTC", record.started.replace("T", " ")), 40)
    return f"{', '.join(said)}. {when}, {seconds_text(record.seconds)}, qdqspec {plain(record.version, 40)}."


def summary(record: RunRecord) -> Table:
    """One row per case, as in `tables.summary_table`."""
    cases = record.cases[:MAX_ROWS]
    columns = shown_columns(cases)
    rows = [tuple(column.cell(case) for column in columns) for case in cases]
    if len(record.cases) > MAX_ROWS:
        more = f"and {len(record.cases) - MAX_ROWS} more"
        rows.append((more, *("" for _ in columns[1:])))
    numbers = frozenset(index for index, column in enumerate(columns) if column.align == "right")
    return Table("Summary", tuple(column.title for column in columns), tuple(rows), numbers)


def gain_line(case: CaseRecord) -> str:
    """The result of the case in one sentence."""
    found = case.evidence
    if found.status in ("unchanged", "skipped"):
        return f"{found.status.capitalize()}: {plain(found.reason, LONG)}."
    latency = found.latency
    if latency is None or "tuned" not in latency.samples:
        return "No latency was measured."
    before, after = ms_text(latency.median_ms("reference")), ms_text(latency.median_ms("tuned"))
    return (
        f"{ratio_text(latency.speedup.median)}x as fast as the reference "
        f"(95 %: {interval_text(latency.speedup)}): {before} ms to {after} ms."
    )


def latency_table(found: Evidence) -> Table | None:
    """The final measurement by role."""
    latency = latency_of(found)
    if latency is None:
        return None
    rows = []
    for line in latency.lines():
        role, ratio = ROLES.get(line.role, plain(line.role)), line.ratio
        rows.append(
            (
                f"{role} {plain(line.at, 60)}".rstrip(),
                ms_text(line.median_ms),
                "" if ratio is None else ratio_text(ratio.median),
                "" if ratio is None or ratio.low == ratio.high else interval_text(ratio),
                str(len(line.samples.on(latency.clock))),
            )
        )
    mean = f"; weighted geometric mean of {len(latency.profiles)} shapes" if latency.profiles else ""
    builds = count_text(latency.builds, "build")
    return Table(
        f"Latency ({latency.clock} clock, {builds} each, {latency.provenance}{mean})",
        ("model", "median ms", "of reference", "95 % interval", "runs"),
        tuple(rows),
        frozenset({1, 2, 4}),
    )


def ops_table(found: Evidence) -> Table | None:
    """Number of nodes of each operator type that read quantized tensors."""
    quantized = {end.node for pair in found.pairs for end in pair.site.consumers if not end.is_output}
    if not quantized:
        return None
    whole = Counter(found.node_ops.values())
    hit = Counter(found.node_ops.get(node, "unknown") for node in quantized)
    rows = tuple((plain(op), str(hit[op]), str(whole.get(op, hit[op]))) for op in sorted(hit))
    pairs = sum(not pair.site.weight for pair in found.pairs)
    title = f"Quantized ({count_text(pairs, 'activation pair')}, {len(found.pairs) - pairs} of weights)"
    return Table(title, ("op", "quantized", "of all"), rows, frozenset({1, 2}))


def pairs_table(found: Evidence) -> Table | None:
    """Each Q/DQ pair with its scale and zero point."""
    if not found.pairs:
        return None
    rows = tuple(_pair_row(pair) for pair in found.pairs)
    return Table(
        "Q/DQ pairs", ("tensor", "kind", "read by", "format", "scale", "zero point"), rows, frozenset({4, 5})
    )


def _pair_row(pair: PlacedPair) -> tuple[str, ...]:
    site = pair.site
    readers = ["graph output" if end.is_output else plain(end.node, 40) for end in site.consumers]
    return (
        plain(site.tensor, 60),
        "weight" if site.weight else "activation",
        list_text(readers, 3),
        plain(site.format) + (f", axis {site.axis}" if site.axis is not None else ""),
        _span(pair.scale),
        _span(pair.zero_point),
    )


def _span(values: tuple[float, ...]) -> str:
    """One value, or the smallest and the largest of the channels."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def parity_table(found: Evidence) -> Table | None:
    """Each output's parity, the worst first."""
    parity = found.parity
    if parity is None or not parity.outputs:
        return None
    outputs = sorted(parity.outputs, key=lambda out: (out.matches, out.sqnr_db))
    headers: tuple[str, ...] = ("output", "SQNR dB", "cosine", "max difference", "in 8-bit steps")
    rows: tuple[tuple[str, ...], ...] = tuple(_parity_row(out) for out in outputs)
    if parity.quantization and parity.runtime:
        headers += ("by quantization dB", "by runtime dB")
        steps = [
            {out.name: db_text(out.sqnr_db) for out in step} for step in (parity.quantization, parity.runtime)
        ]
        rows = tuple(
            (*row, *(step.get(out.name, "") for step in steps))
            for row, out in zip(rows, outputs, strict=True)
        )
    limit = (
        ""
        if found.search is None
        else f"; SQNR limit: {limit_text(found.search.limits).replace(' (', ', ').rstrip(')')}"
    )
    return Table(
        f"Parity with the reference ({count_text(parity.samples, 'input')} of {plain(parity.data)} data{limit})",
        headers,
        rows,
        frozenset(range(1, len(headers))),
    )


def _parity_row(out: TensorParity) -> tuple[str, ...]:
    name = plain(out.name, 60)
    if not out.compared or not out.matches:
        return (name, plain(out.note or ("equal" if out.matches else "not equal"), 60), "", "", "")
    return (name, db_text(out.sqnr_db), f"{out.cosine:.5f}", f"{out.max_abs:.3g}", f"{out.max_steps:.3g}")


def corrections_table(found: Evidence) -> Table | None:
    """The gain of each correction before the search, with everything quantized."""
    return None if found.search is None else gains_table(found.search.corrections)


def gains_table(gains: Sequence[CorrectionGain]) -> Table | None:
    """The SQNR before and after each correction; ``None`` for no corrections."""
    rows = tuple(
        (
            plain(gain.name, 30),
            db_text(gain.before_db),
            db_text(gain.after_db),
            str(gain.changed),
            "applied" if gain.taken else "not applied",
        )
        for gain in gains
    )
    title = "Corrections (SQNR before the final operators, everything quantized, held-out calibration data)"
    headers = ("correction", "before dB", "after dB", "changed", "")
    return Table(title, headers, rows, frozenset({1, 2, 3})) if rows else None


def accuracy_table(found: Evidence) -> Table | None:
    """Each task metric."""
    rows = tuple(
        (plain(name), f"{m.reference:.4g}", f"{m.tuned:.4g}", f"{m.tuned - m.reference:+.2g}", str(m.samples))
        for name, m in found.accuracy.items()
    )
    headers = ("metric", "reference", "tuned", "change", "samples")
    return Table("Accuracy", headers, rows, frozenset({1, 2, 3, 4})) if rows else None


def figures_table(found: Evidence) -> Table | None:
    """The figures that checks measured themselves."""
    rows = tuple(
        (plain(key), plain(name), f"{value:.6g}")
        for key, figures in found.figures.items()
        for name, value in figures.items()
    )
    return Table("Figures of checks", ("measured", "figure", "value"), rows, frozenset({2})) if rows else None


def front_table(found: Evidence) -> Table | None:
    """The Pareto front of latency and accuracy, if the search had both objectives."""
    points = found.search.front if found.search is not None else ()
    if not points:
        return None
    assert found.search is not None
    asked = found.search.accuracy
    metric = any(point.accuracy is not None for point in points)
    rows = tuple(
        (
            (plain(point.placement, 20) if point.pairs else "reference")
            + (" (selected)" if point.placement == found.search.winner.digest else ""),
            str(point.pairs),
            ratio_text(point.ratio.median),
            interval_text(point.ratio),
            db_text(point.sqnr_db),
            *(("" if point.accuracy is None else f"{point.accuracy:.4g}",) if metric else ()),
        )
        for point in points
    )
    headers = (
        "scheme",
        "pairs",
        "of reference",
        "95 % interval",
        "SQNR dB",
        *((plain(asked.metric, 24) if asked else "metric",) if metric else ()),
    )
    return Table("Latency against accuracy", headers, rows, frozenset({1, 2, 4, 5}))


def block_errors(search: SearchResult) -> list[tuple[str, str, float, float]]:
    """A row for each block, worst first: name, SQNR by label, lowest SQNR, share of all blocks' error.

    Shares are of the errors of the worst labels, which add up at the tensors where they are measured.
    """
    blocks: dict[str, list[BlockError]] = {}
    for error in search.errors:
        blocks.setdefault(error.block, []).append(error)
    worst = {block: min(error.sqnr_db for error in found) for block, found in blocks.items()}
    powers = {block: 10 ** (-db / 10) for block, db in worst.items()}
    total = math.fsum(powers.values()) or 1.0
    return [
        (
            plain(block, 60),
            ", ".join(f"{plain(error.label, 30)} {db_text(error.sqnr_db)}" for error in blocks[block]),
            worst[block],
            powers[block] / total,
        )
        for block in sorted(blocks, key=worst.__getitem__)
    ]


def errors_table(found: Evidence) -> Table | None:
    """The error of single blocks: the largest ones, or why it was not measured."""
    if found.search is None:
        return None
    blocks = block_errors(found.search)
    if not blocks:
        why = plain(found.search.errors_missing, LONG)
        return Table("Error by block", ("not measured",), ((why,),)) if why else None
    rows = tuple((block, labels, share_text(share)) for block, labels, _, share in blocks[:MOST_BLOCKS])
    rest = f"; {len(blocks) - MOST_BLOCKS} with less are not listed" if len(blocks) > MOST_BLOCKS else ""
    return Table(
        f"Error by block (one block quantized, all others in floating point{rest})",
        ("block", "SQNR dB by label", "share of the error"),
        rows,
        frozenset({2}),
    )


def check_rows(case: CaseRecord) -> tuple[tuple[str, str, str], ...]:
    """Verdict, id and headline of each check."""
    return tuple((verdict_word(r), plain(r.id, 60), plain(r.verdict.headline, LONG)) for r in case.results)


def advice_rows(case: CaseRecord) -> tuple[tuple[str, str], ...]:
    """Id and advice of the checks that have any; of a check that was not judged, the whole error with its advice."""
    said = ((plain(result.id, 60), plain(_advice(result), LONG)) for result in case.results)
    return tuple((name, text) for name, text in said if text)


def _advice(result: CheckResult) -> str:
    errors = [section.text for section in result.verdict.sections if section.title == ERROR_TITLE]
    return "; ".join(line.strip() for line in errors[0].splitlines()) if errors else result.verdict.advice


def verdict_word(result: CheckResult) -> str:
    """``pass``, ``FAIL``, ``WARN`` or ``inconclusive``."""
    if result.verdict.outcome == "fail":
        return "FAIL" if result.severity == "error" else "WARN"
    return result.verdict.outcome


def case_facts(case: CaseRecord) -> tuple[tuple[str, str], ...]:
    """Facts of a case: device, model, search, size."""
    found = case.evidence
    model = plain(found.case.model.name)
    if found.skipped:
        return ("target", plain(found.target)), ("model", model)
    facts = [
        ("target", plain(found.target)),
        ("device", plain(found.device.key)),
        *((plain(name, 60), plain(value, 120)) for name, value in sorted(found.device.details.items())),
        ("model", f"{model} (sha256 {plain(found.model_sha256[:12])})"),
    ]
    reference, tuned = found.size_bytes.get("reference"), found.size_bytes.get("tuned")
    if reference and tuned:
        change = percent_text(tuned / reference - 1)
        facts.append(("size", f"{size_text(reference)} to {size_text(tuned)} ({change})"))
    older = provenance_text(case)
    return (*facts, *_search_facts(found), *((("of earlier runs", older),) if older else ()))


def _search_facts(found: Evidence) -> list[tuple[str, str]]:
    search = found.search
    if search is None:
        return []
    spent = f"{seconds_text(search.seconds)} ({seconds_text(search.cpu_seconds)} of CPU)"
    return [
        ("strategy", plain(search.strategy)),
        ("candidates", f"{search.built} built, {search.failed} failed, in {spent}"),
        *((("search cost", f"{search.float_runs:,.0f} runs of the reference"),) if search.float_runs else ()),
        (
            "model structure",
            f"{count_text(search.regions, 'region')} of {count_text(search.patterns, 'pattern')}",
        ),
        *_bound_facts(search.accuracy),
        ("smallest difference that counts", f"{100 * search.eps:.1f} %"),
        ("scheme", plain(search.winner.digest)),
    ]


def _bound_facts(bound: AccuracyBound | None) -> list[tuple[str, str]]:
    """The limit of the task metric in the search, and the values reached."""
    if bound is None:
        return []
    least, reference, shipped = (
        metric_text(bound.metric, value) for value in (bound.least, bound.reference, bound.shipped)
    )
    scored = f"{count_text(bound.scored, 'candidate')} scored on {count_text(bound.samples, 'sample')}"
    said = f"at least {least} (reference {reference}), selected {shipped}; {scored}"
    return [(f"held to {plain(bound.metric, 40)}", said)]
