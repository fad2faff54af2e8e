"""Builds the charts of a case from its evidence."""

from __future__ import annotations

from qdqspec.report.beside import day_text
from qdqspec.report.facts import MOST_BLOCKS, ROLES, block_errors
from qdqspec.report.svg import Step, Strip, convergence, distributions
from qdqspec.report.svg_bars import Bar, bars
from qdqspec.report.svg_forest import Row, forest
from qdqspec.report.svg_front import Spot, front
from qdqspec.types import (
    EXACT_DB,
    NOT_CANDIDATES,
    BaselineFigure,
    FrontPoint,
    Interval,
    LatencyEvidence,
    RegressionEvidence,
    SearchResult,
    Trial,
)
from qdqspec.units import db_text, ms_text, plain, ratio_text, share_text


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
    """Latency against accuracy for a search with both objectives; empty if the front is one point.

    Points without any error, such as the reference, are omitted: their SQNR is infinite.
    """
    points = [point for point in search.front if point.sqnr_db < EXACT_DB]
    if not points:
        return ""
    ahead = {point.placement for point in search.front}
    behind = [
        Spot(trial.ratio, trial.ratio, trial.ratio, trial.sqnr_db, "dropped", _trial_title(trial))
        for trial in search.trials
        if trial.ratio is not None
        and trial.sqnr_db is not None
        and trial.sqnr_db < EXACT_DB
        and trial.phase not in NOT_CANDIDATES
        and trial.placement.digest not in ahead
    ]
    return front([*behind, *(_point(point, search.winner.digest) for point in points)])


def errors_chart(search: SearchResult) -> str:
    """The share of the error that each block makes, largest first; empty if blocks were not rehearsed."""
    rows = [
        Bar(block, share, share_text(share), f"{block}: {labels}")
        for block, labels, _, share in block_errors(search)[:MOST_BLOCKS]
    ]
    return bars(rows, "Share of the error by block") if len(rows) > 1 else ""


def _trial_title(trial: Trial) -> str:
    assert trial.sqnr_db is not None
    return f"candidate {trial.number} ({plain(trial.phase, 20)}): {db_text(trial.sqnr_db)} dB"


def _point(point: FrontPoint, winner: str) -> Spot:
    shipped = point.placement == winner
    title = f"{point.pairs} pairs: {ratio_text(point.ratio.median)} of reference, {db_text(point.sqnr_db)} dB"
    return Spot(
        point.ratio.median,
        point.ratio.low,
        point.ratio.high,
        point.sqnr_db,
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


def _figure(figure: BaselineFigure, name: str) -> Row:
    return _row(name, figure.ratio, "other")


def _row(name: str, ratio: Interval, style: str) -> Row:
    return Row(name, ratio.median, ratio.low, ratio.high, f"{ratio.median:.3f}", style)
