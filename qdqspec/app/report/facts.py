"""Contents of the report of one case, as tables and texts that each format renders."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from qdqspec._core.units import (
    count_text,
    db_text,
    interval_text,
    list_text,
    metric_text,
    ms_text,
    origin_text,
    percent_text,
    plain,
    proved_text,
    ratio_text,
    seconds_text,
    share_text,
    size_text,
)
from qdqspec.app.report.tables import (
    RIGHT,
    Column,
    Table,
    bounds_text,
    known,
    latency_of,
    limit_text,
    median_text,
    provenance_text,
    shown_columns,
    verdict_word,
)
from qdqspec.checks import candidates_section
from qdqspec.types import (
    ERROR_TITLE,
    BlockError,
    CaseRecord,
    CorrectionGain,
    Evidence,
    FrontPoint,
    Interval,
    LatencyEvidence,
    ParityEvidence,
    PlacedPair,
    RegressionEvidence,
    RunRecord,
    SearchResult,
    TensorParity,
)

MAX_ROWS = 500  # of the summary table
MOST_BLOCKS = 12  # in the table and chart of errors
LONG = 400  # characters of a free text, which comes from a spec or a runtime and may be long
ROLES = {
    "reference": "reference",
    "tuned": "tuned",
    "everything": "everything quantized",
    "runner-up": "runner-up",
    "given": "the model as given",
    "float16": "reference in float16",
    "float32": "reference in float32",
}


# ---- of a run ------------------------------------------------------------------------------------


def run_line(record: RunRecord) -> str:
    """Number of cases and checks, start time and duration."""
    words = Counter(verdict_word(result) for case in record.cases for result in case.results)
    parts = [count_text(len(record.cases), "case")]
    parts += [f"{words['pass']} of {count_text(words.total(), 'check')} passed"] if words else []
    parts += [f"{words['FAIL']} failed"] if words["FAIL"] else []
    parts += [count_text(words["WARN"], "warning")] if words["WARN"] else []
    parts += [f"{words['inconclusive']} inconclusive"] if words["inconclusive"] else []
    when = plain(re.sub(r"(Z|\+00:00)$", " UTC", record.started.replace("T", " ")), 40)
    return f"{', '.join(parts)}. {when}, {seconds_text(record.seconds)}, qdqspec {plain(record.version, 40)}."


def summary(record: RunRecord) -> Table:
    """One row per case, as in `tables.summary_table`."""
    cases = record.cases[:MAX_ROWS]
    table = Table.of("Summary", cases, *shown_columns(cases))
    if len(record.cases) <= MAX_ROWS:
        return table
    more = (f"and {len(record.cases) - MAX_ROWS} more", *("" for _ in table.headers[1:]))
    return replace(table, rows=(*table.rows, more))


# ---- of a case -----------------------------------------------------------------------------------


def lead_lines(case: CaseRecord) -> list[str]:
    """The title of the case, its result in one sentence, the steps that its search did not reach before its limit, and
    the source of results of earlier runs.
    """
    found, latency, search = case.evidence, case.evidence.latency, case.evidence.search
    cut_short = ""
    if found.status in ("unchanged", "untimed", "skipped"):
        gain = f"{found.status.capitalize()}: {plain(found.reason, 3 * LONG)}."
    elif latency is None or "tuned" not in latency.samples:
        gain = "No latency was measured."
    else:
        before, after = ms_text(latency.median_ms("reference")), ms_text(latency.median_ms("tuned"))
        gain = (
            f"{ratio_text(latency.speedup.median)}x as fast as the reference"
            f"{proved_text(latency, found.min_gain)}: {before} ms to {after} ms."
        )
    if search is not None and found.status != "unchanged":  # whose reason has it
        cut_short = plain(search.cut_short, LONG)
    sentences = (cut_short, provenance_text(case))
    lines = [
        plain(found.case.title, LONG),
        gain,
        *(f"{one[:1].upper()}{one[1:]}." for one in sentences if one),
    ]
    return [line for line in lines if line]


def checks_table(case: CaseRecord) -> Table:
    """Verdict, id and headline of each check."""
    return Table.of(
        "Checks",
        case.results,
        Column("verdict", verdict_word),
        Column("check", lambda result: plain(result.id, 60)),
        Column("result", lambda result: plain(result.verdict.headline, LONG)),
    )


def advice_rows(case: CaseRecord) -> Iterator[tuple[str, str]]:
    """Id and advice of the checks that have any; of a check that was not judged, the whole error with its advice."""
    for result in case.results:
        errors = [section.text for section in result.verdict.sections if section.title == ERROR_TITLE]
        text = result.verdict.advice
        if errors:
            text = "; ".join(line.strip() for line in errors[0].splitlines())
        if text := plain(text, 3 * LONG):
            yield plain(result.id, 60), text


def case_facts(case: CaseRecord) -> Iterator[tuple[str, str]]:
    """Facts of a case: device, model, search, size."""
    found, model = case.evidence, plain(case.evidence.case.model.name)
    yield "target", plain(found.target)
    if found.skipped:
        yield "model", model
        return
    yield "device", plain(found.device.key)
    for name, value in sorted(found.device.details.items()):
        yield plain(name, 60), plain(value, 120)
    yield "model", f"{model} (sha256 {plain(found.model_sha256[:12])})"
    reference, tuned = found.size_bytes.get("reference"), found.size_bytes.get("tuned")
    if reference and tuned:
        yield "size", f"{size_text(reference)} to {size_text(tuned)} ({percent_text(tuned / reference - 1)})"
    if found.search is not None:
        yield from _search_facts(found.search)


def _search_facts(search: SearchResult) -> Iterator[tuple[str, str]]:
    spent = f"{seconds_text(search.seconds)} ({seconds_text(search.cpu_seconds)} of CPU without the engines)"
    yield "strategy", plain(search.strategy)
    yield "candidates", f"{search.built} built, {search.failed} failed, in {spent}"
    if search.ended:
        yield "end", plain(search.ended)
    if coverage := search.coverage:
        text = (
            f"{share_text(coverage.share)} of {coverage.multiplications / 1e6:,.1f} million multiplications"
        )
        if coverage.kernels:
            text += f", {coverage.conversions} of {count_text(coverage.kernels, 'kernel')} only convert"
        yield "covered", f"{text}; nothing was timed"
    if search.float_runs:
        yield "search cost", f"{search.float_runs:,.0f} runs of the reference"
    regions, patterns = count_text(search.regions, "region"), count_text(search.patterns, "pattern")
    yield "model structure", f"{regions} of {patterns}"
    if bound := search.accuracy:
        values = (bound.least, bound.reference, bound.selected)
        least, reference, selected = (metric_text(bound.metric, value) for value in values)
        scored = f"{count_text(bound.scored, 'candidate')} scored on {count_text(bound.samples, 'sample')}"
        text = f"at least {least} (reference {reference}), selected {selected}; {scored}"
        yield f"held to {plain(bound.metric, 40)}", text
    if search.coverage is None:
        yield "smallest difference that counts", f"{100 * search.eps:.1f} %"
    yield "scheme", plain(search.winner.digest)


# ---- tables of a case ----------------------------------------------------------------------------


def case_tables(found: Evidence) -> list[Table]:
    """The tables of a case that have content, in their order on a page."""
    latency, search = latency_of(found), found.search
    tables = [
        *(_rejected_tables(search) if search else []),
        *([latency_table(latency)] if latency else []),
        *([_parity_table(found.parity, search)] if found.parity else []),
        ops_table(found),
        Table.of(
            "Accuracy",
            found.accuracy.items(),
            Column("metric", lambda row: plain(row[0])),
            Column("reference", lambda row: f"{row[1].reference:.4g}", RIGHT),
            Column("tuned", lambda row: f"{row[1].tuned:.4g}", RIGHT),
            Column("change", lambda row: f"{row[1].tuned - row[1].reference:+.2g}", RIGHT),
            Column("samples", lambda row: str(row[1].samples), RIGHT),
        ),
        Table.of(  # that checks measured themselves
            "Figures of checks",
            [(key, *figure) for key, figures in found.figures.items() for figure in figures.items()],
            Column("measured", lambda row: plain(row[0])),
            Column("figure", lambda row: plain(row[1])),
            Column("value", lambda row: f"{row[2]:.6g}", RIGHT),
        ),
        *([gains_table(search.corrections), _front_table(search), errors_table(search)] if search else []),
        *(_baseline_table(name, seen) for name, seen in found.regression.items()),
    ]
    return [table for table in tables if table.rows]


def latency_table(latency: LatencyEvidence) -> Table:
    """The final measurement by role."""
    mean = f"; weighted geometric mean of {len(latency.profiles)} shapes" if latency.profiles else ""
    builds = count_text(latency.builds, "build")
    return Table.of(
        f"Latency ({latency.clock} clock, {builds} each, {origin_text(latency.provenance)}{mean})",
        latency.lines(),
        Column("model", lambda line: f"{role_text(line.role)} {plain(line.at, 60)}".rstrip()),
        Column("median ms", lambda line: ms_text(line.median_ms), RIGHT),
        Column("of reference", lambda line: median_text(line.ratio), RIGHT),
        Column("95 % prediction", lambda line: bounds_text(line.ratio)),
        Column("runs", lambda line: str(len(line.samples.on(latency.clock))), RIGHT),
    )


def role_text(role: str, width: int | None = None) -> str:
    """The name of a role."""
    return ROLES.get(role, plain(role, width))


def ops_table(found: Evidence) -> Table:
    """Number of nodes of each operator type that run in narrow formats; without known kernels, that read pairs."""
    work = found.quantized
    whole = Counter(found.node_ops.values())
    hit = Counter(found.node_ops.get(node, "unknown") for node in (work.nodes if work else ()))
    ops = sorted(hit)
    pairs = sum(not pair.site.weight for pair in found.pairs)
    placed = f"{count_text(pairs, 'activation pair')}, {len(found.pairs) - pairs} of weights"
    runs = work is None or work.runs
    heading = "Runs in narrow formats" if runs else "Placement"
    unknown = "" if runs else "; operators that read them, their kernels are not known"
    return Table.of(
        f"{heading} ({placed}{unknown})",
        ops,
        Column("op", lambda op: plain(op)),
        Column("runs" if runs else "placed", lambda op: str(hit[op]), RIGHT),
        Column("of all", lambda op: str(whole.get(op, hit[op])), RIGHT),
    )


def _rejected_tables(search: SearchResult) -> list[Table]:
    """The candidates that were not selected, and for each the places where it gains and loses time."""
    section = candidates_section(search)
    texts = ("candidate", "95 % interval", "not selected because")  # all other columns are of numbers
    align = tuple("left" if title in texts else RIGHT for title in section.headers)
    candidates = Table(section.title, section.headers, section.rows, align)
    places = [
        Table.of(
            f"Largest differences in time ({plain(one.role)}; one profile of each model)",
            [*one.kernels.slower, *one.kernels.faster],
            Column("place", lambda place: plain(place.place, 60)),
            Column("reference ms", lambda place: ms_text(place.reference_ms), RIGHT),
            Column("candidate ms", lambda place: ms_text(place.tuned_ms), RIGHT),
            Column("change", lambda place: f"{place.tuned_ms - place.reference_ms:+.4f}", RIGHT),
        )
        for one in search.rejected[:2]
        if one.kernels is not None
    ]
    return [candidates, *places]


def pairs_table(found: Evidence) -> Table:
    """Each Q/DQ pair with its scale and zero point."""

    def readers(pair: PlacedPair) -> str:
        ends = pair.site.consumers
        return list_text(["graph output" if end.is_output else plain(end.node, 40) for end in ends], 3)

    def format_(pair: PlacedPair) -> str:
        axis = pair.site.axis
        return plain(pair.site.format) + ("" if axis is None else f", axis {axis}")

    def span(values: Sequence[float]) -> str:
        """One value, or the smallest and the largest of the channels."""
        low, high = min(values, default=0), max(values, default=0)
        return f"{low:.4g} to {high:.4g}" if low < high else f"{low:.4g}" if values else ""

    return Table.of(
        "Q/DQ pairs",
        found.pairs,
        Column("tensor", lambda pair: plain(pair.site.tensor, 60)),
        Column("kind", lambda pair: "weight" if pair.site.weight else "activation"),
        Column("read by", readers),
        Column("format", format_),
        Column("scale", lambda pair: span(pair.scale), RIGHT),
        Column("zero point", lambda pair: span(pair.zero_point), RIGHT),
    )


def _parity_table(parity: ParityEvidence, search: SearchResult | None) -> Table:
    """Each output's parity, the worst first."""

    def figure(text: Callable[[TensorParity], str]) -> Callable[[TensorParity], str]:
        return lambda out: text(out) if out.compared and out.matches else ""

    def sqnr(out: TensorParity) -> str:
        if not out.compared or not out.matches:
            return plain(out.note or ("equal" if out.matches else "not equal"), 60)
        return db_text(out.sqnr_db)

    def slice_db(out: TensorParity) -> str:
        worst = out.far_slice()
        return "" if worst is None else f"{db_text(worst.sqnr_db)} ({worst.text})"

    def step(title: str, outputs: Sequence[TensorParity]) -> Column[TensorParity]:
        texts = {out.name: db_text(out.sqnr_db) for out in outputs}
        return Column(title, lambda out: texts.get(out.name, ""), RIGHT)

    more = [Column("worst slice dB", slice_db, RIGHT)] if any(map(slice_db, parity.outputs)) else []
    if parity.quantization and parity.runtime:
        more += [step("by quantization dB", parity.quantization), step("by runtime dB", parity.runtime)]
    limit = f"; SQNR limit: {limit_text(search.limits).replace(' (', ', ').rstrip(')')}" if search else ""
    by = f", computed by {parity.computed_by} as ONNX defines both models" if parity.computed_by else ""
    return Table.of(
        f"Parity with the reference ({count_text(parity.samples, 'input')} of {plain(parity.data)} data{by}{limit})",
        sorted(parity.outputs, key=lambda out: (out.matches, out.sqnr_db)),
        Column("output", lambda out: plain(out.name, 60)),
        Column("SQNR dB", sqnr, RIGHT),
        Column("cosine", figure(lambda out: "" if out.is_single else f"{out.cosine:.5f}"), RIGHT),
        Column("max difference", figure(lambda out: f"{out.max_abs:.3g}"), RIGHT),
        Column("in 8-bit steps", figure(lambda out: f"{out.max_steps:.3g}"), RIGHT),
        *more,
    )


def gains_table(gains: Sequence[CorrectionGain]) -> Table:
    """The SQNR before and after each correction, with everything quantized."""
    return Table.of(
        "Corrections (SQNR of everything quantized, on held-out calibration data)",
        gains,
        Column("correction", lambda gain: plain(gain.name, 30)),
        Column("before dB", lambda gain: db_text(gain.before_db), RIGHT),
        Column("after dB", lambda gain: db_text(gain.after_db), RIGHT),
        Column("changed", lambda gain: str(gain.changed), RIGHT),
        Column("", lambda gain: "applied" if gain.taken else "not applied"),
    )


def _front_table(search: SearchResult) -> Table:
    """The Pareto front of latency and accuracy, if the search had both objectives."""

    def scheme(point: FrontPoint) -> str:
        name = plain(point.placement, 20) if point.pairs else "reference"
        return f"{name} (selected)" if point.placement == search.winner.digest else name

    metric: list[Column[FrontPoint]] = []
    if any(point.accuracy is not None for point in search.front):
        title = plain(search.accuracy.metric, 24) if search.accuracy else "metric"
        metric.append(Column(title, lambda point: known("{:.4g}".format, point.accuracy), RIGHT))
    return Table.of(
        "Latency against accuracy",
        search.front,
        Column("scheme", scheme),
        Column("pairs", lambda point: str(point.pairs), RIGHT),
        Column("of reference", lambda point: median_text(point.ratio), RIGHT),
        Column("95 % prediction", lambda point: interval_text(point.ratio)),
        Column("SQNR dB", lambda point: db_text(point.sqnr_db), RIGHT),
        *metric,
    )


def errors_table(search: SearchResult) -> Table:
    """The error of single blocks: the largest ones by label, worst first, or why it was not measured.

    Shares are of the errors of the worst labels, which add up at the tensors where they are measured.
    """
    if not search.errors:
        why = [plain(search.errors_missing, LONG)] if search.errors_missing else []
        return Table.of("Error by block", why, Column("not measured", str))
    blocks: dict[str, list[BlockError]] = {}
    for error in search.errors:
        blocks.setdefault(error.block, []).append(error)
    worst = {block: min(error.sqnr_db for error in found) for block, found in blocks.items()}
    powers = {block: 10 ** (-db / 10) for block, db in worst.items()}
    total = math.fsum(powers.values()) or 1.0
    ordered = sorted(blocks, key=worst.__getitem__)
    rest = f"; {len(ordered) - MOST_BLOCKS} with less are not listed" if len(ordered) > MOST_BLOCKS else ""

    def by_label(block: str) -> str:
        return ", ".join(f"{plain(error.label, 30)} {db_text(error.sqnr_db)}" for error in blocks[block])

    return Table.of(
        f"Error by block (one block quantized, all others in floating point{rest})",
        ordered[:MOST_BLOCKS],
        Column("block", lambda block: plain(block, 60)),
        Column("SQNR dB by label", by_label),
        Column("share of the error", lambda block: share_text(powers[block] / total), RIGHT),
    )


def _baseline_table(name: str, seen: RegressionEvidence) -> Table:
    """The figures of a baseline entry on this device, the oldest first, this run, and other devices."""
    rows: list[tuple[str, Interval, str, str]] = []  # name, ratio, change and differences
    moves = [percent_text(new.ratio.median / old.ratio.median - 1) for old, new in pairwise(seen.history)]
    for figure, moved in zip(seen.history, ("", *moves), strict=False):
        rows.append((day_text(figure.recorded) or "undated", figure.ratio, moved, "; ".join(figure.changed)))
    if seen.state != "written" and seen.ratio is not None:
        moved = known(lambda change: percent_text(change.builds.median - 1), seen.change)
        rows.append(("this run", seen.ratio, moved, "; ".join(seen.notes)))
    for figure in seen.elsewhere:
        device = f"{plain(figure.device, 60)} {day_text(figure.recorded)}".rstrip()
        rows.append((device, figure.ratio, "", "another device"))
    states = {
        "written": ", written by this run",
        "missing": ", none for this device",
        "unlike": ", not compared with",
        "damaged": ", damaged",
    }
    return Table.of(
        f"Baseline of {plain(name, 40)} ({plain(seen.file, 100)}{states.get(seen.state, '')})",
        rows,
        Column("recorded", lambda row: row[0]),
        Column("tuned / reference", lambda row: f"{row[1].median:.3f}", RIGHT),
        Column(
            "95 % interval",
            lambda row: "" if row[1].low == row[1].high else f"{row[1].low:.3f} to {row[1].high:.3f}",
        ),
        Column("change", lambda row: row[2], RIGHT),
        Column("differences from the baseline", lambda row: plain(row[3], LONG)),
    )


def day_text(recorded: str) -> str:
    """The date of an ISO 8601 time."""
    return plain(recorded, 40)[:10]
