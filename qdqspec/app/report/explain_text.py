"""Explains which engine is faster, the reasons, and possible improvements, as text and as JSON.

Each sentence states counts and times of the layers. Advice follows the placement rules of NVIDIA's
documentation on explicit quantization, and is given only if the layers show its condition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qdqspec._core.units import (
    count_text,
    interval_text,
    ms_text,
    ms_texts_apart,
    percent_text,
    plain,
    ratio_text,
    share_text,
)
from qdqspec.app.evidence.explained import (
    POOLS,
    WEIGHTED_OPS,
    EngineComparison,
    ExplainedEngine,
    Row,
    find_reference,
    is_pair,
    nodes_text,
    ops_in,
    short_place,
)
from qdqspec.app.report.facts import gains_table
from qdqspec.app.report.tables import RIGHT, Column, Table, known, section_text
from qdqspec.checks import candidates_section
from qdqspec.types import LayerTime, SearchResult

_NAME_WIDTH = 60
_LISTED = 12  # most unfused Q and DQ that are listed
_SAME = 0.005  # relative difference below which times count as equal
_NAMED = 3  # places named in a sentence


def explain_text(
    engines: Sequence[ExplainedEngine], *, most: int = 12, search: SearchResult | None = None
) -> str:
    """Explanation of one, two or several engines; tables are cut after ``most`` rows.

    If one of them has no times, the kernels of all are described without times. Else each is compared with the
    reference, the fastest first. Engines of a ``search`` are its reference and its selected model, or the candidates
    that were not selected. It ends with the gain of each correction in the searches that made these engines, and notes.
    """
    reference, parts = find_reference(engines), []
    if search is not None and search.unchanged:
        rejected = [section_text(candidates_section(search))] if search.rejected else []
        parts = [f"Unchanged:\n{search.reason}", *rejected]
    elif search is not None and search.cut_short:
        parts = [f"{search.cut_short[:1].upper()}{search.cut_short[1:]}."]
    gains = [table for engine in engines if (table := gains_table(engine.corrections)).rows]
    notes = dict.fromkeys(f"note: {note}" for engine in engines for note in engine.notes)
    remarks = [*(f"{table.title}\n{table.text}" for table in gains), "\n".join(notes)]
    if not all(engine.timed for engine in engines):
        parts += [_counts(engines), _kinds(engines)]
        parts += [part for engine in engines for part in _found_in_list(engine, most)]
        several = "No times: these counts do not show which engine is faster." if len(engines) > 1 else ""
        parts += [*remarks, several]
    elif not any(engine.layers for engine in engines):
        verdicts = [verdict(EngineComparison(reference, one)) for one in engines if one is not reference]
        parts += [
            _counts(engines),
            *remarks,
            *verdicts,
            "The backend reports no kernels: only whole times are known.",
        ]
    elif len(engines) == 1:
        slowest = Table.of(
            "",
            sorted(reference.layers, key=lambda layer: -layer.milliseconds)[:most],
            Column("layer", _layer_text),
            Column("ms", lambda layer: ms_text(layer.milliseconds), RIGHT),
            Column("precision", _precision_text),
            Column("kernel", lambda layer: layer.op_type),
        )
        parts += [_counts(engines), slowest.text, *remarks]
    else:
        engines = sorted(engines, key=lambda engine: (engine is not reference, engine.milliseconds))
        compared = [EngineComparison(reference, engine) for engine in engines[1:]]
        parts.append(_counts(engines))
        for between in compared:
            parts += [_differences(between, most), _unfused(between.tuned), _matching(between)]
        parts += [*remarks, *("\n".join(sentences(between)) for between in compared)]
    return "\n".join(plain(line) for line in "\n\n".join(filter(None, parts)).split("\n"))


# ---- tables -------------------------------------------------------------------------------------


_COUNTED = {  # kinds of layers of an engine, and their titles
    "kernels": "kernels",
    "integer_kernels": "integer kernels",
    "float_writers": "integer kernels that write floats",
    "unfused_pairs": "Q/DQ not fused",
    "conversions": "changes of type or layout",
}


def _counts(engines: Sequence[ExplainedEngine]) -> str:
    """Times and counts of kernels, with the share of the time; without times the heavy operators in float."""

    def counted(engine: ExplainedEngine, layers: Sequence[LayerTime]) -> str:
        spent = sum(layer.milliseconds for layer in layers)
        share = f" ({share_text(spent / engine.sum_ms)})" if layers and engine.sum_ms else ""
        return f"{len(layers)}{share}"

    timed, rows = all(engine.timed for engine in engines), list[tuple[str, ...]]()
    has_layers = any(engine.layers for engine in engines)
    if timed:
        whole = (known(ms_text, engine.end_to_end_ms) or "-" for engine in engines)
        rows.append(("end to end, median ms", *whole))
    if timed and has_layers:
        rows.append(("sum of layers, ms", *(ms_text(engine.sum_ms) for engine in engines)))
    for name, title in _COUNTED.items() if has_layers else ():
        rows.append((title, *(counted(engine, getattr(engine, name)) for engine in engines)))
    if not timed:
        heavy = [engine.heavy.values() for engine in engines]
        rows.append(("heavy operators in float", *(f"{len(one) - sum(one)} of {len(one)}" for one in heavy)))
    return _beside(("",), rows, engines)


def _kinds(engines: Sequence[ExplainedEngine]) -> str:
    """The number of kernels of each kind, the most frequent first, and how many of them compute in integers.

    Where a runtime has several places, there is one row for each kind, place and type of computation.
    """
    has_places = any(layer.place for engine in engines for layer in engine.layers)

    def kind(layer: LayerTime) -> tuple[str, ...]:
        return (layer.op_type, layer.place, _precision_text(layer)) if has_places else (layer.op_type,)

    every = [Counter(map(kind, engine.kernels)) for engine in engines]
    integer = [Counter(map(kind, () if has_places else engine.integer_kernels)) for engine in engines]
    rows = []
    for row, _ in sum(every, Counter[tuple[str, ...]]()).most_common():
        counts = [(one[row], narrow[row]) for one, narrow in zip(every, integer, strict=True)]
        texts = (f"{n} ({narrow} integer)" if narrow else str(n or "-") for n, narrow in counts)
        rows.append((*map(plain, row), *texts))
    return _beside(("kernels of kind", "place", "type")[: 3 if has_places else 1], rows, engines)


def _beside(
    headings: Sequence[str], rows: Sequence[tuple[str, ...]], engines: Sequence[ExplainedEngine]
) -> str:
    """A table with a column for each heading, then one for each engine."""
    heads = (*headings, *(plain(engine.name, 28) for engine in engines))
    align = (*("left" for _ in headings), *(RIGHT for _ in engines))
    return Table("", heads, tuple(rows), align).text


def _found_in_list(engine: ExplainedEngine, most: int) -> list[str]:
    """The pairs that are kernels of their own, the heavy operators in float if not all are, and advice."""
    floats = [node for node, integer in engine.heavy.items() if not integer]
    parts = [_unfused(engine)]
    if engine.integer_kernels and floats:
        lines = [f"Heavy operators that stayed in float in {engine.name}:"]
        lines += [f"  {short_place(node, _NAME_WIDTH)}" for node in floats[:most]]
        lines += [f"  and {len(floats) - most} more"] if len(floats) > most else []
        parts.append("\n".join(lines))
    return [*parts, "\n".join(advice(engine))]


def _differences(comparison: EngineComparison, most: int) -> str:
    chosen = [row for row in comparison.rows if row.reference_ms != row.tuned_ms]
    if not chosen[:most]:
        return ""
    ours, theirs = plain(comparison.reference.name, 20), plain(comparison.tuned.name, 20)
    table = Table.of(
        "",
        chosen[:most],
        Column("largest differences", lambda row: short_place(row.text, _NAME_WIDTH)),
        Column(f"{ours} ms", lambda row: f"{row.reference_ms:.4f}" if row.reference else "-", RIGHT),
        Column(f"{theirs} ms", lambda row: f"{row.tuned_ms:.4f}" if row.tuned else "-", RIGHT),
        Column("ms", lambda row: f"{row.difference_ms:+.4f}", RIGHT),
        Column(ours, lambda row: ", ".join(dict.fromkeys(map(_precision_text, row.reference)))),
        Column(theirs, lambda row: ", ".join(dict.fromkeys(map(_precision_text, row.tuned)))),
        Column("", _remark),
    ).text
    left = f"\n\n{len(chosen) - most} smaller differences are left out." if len(chosen) > most else ""
    return table + left


def _remark(row: Row) -> str:
    kernels = f"{len(row.reference)} > {len(row.tuned)} kernels"
    if row.lost_fusion:
        return f"fusion lost: {kernels}"
    if row.won_fusion:
        return f"fused: {kernels}"
    conversions = [layer for layer in row.tuned if layer.boundary]
    return ", ".join(
        dict.fromkeys(f"{each.op_type} alone" if is_pair(each) else each.op_type for each in conversions)
    )


def _unfused(engine: ExplainedEngine) -> str:
    pairs = engine.unfused_pairs
    if not pairs:
        return ""
    lines = [f"Q and DQ that were not fused in {engine.name}:"]
    for layer in pairs[:_LISTED]:
        # by the tensor if known: a runtime renames the copies of a Q or DQ that it makes
        name = short_place(layer.tensors[0] if layer.tensors else layer.name, _NAME_WIDTH)
        maker = engine.behind(layer)
        where = f"behind {_layer_text(maker)}" if maker else "at the input"
        facts = [
            f"{ms_text(layer.milliseconds)} ms" if engine.timed else "",
            layer.precision,
            layer.place,
            where,
        ]
        lines.append(
            f"  {f'{layer.op_type} of ' if layer.tensors else ''}{name}: {', '.join(filter(None, facts))}"
        )
    hidden = len(pairs) - _LISTED
    return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])


def _matching(comparison: EngineComparison) -> str:
    if not comparison.renamed:
        return ""
    ours, theirs = comparison.reference.name, comparison.tuned.name
    return f"The table names nodes as {ours} does; those of {theirs} were matched by operator and order."


def _layer_text(layer: LayerTime) -> str:
    return short_place(nodes_text(layer.nodes) or layer.name, _NAME_WIDTH)


def _precision_text(layer: LayerTime) -> str:
    """A layer's precision as reported; else ``integer`` or ``float``."""
    return layer.precision or ("integer" if layer.integer else "" if layer.boundary else "float")


# ---- sentences ----------------------------------------------------------------------------------


def sentences(comparison: EngineComparison) -> list[str]:
    """The sentences of the explanation: ratio, reasons, possible improvements, reliability of the figures."""
    found = [verdict(comparison), *reasons(comparison), *advice(comparison.tuned), caveat(comparison)]
    return [sentence for sentence in found if sentence]


def verdict(comparison: EngineComparison) -> str:
    """The first sentence: how much faster or slower."""
    ours, theirs = comparison.reference, comparison.tuned
    before, after = ms_texts_apart(ours.milliseconds, theirs.milliseconds)
    how = "by the sum of its layers" if comparison.decided_by_sum else "end to end"
    speedup = theirs.speedup
    interval = "" if speedup is None or speedup.low == speedup.high else f"95 %: {interval_text(speedup)}"
    bounds = theirs.proved or (interval and f" ({interval})")
    factor = (
        f"{ratio_text(ours.milliseconds / theirs.milliseconds)} times"
        if theirs.milliseconds
        else "many times"
    )
    times = f"{after} against {before} ms {how}"
    if not math.isfinite(comparison.ratio) or abs(comparison.ratio - 1) < _SAME:
        return f"{theirs.name} is as fast as {ours.name}{bounds}: {times}."
    if comparison.ratio < 1:
        return f"{theirs.name} is {factor} as fast as {ours.name}{bounds}: {times}."
    more = percent_text(comparison.ratio - 1).lstrip("+")
    speed = theirs.proved or (interval and f" ({interval} times as fast)")
    return f"{theirs.name} is {more} slower than {ours.name}{speed}: {times}."


def reasons(comparison: EngineComparison) -> list[str]:
    """Differences of the layers, the largest share first; counts of kernels are in the table above them."""
    theirs, rows = comparison.tuned, comparison.rows
    spent = [
        (what, math.fsum(row.difference_ms for row in rows if row.kind == kind))
        for what, kind in (("kernels", "kernel"), ("Q, DQ and conversions between them", "conversion"))
    ]
    spent.sort(key=lambda each: -abs(each[1]))
    text = ", ".join(
        f"{what} take {ms_text(abs(by))} ms {'less' if by < 0 else 'more'}" for what, by in spent
    )
    sentences = [f"By layer, in one profile of each, {text}."]
    left = theirs.left_in_float
    if left and theirs.integer_kernels:
        cost = math.fsum(layer.milliseconds for layer in left)
        share = f" ({ms_text(cost)} ms, {share_text(cost / theirs.sum_ms)})" if theirs.sum_ms else ""
        sentences.append(
            f"{count_text(len(left), 'kernel')} with quantized inputs {'does' if len(left) == 1 else 'do'} not "
            f"compute in integers{share}: {_names(left)}."
        )
    for what, changed in (
        ("run as more kernels than before", [row for row in rows if row.lost_fusion]),
        ("run as fewer kernels now", [row for row in rows if row.won_fusion]),
    ):
        if changed:
            named = "; ".join(short_place(nodes_text(row.place), _NAME_WIDTH) for row in changed[:_NAMED])
            more = "; ..." if len(changed) > _NAMED else ""
            sentences.append(f"The nodes of {count_text(len(changed), 'place')} {what} ({named}{more}).")
    return sentences


def advice(engine: ExplainedEngine) -> list[str]:
    """Possible improvements, where Q or DQ were not fused and the reason is visible."""
    quantizing = (layer for layer in engine.unfused_pairs if layer.op_type == "QuantizeLinear")
    makers = [maker for layer in quantizing if (maker := engine.behind(layer)) is not None]
    adds = [m for m in makers if m in engine.float_writers and "Add" in ops_in(m.nodes, engine)]
    floats = [m for m in makers if not m.integer]
    pools = [m for m in floats if ops_in(m.nodes, engine) & POOLS]
    weighted = [m for m in floats if ops_in(m.nodes, engine) & WEIGHTED_OPS and m not in pools]
    refused = [m for m in weighted if engine.reads_alone(m)]
    left = [m for m in weighted if m not in refused]
    run = "kernel between DQ and Q still runs" if len(refused) == 1 else "kernels between DQ and Q still run"
    causes = (
        (adds, "Not fused: {} Q after an Add that writes floats because its skip input is float",
            "quantize the skip input of these Adds, and not the branch of the convolution"),
        (pools, "Not fused: {} Q after a pool that runs in floats", "put the Q before the pool"),
        (left, "Not fused: {} Q after kernels left in float", "quantize their inputs too"),
        (refused, f"{{}} {run} in float",
            "the runtime has no integer kernel for these types, zero points or shapes"),
    )  # fmt: skip
    return [
        f"{where.format(len(found))} ({_names(found)}): {what}." for found, where, what in causes if found
    ]


def caveat(comparison: EngineComparison) -> str:
    """The reliability of the sums of layers; that they differ by another factor than the measured speed-up."""
    ours, theirs = comparison.reference, comparison.tuned
    if not theirs.end_to_end_ms:
        return "No end-to-end time is known: sums of layers show where the time is spent, and prove no gain."
    speedup, sums = theirs.speedup, f"{ms_text(theirs.sum_ms)} against {ms_text(ours.sum_ms)} ms"
    if speedup is not None and not comparison.decided_by_sum and theirs.sum_ms:
        factor, is_single = ours.sum_ms / theirs.sum_ms, speedup.low == speedup.high  # of one race
        agrees = speedup.low <= factor <= speedup.high
        if not (agrees or (is_single and abs(factor / speedup.median - 1) < 0.05)):
            measured = f"not the {ratio_text(speedup.median)} of one race"
            if not is_single:
                interval = interval_text(speedup)
                measured = f"outside the interval of the measured {ratio_text(speedup.median)} ({interval})"
            by_kernels, end_to_end = (
                f"{'+' if ms > 0 else '-'}{ms_text(abs(ms))} ms"
                for ms in (theirs.sum_ms - ours.sum_ms, theirs.milliseconds - ours.milliseconds)
            )
            return (
                f"Kernel times are of other runs, one profile of each model: by their sums, {sums}, {theirs.name} is "
                f"{ratio_text(factor)} times as fast, {measured}. Kernels differ by {by_kernels}, end to end by "
                f"{end_to_end}: kernel times show where the time is spent, not how much."
            )
    over = theirs.sum_ms / theirs.end_to_end_ms - 1
    if over < _SAME:
        return ""
    return (
        f"The layers of {theirs.name} add up to {ms_text(theirs.sum_ms)} ms, {share_text(over)} more than end to end, "
        "because a profiler prevents overlap: they show where the time is spent, not how much."
    )


def _names(layers: Sequence[LayerTime]) -> str:
    names = [short_place(nodes_text(layer.nodes), _NAME_WIDTH) for layer in layers]
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


# ---- JSON ---------------------------------------------------------------------------------------


def explain_json(engines: Sequence[ExplainedEngine], search: SearchResult | None = None) -> dict[str, Any]:
    """The explanation as an object, never truncated."""
    ordered = sorted(engines, key=lambda engine: engine.milliseconds)
    reference = find_reference(engines)
    timed = all(engine.timed for engine in engines)
    compared = [
        _comparison_json(EngineComparison(reference, engine))
        for engine in engines
        if engine is not reference and timed
    ]
    found: dict[str, Any] = {
        "reference": reference.name,
        "ranking": [engine.name for engine in ordered if timed],
        "engines": [_engine_json(engine, reference) for engine in engines],
        "comparisons": compared,
        "words": compared[0]["words"] if len(compared) == 1 else None,
    }
    if search is not None:
        found["search"] = {
            "unchanged": search.unchanged,
            "reason": search.reason,
            "cut_short": search.cut_short,
            "rejected": [asdict(candidate) for candidate in search.rejected],
            "kernels": candidates_section(search).text.splitlines(),
        }
    return found


def _engine_json(engine: ExplainedEngine, reference: ExplainedEngine) -> dict[str, Any]:
    parts = {name: getattr(engine, name) for name in (*_COUNTED, "left_in_float")}
    timed = engine.timed
    spent = {name: sum(layer.milliseconds for layer in layers) for name, layers in parts.items()}
    return {
        "name": engine.name,
        "end_to_end_ms": engine.end_to_end_ms,
        "sum_ms": engine.sum_ms if timed else None,
        "change": engine.milliseconds / reference.milliseconds - 1 if reference.milliseconds else None,
        "beyond_end_to_end": engine.sum_ms / engine.end_to_end_ms - 1 if engine.end_to_end_ms else None,
        "milliseconds_of": spent if timed else dict.fromkeys(spent),
        "share_of": {name: ms / engine.sum_ms if engine.sum_ms else None for name, ms in spent.items()},
        "advice": advice(engine),
        **{name: len(parts[name]) for name in ("kernels", "integer_kernels", "float_writers")},
        "heavy_in_float": [node for node, integer in engine.heavy.items() if not integer],
        **{
            name: [_layer_json(layer, timed) for layer in parts[name]]
            for name in ("left_in_float", "unfused_pairs", "conversions")
        },
        "layers": [
            asdict(layer)
            | {"precision": _precision_text(layer), "milliseconds": layer.milliseconds if timed else None}
            for layer in engine.layers
        ],
        "corrections": [asdict(gain) for gain in engine.corrections],
        "notes": list(engine.notes),
    }


_OF_ROW = ("place", "kind", "reference_ms", "tuned_ms", "difference_ms", "lost_fusion")


def _comparison_json(comparison: EngineComparison) -> dict[str, Any]:
    return {
        "reference": comparison.reference.name,
        "tuned": comparison.tuned.name,
        "ratio": comparison.ratio,
        "speedup": 1 / comparison.ratio if comparison.ratio else None,
        "decided_by": "sum of layers" if comparison.decided_by_sum else "end to end",
        "renamed": dict(comparison.renamed),
        "matching": _matching(comparison),
        "rows": [
            {
                **{name: getattr(row, name) for name in _OF_ROW},
                "remark": _remark(row),
                "reference": [_layer_json(layer) for layer in row.reference],
                "tuned": [_layer_json(layer) for layer in row.tuned],
            }
            for row in comparison.rows
        ],
        "words": " ".join(sentences(comparison)),
    }


def _layer_json(layer: LayerTime, timed: bool = True) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kernel": layer.op_type,
        "milliseconds": layer.milliseconds if timed else None,
        "precision": _precision_text(layer),
        "integer": layer.integer,
    }
