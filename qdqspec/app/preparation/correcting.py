"""The corrections of a case: products with factors of channels, and what helps on calibration data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from qdqspec._core.units import metric_text
from qdqspec.accuracy import Rehearsal, RehearsalRefusedError
from qdqspec.accuracy.corrections import (
    MIN_SAMPLES,
    CorrectionTask,
    FoundCorrections,
    find_corrections,
)
from qdqspec.app.preparation.runtimes import reference_runtime
from qdqspec.errors import BackendError, DataError
from qdqspec.graph import Model
from qdqspec.qdq import Equalization, SchemeSpace, choose_branches
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

NEED_RANGES = ("equalization", "ranges")  # corrections that need ranges by calibration
UNTIMED = ("bias", "ranges")  # corrections that `auto` includes only where nothing is timed


def find_branches(prepared: Prepared, model: Model, samples: int = 16) -> tuple[Equalization, ...]:
    """The branches of the model of a case whose factors reduce the error: see `choose_branches`.

    More ``samples`` show rarer values, and take the time of a run each. If the user or ``start_from`` gives scales,
    there are no branches: such scales fit the unchanged model only.
    """
    case, data = prepared.case, prepared.data.calibration
    if "equalization" not in case.quantize.allowed_corrections or data is None or len(data) < MIN_SAMPLES:
        return ()
    if case.inputs.scales is not None or prepared.start_scales.tensors or not prepared.capabilities.computes:
        return ()
    try:
        return choose_branches(
            model,
            prepared.capabilities,
            case.quantize,
            lambda extended, sources: prepared.values_of(extended, sources, islice(data, samples)),
        )
    except BackendError:
        return ()  # calibration has the same failure, and reports it


def find_case_corrections(
    prepared: Prepared,
    *,
    share: float = 0.15,
    seconds: Mapping[str, float] = MappingProxyType({"quick": 5.0, "default": 15.0, "extensive": 60.0}),
    margin_db: float = 3.0,
) -> FoundCorrections:
    """The corrections that help; none without calibration data or if the model cannot be rehearsed.

    They may take ``share`` of the search's time, and at most ``seconds``, by preset: more finds more in slow models.
    None are sought if everything quantized is ``margin_db`` above the SQNR limit: a larger margin seeks them more
    often, and lets selected models be quantized further. Biases and ranges are corrected if nothing is timed, or if the
    case names them: selected models are no faster by them. Under a limit of a task metric, corrections that lower it
    are not taken.
    """
    case, tune, rules = prepared.case, prepared.case.tune, prepared.case.quantize
    allowed = rules.allowed_corrections
    if rules.corrections == "auto" and prepared.capabilities.has_clock and tune.objective != "coverage":
        allowed = tuple(name for name in allowed if name not in UNTIMED)
    able = allowed and prepared.capabilities.computes and prepared.space.units
    if not able or prepared.data.calibration is None:
        return FoundCorrections()
    samples = len(prepared.data.calibration)
    if samples < MIN_SAMPLES and rules.corrections != "auto":
        prepared.note_once(
            f"corrections need {MIN_SAMPLES} calibration samples, and there are {samples}: none is applied"
        )
    # corrections are sought for any SQNR if accuracy limits the search otherwise, or they are asked for by name
    least_db, enough_db = tune.limits.min_sqnr_db, math.inf
    if tune.accuracy is None and tune.objective != "pareto" and rules.corrections == "auto":
        enough_db = -math.inf if least_db is None else least_db + margin_db
    if samples < MIN_SAMPLES or enough_db == -math.inf:
        return FoundCorrections()
    given = () if case.inputs.scales is None else NEED_RANGES
    numbers = prepared.calibrated[1]
    weights = numbers.corrections.weights  # those of a quantized model that the search starts from
    most = seconds[tune.preset]
    with ExitStack() as opened:
        task = CorrectionTask(
            model=prepared.folded,
            numbers=numbers,
            placements=judged_placements(prepared.space),
            feeds=prepared.data.feeds,
            runtime=reference_runtime(opened, prepared.options, prepared.backend),
            rounds_biases=prepared.capabilities.rounds_biases,
            ranges=lambda model, more, every: prepared.tensor_ranges(
                model, prepared.space.tensors, more, every=every
            ),
            method=rules.calibration,
            observe=prepared.values_of,
            allowed=tuple(name for name in allowed if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=frozenset((*prepared.start_scales.ranges, *(tensor for tensor, _, _ in weights))),
            recalibrated=prepared.recalibrated,
            enough_db=enough_db,
            seconds=most if tune.minutes is None else min(most, share * 60 * tune.minutes),
        )
        try:
            found = find_corrections(task)
            if lost := lost_metric_text(prepared, task, found):
                prepared.note_once(f"no corrections are applied: {lost}")
                gains = tuple(replace(gain, taken=False) for gain in found.gains)
                found = FoundCorrections(gains=gains, failures=found.failures)
        except (BackendError, RehearsalRefusedError) as error:
            prepared.note_once(f"no corrections are applied: {error.what}")
            return FoundCorrections()
    for name, reason in found.failures.items():
        prepared.note_once(f"the correction '{name}' could not be tried: {reason}")
    return found


def lost_metric_text(
    prepared: Prepared,
    task: CorrectionTask,
    found: FoundCorrections,
    *,
    share: float = 1 / 6,
    least_feeds: int = 16,
) -> str:
    """The loss of the task metric that limits a case by the corrections, rehearsed for everything quantized.

    It is computed on as many evaluation feeds as take a ``share`` of the task's time, and on ``least_feeds``: more
    find smaller losses. Empty if there is no loss, or the metric cannot be computed on these feeds.
    """
    rules, values, feeds = prepared.case.tune.accuracy, list[float](), 0
    if rules is None or not any(gain.taken for gain in found.gains):
        return ""
    numbers = (found.numbers or task.numbers).corrected(ranges=found.ranges, biases=found.biases)
    for model, own in ((task.model, task.numbers), (found.model or task.model, numbers)):
        with Rehearsal(
            model, task.sites, own, task.feeds, task.runtime, rounds_biases=task.rounds_biases
        ) as rehearsal:
            engine = rehearsal.engine(task.placements[0])
            engine.run(next(iter(task.feeds())))  # shows the time of a run
            feeds = feeds or max(least_feeds, int(share * task.seconds / max(rehearsal.run_seconds, 1e-6)))
            try:
                score = prepared.scores.of_engine(engine, rules.metric, rules.output, feeds=feeds)
            except DataError:
                return ""
            values.append(score.value)
    before, after = (metric_text(rules.metric, value) for value in values)
    return (
        f"they lower {rules.key} of everything quantized from {before} to {after}"
        if values[1] < values[0]
        else ""
    )


def judged_placements(space: SchemeSpace) -> tuple[Placement, ...]:
    """The placements that corrections are judged on: everything, and only linear operators with float outputs."""
    linear = {
        unit.id: "in-only"
        for unit in space.units
        if unit.op_type in ("Gemm", "MatMul") and "in-only" in unit.labels
    }
    found = (space.resolve(space.everything()), space.resolve(linear))
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())
