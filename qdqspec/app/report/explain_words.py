"""Explains in sentences which engine is faster, the reasons, and possible improvements.

Each sentence states counts and times of the layers. Advice follows the placement rules of NVIDIA's
documentation on explicit quantization, and is given only if the layers show its condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qdqspec._core.units import (
    count_text,
    interval_text,
    ms_text,
    ms_texts_apart,
    percent_text,
    ratio_text,
    share_text,
)
from qdqspec.timing.explained import (
    WEIGHTED_OPS,
    EngineComparison,
    ExplainedEngine,
    nodes_text,
    ops_in,
    short_place,
)
from qdqspec.types import LayerTime

_SAME = 0.005  # relative difference below which times count as equal
_NAMED = 3  # places named in a sentence
_WIDTH = 60
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})


def paragraph(comparison: EngineComparison) -> str:
    """The reasons why the second engine is faster or slower than the first, as one paragraph."""
    return " ".join(sentences(comparison))


def sentences(comparison: EngineComparison) -> list[str]:
    """The sentences of the explanation: ratio, reasons, possible improvements, reliability of the figures."""
    found = [verdict(comparison), *reasons(comparison), *advice(comparison.tuned), caveat(comparison)]
    return [sentence for sentence in found if sentence]


def ranking(engines: Sequence[ExplainedEngine], reference: ExplainedEngine) -> str:
    """Which of several engines is the fastest, and by how much."""
    best, worst = engines[0], engines[-1]
    text = (
        f"{best.name} is the fastest with {ms_text(best.milliseconds)} ms, {_times(worst, best)} as fast as "
        f"{worst.name}, the slowest ({ms_text(worst.milliseconds)} ms)"
    )
    if reference not in (best, worst):
        text += f", and {_times(reference, best)} as fast as the reference {reference.name}"
    slower = [engine.name for engine in engines if engine.milliseconds > reference.milliseconds]
    lost = f" Slower than the reference: {', '.join(slower)}." if slower else ""
    return f"{text}.{lost}"


def verdict(comparison: EngineComparison) -> str:
    """The first sentence: how much faster or slower."""
    ours, theirs = comparison.reference, comparison.tuned
    before, after = ms_texts_apart(ours.milliseconds, theirs.milliseconds)
    how = "by the sum of its layers" if comparison.decided_by_sum else "end to end"
    speedup = theirs.speedup
    interval = "" if speedup is None or speedup.low == speedup.high else f"95 %: {interval_text(speedup)}"
    bounds = theirs.proved or (interval and f" ({interval})")
    times = f"{after} against {before} ms {how}"
    if not math.isfinite(comparison.ratio) or abs(comparison.ratio - 1) < _SAME:
        return f"{theirs.name} is as fast as {ours.name}{bounds}: {times}."
    if comparison.ratio < 1:
        return f"{theirs.name} is {_times(ours, theirs)} as fast as {ours.name}{bounds}: {times}."
    more = percent_text(comparison.ratio - 1).lstrip("+")
    speed = theirs.proved or (interval and f" ({interval} times as fast)")
    return f"{theirs.name} is {more} slower than {ours.name}{speed}: {times}."


def reasons(comparison: EngineComparison) -> list[str]:
    """Differences of the layers, the largest share first."""
    ours, theirs, rows = comparison.reference, comparison.tuned, comparison.rows
    spent = [
        (what, math.fsum(row.difference_ms for row in rows if row.kind == kind))
        for what, kind in (("kernels", "kernel"), ("Q, DQ and conversions between them", "conversion"))
    ]
    spent.sort(key=lambda each: -abs(each[1]))
    text = ", ".join(
        f"{what} take {ms_text(abs(by))} ms {'less' if by < 0 else 'more'}" for what, by in spent
    )
    sentences = [f"By layer, in one profile of each, {text}.", _integers(ours, theirs)]
    left = theirs.left_in_float
    if left and theirs.integer:
        sentences.append(
            f"{count_text(len(left), 'kernel')} with quantized inputs {'does' if len(left) == 1 else 'do'} not "
            f"compute in integers{_cost(left, theirs)}: {_names(left)}."
        )
    before, after = ours.unfused_pairs, theirs.unfused_pairs
    if before or after:
        where = f", where {ours.name} has {len(before)}{_cost(before, ours)}" if before else ""
        verb = "is" if len(after) == 1 else "are"
        sentences.append(f"{len(after) or 'No'} Q or DQ {verb} not fused{_cost(after, theirs)}{where}.")
    before, after = ours.conversions, theirs.conversions
    if len(before) != len(after):
        count = count_text(len(after), "change") if after else "No changes"
        where = f", where {ours.name} has {len(before)}{_cost(before, ours)}"
        sentences.append(f"{count} of type or layout{_cost(after, theirs)}{where}.")
    for what, changed in (
        ("run as more kernels than before", [row for row in rows if row.lost_fusion]),
        ("run as fewer kernels now", [row for row in rows if row.won_fusion]),
    ):
        if changed:
            named = "; ".join(short_place(nodes_text(row.place), _WIDTH) for row in changed[:_NAMED])
            more = "; ..." if len(changed) > _NAMED else ""
            sentences.append(f"The nodes of {count_text(len(changed), 'place')} {what} ({named}{more}).")
    return sentences


def _integers(ours: ExplainedEngine, theirs: ExplainedEngine) -> str:
    if not ours.integer and not theirs.integer:
        return ""
    text = f"{len(theirs.integer)} of {count_text(len(theirs.kernels), 'kernel')} compute in integers"
    if ours.integer:
        text += f" ({len(ours.integer)} of {len(ours.kernels)} in {ours.name})"
    if theirs.float_writers or ours.float_writers:
        before = f" (before: {len(ours.float_writers)})" if ours.float_writers else ""
        text += f"; {len(theirs.float_writers)} of these write floats{before}"
    return f"{text}."


def short_reason(comparison: EngineComparison) -> str:
    """The changes of counts in one line, for tables."""
    ours, theirs = comparison.reference, comparison.tuned
    counts = (
        ("Q/DQ alone", ours.unfused_pairs, theirs.unfused_pairs),
        ("conversions", ours.conversions, theirs.conversions),
        ("integer kernels", ours.integer, theirs.integer),
        ("of these write floats", ours.float_writers, theirs.float_writers),
        ("kernels", ours.kernels, theirs.kernels),
    )
    changes = [f"{what} {len(old)} > {len(new)}" for what, old, new in counts if len(old) != len(new)]
    return ", ".join(changes) or "the same kernels, timed otherwise"


def advice(engine: ExplainedEngine) -> list[str]:
    """Possible improvements, where Q or DQ were not fused and the reason is visible."""
    quantizing = (layer for layer in engine.unfused_pairs if layer.op_type == "QuantizeLinear")
    makers = [maker for layer in quantizing if (maker := engine.behind(layer)) is not None]
    adds = [m for m in makers if m in engine.float_writers and "Add" in ops_in(m.nodes, engine)]
    floats = [m for m in makers if not m.integer]
    pools = [m for m in floats if ops_in(m.nodes, engine) & _POOLS]
    weighted = [m for m in floats if ops_in(m.nodes, engine) & WEIGHTED_OPS and m not in pools]
    refused = [m for m in weighted if engine.reads_alone(m)]
    left = [m for m in weighted if m not in refused]
    found = []
    if adds:
        found.append(
            f"Not fused: {len(adds)} Q after an Add that writes floats because its skip input is float "
            f"({_names(adds)}): quantize the skip input of these Adds, and not the branch of the convolution."
        )
    if pools:
        found.append(
            f"Not fused: {len(pools)} Q after a pool that runs in floats ({_names(pools)}): put the Q before the pool."
        )
    if left:
        found.append(
            f"Not fused: {len(left)} Q after kernels left in float ({_names(left)}): quantize their inputs too."
        )
    if refused:
        still = (
            "kernel between DQ and Q still runs"
            if len(refused) == 1
            else "kernels between DQ and Q still run"
        )
        found.append(
            f"{len(refused)} {still} in float ({_names(refused)}): "
            "the runtime has no integer kernel for these types, zero points or shapes."
        )
    return found


def caveat(comparison: EngineComparison) -> str:
    """The reliability of the sums of layers."""
    engine = comparison.tuned
    if engine.end_to_end_ms is None or not engine.end_to_end_ms:
        return "No end-to-end time is known: sums of layers show where the time is spent, and prove no gain."
    over, outside = engine.sum_ms / engine.end_to_end_ms - 1, _beyond_speedup(comparison)
    if outside or over < _SAME:
        return outside
    return (
        f"The layers of {engine.name} add up to {ms_text(engine.sum_ms)} ms, {share_text(over)} more than end "
        f"to end, "
        "because a profiler prevents overlap: they show where the time is spent, not how much."
    )


def _beyond_speedup(comparison: EngineComparison) -> str:
    """That the sums of kernel times differ by another factor than the measured speed-up; empty if they agree."""
    ours, theirs = comparison.reference, comparison.tuned
    speedup = theirs.speedup
    if speedup is None or comparison.decided_by_sum or not theirs.sum_ms:
        return ""
    factor = ours.sum_ms / theirs.sum_ms
    is_single = speedup.low == speedup.high  # of one race
    if speedup.low <= factor <= speedup.high or (is_single and abs(factor / speedup.median - 1) < 0.05):
        return ""
    measured = f"not the {ratio_text(speedup.median)} of one race"
    if not is_single:
        measured = (
            f"outside the interval of the measured {ratio_text(speedup.median)} ({interval_text(speedup)})"
        )
    of_kernels = theirs.sum_ms - ours.sum_ms
    end_to_end = theirs.milliseconds - ours.milliseconds
    return (
        f"Kernel times are of other runs, one profile of each model: by their sums, {ms_text(theirs.sum_ms)} against "
        f"{ms_text(ours.sum_ms)} ms, {theirs.name} is {ratio_text(factor)} times as fast, {measured}. "
        f"Kernels differ by {_signed(of_kernels)} ms, end to end by {_signed(end_to_end)} ms: "
        "kernel times show where the time is spent, not how much."
    )


def _signed(milliseconds: float) -> str:
    return f"{'+' if milliseconds > 0 else '-'}{ms_text(abs(milliseconds))}"


def _cost(layers: Sequence[LayerTime], engine: ExplainedEngine) -> str:
    spent = math.fsum(layer.milliseconds for layer in layers)
    return f" ({ms_text(spent)} ms, {share_text(spent / engine.sum_ms)})" if layers and engine.sum_ms else ""


def _names(layers: Sequence[LayerTime]) -> str:
    names = [short_place(nodes_text(layer.nodes), _WIDTH) for layer in layers]
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _times(slow: ExplainedEngine, fast: ExplainedEngine) -> str:
    return f"{ratio_text(slow.milliseconds / fast.milliseconds)} times" if fast.milliseconds else "many times"
