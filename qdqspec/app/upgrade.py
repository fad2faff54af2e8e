"""Replays tuned models under another version of the runtime, in another Python environment.

Float and tuned model are built anew under both versions and timed in one interleaved run, so that a change of the
machine's speed is not taken for a change of the runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.accuracy import SampleOutputs, compare_outputs
from qdqspec.app.evidence.explained import layer_changes, median_layers
from qdqspec.app.evidence.timing import TimedFile, time_across
from qdqspec.backends import Array, Environment, Isolated
from qdqspec.errors import BackendError
from qdqspec.types import LayerChange, Upgrade, UpgradeState

if TYPE_CHECKING:
    from qdqspec.app.session.work import CaseWork

FLOAT_HERE, TUNED_HERE, FLOAT_THERE, TUNED_THERE = "float here", "tuned here", "float there", "tuned there"


def check_upgrade(
    work: CaseWork, tuned: Path, environment: Environment, allowed: float, *, samples: int = 8
) -> Upgrade:
    """Measure a tuned model in this environment and another; failures there are the result.

    ``allowed`` is the share by which it may be slower there. Outputs are compared on so many ``samples``: more take
    longer, and find rare errors.

    Raises `BackendError` if a model does not run in this environment.
    """
    setup, case = work.prepared, work.prepared.case
    found = Upgrade(case=case.name, backend=setup.backend.name, state="ok")
    with closing(Isolated(setup.backend.name, interpreter=environment)) as there:
        own = TimedFile.of(setup)
        here = replace(own, options=replace(own.options, state=None))  # it holds data of one version
        files = {
            FLOAT_HERE: here,
            TUNED_HERE: replace(here, path=tuned),
            FLOAT_THERE: replace(here, backend=there),
            TUNED_THERE: replace(here, backend=there, path=tuned),
        }
        timed, clock = time_across(files)
        for label in (FLOAT_HERE, TUNED_HERE):
            if label in timed.failures:
                raise BackendError(
                    f"the {label.split()[0]} model does not run in this environment: {timed.failures[label]}",
                    where=case.name,
                )
        if TUNED_THERE in timed.failures:
            return replace(found, state="failed", reason=str(timed.failures[TUNED_THERE]))
        over_tuned, over_float = timed.ratios(TUNED_HERE, clock), timed.ratios(FLOAT_HERE, clock)
        # The float model may have failed there.
        over_there = timed.ratios(FLOAT_THERE, clock) if FLOAT_THERE in timed.samples else {}
        here_ms = timed.joined(TUNED_HERE).median_ms(clock)
        found = replace(
            found,
            clock=clock,
            here_ms=here_ms,
            there_ms=here_ms * over_tuned[TUNED_THERE].median,
            change=over_tuned[TUNED_THERE],
            float_change=over_float.get(FLOAT_THERE),
            ratio_here=over_float[TUNED_HERE],
            ratio_there=over_there.get(TUNED_THERE),
        )
        try:
            found = replace(
                found,
                layers=_compare_layers(files),
                sqnr_here_db=_measure_sqnr_db(work, files, TUNED_HERE, samples),
                sqnr_there_db=_measure_sqnr_db(work, files, TUNED_THERE, samples),
            )
        except BackendError as error:
            return replace(found, state="failed", reason=str(error))
    state, reason = judge_upgrade(found, allowed, case.tune.limits.min_sqnr_db)
    return replace(found, state=state, reason=reason)


def judge_upgrade(found: Upgrade, allowed: float, min_sqnr_db: float | None) -> tuple[UpgradeState, str]:
    """The state of a measured upgrade, and why. Slower means proved: the whole 95 % interval lies above 1.

    A model without a limit, or below it in both environments, as on random inputs, is less accurate there from one dB.
    """
    change, there = found.change, found.ratio_there
    if change is not None and change.low > 1 and change.median > 1 + allowed:
        bounds = f"95 %: {change.low - 1:+.1%} to {change.high - 1:+.1%}"
        return "slower", f"{change.median - 1:.1%} ({bounds}) slower there, and {allowed:.1%} is allowed"
    if there is not None and there.low > 1:
        return "slower than float", f"there it takes {there.median:.2f} of the float model's time"
    here_db, there_db = found.sqnr_here_db, found.sqnr_there_db
    if here_db is None or there_db is None:
        return "ok", ""
    if there_db < (here_db - 1.0 if min_sqnr_db is None or here_db < min_sqnr_db else min_sqnr_db):
        limit = "1 dB less is allowed" if min_sqnr_db is None else f"limit {min_sqnr_db:g} dB"
        return "less accurate", f"SQNR {there_db:.1f} dB there ({here_db:.1f} here), {limit}"
    return "ok", ""


def _compare_layers(
    files: Mapping[str, TimedFile], *, builds: int = 2, profiles: int = 3
) -> tuple[LayerChange, ...]:
    """The kernels of the tuned model that differ; profiled in turn, so that both have the same speed of the machine.

    The median of the ``profiles`` of each engine counts. More of them, and more ``builds``, take longer and report
    fewer differences that are noise.
    """
    with ExitStack() as opened:
        labels = (TUNED_HERE, TUNED_THERE) * builds
        engines = [opened.enter_context(closing(files[label].open())) for label in labels]
        rounds = [[engine.layers() for engine in engines] for _ in range(profiles)]
    layers = [median_layers(found) for found in zip(*rounds, strict=True)]
    return layer_changes(layers[::2], layers[1::2])


def _measure_sqnr_db(work: CaseWork, files: Mapping[str, TimedFile], label: str, samples: int) -> float:
    """The SQNR of the worst output against the float model in this environment, on a few inputs."""

    def runs() -> Iterator[SampleOutputs]:
        data, _ = work.prepared.data.for_comparison()
        with closing(files[FLOAT_HERE].open()) as reference, closing(files[label].open()) as tuned:
            for feeds in itertools.islice(data, samples):
                own: dict[str, Array] = dict(feeds)
                yield SampleOutputs(reference.run(own), tuned.run(own), None)

    return compare_outputs(runs(), "sampled", ()).sqnr_db
