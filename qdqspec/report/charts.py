"""The charts of a case, from its evidence. May import floor 0 and this room's drawing."""

from __future__ import annotations

from qdqspec.report.facts import ROLES
from qdqspec.report.svg import Step, Strip, convergence, distributions
from qdqspec.types import NOT_CANDIDATES, LatencyEvidence, SearchResult, Trial
from qdqspec.units import ms_text, plain, ratio_text


def latency_chart(latency: LatencyEvidence) -> str:
    """Every role's runs on the gating clock; empty where there are none."""
    strips = [
        Strip(
            ROLES.get(role, plain(role, 18)),
            samples.on(latency.clock),
            f"{ms_text(latency.median_ms(role))} ms",
            "tuned" if role == "tuned" else "other",
        )
        for role, samples in latency.samples.items()
    ]
    return distributions(strips, "ms") if strips else ""


def search_chart(search: SearchResult) -> str:
    """Every candidate in the order it was built; empty where there were fewer than two."""
    steps = [_step(trial) for trial in search.trials if trial.phase not in NOT_CANDIDATES]
    return convergence(steps) if len(steps) > 1 else ""


def _step(trial: Trial) -> Step:
    name = f"candidate {trial.number} ({plain(trial.phase, 20)})"
    if not trial.ok or trial.ratio is None:
        return Step(trial.number, None, "failed", f"{name}: failed. {plain(trial.error or '', 120)}")
    fate = "kept" if trial.incumbent else trial.race.verdict if trial.race else "not raced"
    style = "kept" if trial.incumbent else "dropped"
    return Step(trial.number, trial.ratio, style, f"{name}: {ratio_text(trial.ratio)} of reference, {fate}")
