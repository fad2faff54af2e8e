"""The size and the cost of a search, estimated without building anything."""

from __future__ import annotations

from qdqspec.regions.forecast import forecast_tuning
from qdqspec.regions.inspect import forecast_line
from qdqspec.session.confirm import most_builds
from qdqspec.session.prepare import Prepared
from qdqspec.session.tuning import trials_of
from qdqspec.types import TuneRules
from qdqspec.units import seconds_text


def plan_text(prepared: Prepared, rules: TuneRules) -> str:
    """The largest number of builds, the number of units, and an estimate of the time."""
    space = prepared.candidates
    pairs = space.resolve(space.everything()).pairs
    builds, confirming = trials_of(rules, space), most_builds(pareto=rules.objective == "pareto")
    said = (
        f"{len(space.units)} units in {len(space.regions)} regions can be quantized, "
        f"up to {pairs} Q/DQ pairs; at most {builds} builds and {confirming} to confirm; "
        f"{_forecast(prepared, rules)}"
    )
    if rules.accuracy is None:
        return said
    prepared.scores.require(rules.accuracy.metric)
    return (
        f"{said}; {rules.accuracy.key} on {prepared.scores.samples} samples, of the reference and of each "
        "candidate that has won its races"
    )


def _forecast(prepared: Prepared, rules: TuneRules) -> str:
    """A forecast of the search's time, made without building anything, and the limit that may end it earlier."""
    space, shapes = prepared.candidates, {name: spec.shape for name, spec in prepared.inputs.items()}
    guessed = forecast_line(forecast_tuning(space.model, trials_of(rules, space), shapes))
    if rules.minutes is None:
        return guessed
    return f"{guessed}; ended after {seconds_text(60 * rules.minutes)}"
