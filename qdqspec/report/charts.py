"""Builds the charts of a case from its evidence."""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec.report.beside import day_text
from qdqspec.report.facts import MOST_BLOCKS, ROLES, block_errors
from qdqspec.report.svg import Step, Strip, convergence, distributions
from qdqspec.report.svg_bars import Bar, bars
from qdqspec.report.svg_forest import ForestRow, forest
from qdqspec.report.svg_front import Spot, front
from qdqspec.report.svg_graph import part_text
from qdqspec.types import (
    EXACT_DB,
    NOT_CANDIDATES,
    BaselineFigure,
    FrontPoint,
    GraphPart,
    Interval,
    LatencyEvidence,
    RegressionEvidence,
    SearchResult,
    Trial,
)
from qdqspec.units import db_text, metric_text, ms_text, plain, ratio_text, share_text


def latency_chart(latency: LatencyEvidence) -> str:
    """The samples of each role on the gating clock; empty without samples."""
    strips = [
        Strip(
            ROLES.get(role, plain(role, 18)),
            latency.line(role).run_ms(latency.clock),
            f"{ms_text(latency.median_ms(role))} ms",
            "tuned" if role == "tuned" else "other",
        )
        for role in latency.samples
    ]
    return distributions(strips, "ms") if strips else ""


def search_chart(search: SearchResult) -> str:
    """Each candidate in the order it was built; empty for fewer than two candidates."""
    steps = [_step(trial) for trial in search.trials if trial.phase not in NOT_CANDIDATES]
    return convergence(steps) if len(steps) > 1 else ""


def _step(trial: Trial) -> Step:
    name = f"candidate {trial.number} ({plain(trial.phase, 20)})"
    if not trial.ok or trial.ratio is None:
        return Step(trial.number, None, "failed", f"{name}: failed. {plain(trial.error or '', 120)}")
    fate = "kept" if trial.incumbent else trial.race.verdict if trial.race else "not raced"
    style = "kept" if trial.incumbent else "dropped"
    return Step(trial.number, trial.ratio, style, f"{name}: {ratio_text(trial.ratio)} of reference, {fate}")


def front_chart(search: SearchResult) -> str:
    """Latency against accuracy for a search with both objectives: the task metric that was asked for, else SQNR.

    Points without any error, such as the reference, are omitted from a chart of SQNR: it is infinite. Empty if no
    point is left.
    """
    metric = None if search.accuracy is None else search.accuracy.metric
    points = [(point, level) for point in search.front if (level := _level(point, metric)) is not None]
    if not points:
        return ""
    ahead = {point.placement for point in search.front}
    behind = [
        Spot(trial.ratio, trial.ratio, trial.ratio, level, "dropped", _trial_title(trial, level, metric))
        for trial in search.trials
        if trial.ratio is not None
        and (level := _level(trial, metric)) is not None
        and trial.phase not in NOT_CANDIDATES
        and trial.placement.digest not in ahead
    ]
    spots = [_point(point, level, metric, search.winner.digest) for point, level in points]
    return front([*behind, *spots], "SQNR, dB" if metric is None else plain(metric, 24))


def _level(measured: FrontPoint | Trial, metric: str | None) -> float | None:
    """The accuracy on the vertical axis; ``None`` if it was not measured or is infinite."""
    if metric is not None:
        return measured.accuracy
    return measured.sqnr_db if measured.sqnr_db is not None and measured.sqnr_db < EXACT_DB else None


def _level_text(level: float, metric: str | None) -> str:
    return f"{db_text(level)} dB" if metric is None else f"{plain(metric, 24)} {metric_text(metric, level)}"


def errors_chart(search: SearchResult) -> str:
    """The share of the error that each block makes, largest first; empty if blocks were not rehearsed."""
    rows = [
        Bar(block, (("tuned", share, share_text(share)),), f"{block}: {labels}")
        for block, labels, _, share in block_errors(search)[:MOST_BLOCKS]
    ]
    return bars(rows, "Share of the error by block") if len(rows) > 1 else ""


def layers_chart(parts: Sequence[GraphPart]) -> str:
    """The time of each part in the reference and in the selected model, the longest first; empty without times."""
    timed = [part for part in parts if part.reference_ms is not None]
    timed.sort(key=lambda part: -max(part.reference_ms or 0.0, part.tuned_ms or 0.0))
    rows = []
    for part in timed[:MOST_BLOCKS]:
        times = (("other", part.reference_ms), ("tuned", part.tuned_ms))
        figures = tuple((style, ms, ms_text(ms)) for style, ms in times if ms is not None)
        rows.append(Bar(plain(part.name, 60), figures, f"{plain(part.name, 80)}: {part_text(part)}"))
    return bars(rows, "Milliseconds by part of the model, reference and tuned") if rows else ""


def _trial_title(trial: Trial, level: float, metric: str | None) -> str:
    return f"candidate {trial.number} ({plain(trial.phase, 20)}): {_level_text(level, metric)}"


def _point(point: FrontPoint, level: float, metric: str | None, winner: str) -> Spot:
    shipped = point.placement == winner
    said = _level_text(level, metric)
    title = f"{point.pairs} pairs: {ratio_text(point.ratio.median)} of reference, {said}"
    return Spot(
        point.ratio.median,
        point.ratio.low,
        point.ratio.high,
        level,
        "kept" if shipped else "front",
        f"{title}{', selected' if shipped else ''}",
    )


def baseline_chart(found: RegressionEvidence) -> str:
    """This run's ratio below those of its baseline, and those of other devices; empty for a single row."""
    rows = [_figure(figure, day_text(figure.recorded) or "undated") for figure in found.history]
    if found.ratio is not None and found.state == "compared":
        rows.append(_row("this run", found.ratio, "tuned"))
    rows += [_figure(figure, plain(figure.device, 20)) for figure in found.elsewhere]
    mark = found.history[-1].ratio.median if found.history else None
    return forest(rows, mark, "Tuned over reference") if len(rows) > 1 else ""


def _figure(figure: BaselineFigure, name: str) -> ForestRow:
    return _row(name, figure.ratio, "other")


def _row(name: str, ratio: Interval, style: str) -> ForestRow:
    return ForestRow(name, ratio.median, ratio.low, ratio.high, f"{ratio.median:.3f}", style)
