"""Renders the explanation as text and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from qdqspec.report.explain import (
    EngineComparison,
    ExplainedEngine,
    Row,
    compare,
    find_reference,
    is_pair,
    nodes_text,
    short_place,
)
from qdqspec.report.explain_words import advice, paragraph, place_text, ranking, sentences, short_reason
from qdqspec.report.facts import gains_table, grid
from qdqspec.types import LayerTime
from qdqspec.units import ms_text, percent_text, plain, share_text

SCHEMA_VERSION = 1
_NAME_WIDTH = 60
_LISTED = 12  # most unfused Q and DQ that are listed


def explain_text(engines: Sequence[ExplainedEngine], *, most: int = 12) -> str:
    """Explanation of one, two or several engines; tables are cut after ``most`` rows."""
    return "\n".join(plain(line) for line in _told(engines, most).split("\n"))


def _told(engines: Sequence[ExplainedEngine], most: int) -> str:
    if len(engines) == 1:
        return _single(engines[0], most)
    reference = find_reference(engines)
    if len(engines) == 2:
        tuned = engines[1] if reference is engines[0] else engines[0]
        return _page(compare(reference, tuned), most)
    ordered = sorted(engines, key=lambda engine: engine.milliseconds)
    best, worst = ordered[0], ordered[-1]
    between = compare(worst, best)
    failings = _lines(advice(worst))
    return _joined(
        [
            _ranking_table(ordered, reference),
            _steps(ordered),
            _differences(between, most),
            _pairs(between),
            _matching(between),
            _gains(engines),
            _notes(engines),
            ranking(ordered, reference),
            _lines(sentences(between)),
            f"Reasons why {plain(worst.name)} is slower:\n{failings}" if failings else "",
        ]
    )


def explain_json(engines: Sequence[ExplainedEngine]) -> dict[str, Any]:
    """The explanation as an object, never truncated."""
    ordered = sorted(engines, key=lambda engine: engine.milliseconds)
    reference = find_reference(engines)
    others = [engine for engine in engines if engine is not reference]
    return {
        "schema_version": SCHEMA_VERSION,
        "reference": reference.name,
        "ranking": [engine.name for engine in ordered],
        "engines": [_engine_json(engine) for engine in engines],
        "comparisons": [_comparison_json(compare(reference, other)) for other in others],
        "words": paragraph(compare(reference, others[0])) if len(others) == 1 else None,
    }


def _single(engine: ExplainedEngine, most: int) -> str:
    slowest = sorted(engine.layers, key=lambda layer: -layer.milliseconds)[:most]
    rows = [
        (
            short_place(_layer_name(layer), _NAME_WIDTH),
            ms_text(layer.milliseconds),
            precision_of(layer),
            layer.op_type,
        )
        for layer in slowest
    ]
    table = grid(("layer", "ms", "precision", "kernel"), rows, "lrll")
    return _joined([_summary([engine]), table, _gains([engine]), _notes([engine])])


def _page(comparison: EngineComparison, most: int) -> str:
    return _joined(
        [
            _summary([comparison.reference, comparison.tuned]),
            _differences(comparison, most),
            _pairs(comparison),
            _matching(comparison),
            _gains((comparison.reference, comparison.tuned)),
            _notes((comparison.reference, comparison.tuned)),
            _lines(sentences(comparison)),
        ]
    )


def _lines(said: Sequence[str]) -> str:
    """Sentences one per line, because a terminal wraps lines."""
    return "\n".join(said)


def _matching(comparison: EngineComparison) -> str:
    if not comparison.renamed:
        return ""
    ours, theirs = comparison.reference.name, comparison.tuned.name
    return f"The table names nodes as {ours} does; those of {theirs} were matched by operator and order."


def _gains(engines: Sequence[ExplainedEngine]) -> str:
    """The gain of each correction in the searches that made these engines."""
    tables = [table for engine in engines if (table := gains_table(engine.corrections)) is not None]
    return _joined([f"{table.title}\n{grid(table.headers, table.rows, table.align)}" for table in tables])


def _notes(engines: Sequence[ExplainedEngine]) -> str:
    return "\n".join(dict.fromkeys(f"note: {note}" for engine in engines for note in engine.notes))


# ---- tables -------------------------------------------------------------------------------------

_FACTS: tuple[tuple[str, Callable[[ExplainedEngine], str]], ...] = (
    ("end to end, median ms", lambda e: "-" if e.end_to_end_ms is None else ms_text(e.end_to_end_ms)),
    ("sum of layers, ms", lambda e: ms_text(e.sum_ms)),
    ("kernels", lambda e: _counted(e.kernels, e)),
    ("integer kernels", lambda e: _counted(e.integer, e)),
    ("integer kernels that write floats", lambda e: _counted(e.float_writers, e)),
    ("Q/DQ not fused", lambda e: _counted(e.lonely_pairs, e)),
    ("changes of type or layout", lambda e: _counted(e.conversions, e)),
)


def _summary(engines: Sequence[ExplainedEngine]) -> str:
    rows = [(title, *(cell(engine) for engine in engines)) for title, cell in _FACTS]
    return grid(("", *(plain(engine.name, 28) for engine in engines)), rows, "l" + "r" * len(engines))


def _ranking_table(engines: Sequence[ExplainedEngine], reference: ExplainedEngine) -> str:
    rows = []
    for engine in engines:
        change = (
            percent_text(engine.milliseconds / reference.milliseconds - 1) if reference.milliseconds else ""
        )
        facts = [cell(engine).partition(" ")[0] for _, cell in _FACTS]
        told = "reference" if engine is reference else change
        rows.append((plain(engine.name, 28), facts[0], told, *facts[1:]))
    heads = (
        "",
        "median ms",
        "change",
        "sum ms",
        "kernels",
        "integer",
        "> float",
        "Q/DQ alone",
        "conversions",
    )
    return grid(heads, rows, "lrrrrrrrr")


def _steps(engines: Sequence[ExplainedEngine]) -> str:
    """The main differences between each engine and the next slower one."""
    lines = [
        f"{plain(faster.name)} beside {plain(slower.name)}: {short_reason(compare(slower, faster))}"
        for faster, slower in itertools.pairwise(engines)
    ]
    return "\n".join(lines)


def _differences(comparison: EngineComparison, most: int) -> str:
    chosen = [row for row in comparison.rows if row.reference_ms != row.tuned_ms]
    rows = [
        (
            short_place(place_text(row), _NAME_WIDTH),
            _cell_ms(row.reference, row.reference_ms),
            _cell_ms(row.tuned, row.tuned_ms),
            f"{row.difference_ms:+.4f}",
            _precisions(row.reference),
            _precisions(row.tuned),
            _remark(row),
        )
        for row in chosen[:most]
    ]
    ours, theirs = plain(comparison.reference.name, 20), plain(comparison.tuned.name, 20)
    heads = ("largest differences", f"{ours} ms", f"{theirs} ms", "ms", ours, theirs, "")
    left = f"\n\n{len(chosen) - most} smaller differences are left out." if len(chosen) > most else ""
    return grid(heads, rows, "lrrrlll") + left if rows else ""


def _pairs(comparison: EngineComparison) -> str:
    engine = comparison.tuned
    if not engine.lonely_pairs:
        return ""
    lines = [f"Q and DQ that were not fused in {engine.name}:"]
    for layer in engine.lonely_pairs[:_LISTED]:
        maker = engine.behind(layer)
        where = f"behind {short_place(_layer_name(maker), _NAME_WIDTH)}" if maker else "at the input"
        facts = [f"{ms_text(layer.milliseconds)} ms", layer.precision, where]
        lines.append(f"  {_pair_name(layer)}: {', '.join(fact for fact in facts if fact)}")
    hidden = len(engine.lonely_pairs) - _LISTED
    return "\n".join([*lines, *([f"  and {hidden} more"] if hidden > 0 else [])])


def _pair_name(layer: LayerTime) -> str:
    """Name of a Q or DQ by the tensor it converts if known: a runtime renames the copies that it makes."""
    if not layer.tensors:
        return short_place(layer.name, _NAME_WIDTH)
    return f"{layer.op_type} of {short_place(layer.tensors[0], _NAME_WIDTH)}"


def precision_of(layer: LayerTime) -> str:
    """A layer's precision as reported; else ``integer`` or ``float``."""
    return layer.precision or ("integer" if layer.integer else "" if layer.boundary else "float")


def _precisions(layers: Sequence[LayerTime]) -> str:
    return ", ".join(dict.fromkeys(precision_of(layer) for layer in layers))


def _remark(row: Row) -> str:
    if row.lost_fusion:
        return f"fusion lost: {len(row.reference)} > {len(row.tuned)} kernels"
    if row.won_fusion:
        return f"fused: {len(row.reference)} > {len(row.tuned)} kernels"
    names = dict.fromkeys(
        f"{layer.op_type} alone" if is_pair(layer) else layer.op_type for layer in row.tuned if layer.boundary
    )
    return ", ".join(names)


def _cell_ms(layers: Sequence[LayerTime], milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if layers else "-"


def _counted(layers: Sequence[LayerTime], engine: ExplainedEngine) -> str:
    spent = sum(layer.milliseconds for layer in layers)
    share = f" ({share_text(spent / engine.sum_ms)})" if layers and engine.sum_ms else ""
    return f"{len(layers)}{share}"


def _layer_name(layer: LayerTime) -> str:
    return nodes_text(layer.nodes) or layer.name


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


# ---- JSON ---------------------------------------------------------------------------------------


def _engine_json(engine: ExplainedEngine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "end_to_end_ms": engine.end_to_end_ms,
        "sum_ms": engine.sum_ms,
        "kernels": len(engine.kernels),
        "integer_kernels": len(engine.integer),
        "float_writers": len(engine.float_writers),
        "left_in_float": [_layer_json(layer) for layer in engine.left_in_float],
        "unfused_pairs": [_layer_json(layer) for layer in engine.lonely_pairs],
        "conversions": [_layer_json(layer) for layer in engine.conversions],
        "layers": [asdict(layer) | {"precision": precision_of(layer)} for layer in engine.layers],
        "corrections": [asdict(gain) for gain in engine.corrections],
        "notes": list(engine.notes),
    }


def _comparison_json(comparison: EngineComparison) -> dict[str, Any]:
    return {
        "reference": comparison.reference.name,
        "tuned": comparison.tuned.name,
        "ratio": comparison.ratio,
        "decided_by": "sum of layers" if comparison.decided_by_sum else "end to end",
        "renamed": dict(comparison.renamed),
        "rows": [_row_json(row) for row in comparison.rows],
        "words": paragraph(comparison),
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "place": list(row.place),
        "kind": row.kind,
        "reference_ms": row.reference_ms,
        "tuned_ms": row.tuned_ms,
        "difference_ms": row.difference_ms,
        "lost_fusion": row.lost_fusion,
        "reference": [_layer_json(layer) for layer in row.reference],
        "tuned": [_layer_json(layer) for layer in row.tuned],
    }


def _layer_json(layer: LayerTime) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kernel": layer.op_type,
        "milliseconds": layer.milliseconds,
        "precision": precision_of(layer),
        "integer": layer.integer,
    }
