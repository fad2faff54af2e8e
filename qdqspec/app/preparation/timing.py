"""Times model files of any tool against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec._core.temporary import TemporaryFolder
from qdqspec.app.preparation.candidates import plain_file
from qdqspec.app.preparation.float_types import half_reference, note_float_types
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.resources import Resources
from qdqspec.graph.model import require_path
from qdqspec.timing.bench import Bench
from qdqspec.timing.profiles import GivenFeeds
from qdqspec.types import FLOAT32, Clock, LatencyEvidence, TuneRules

Measure: TypeAlias = Callable[[int, int], LatencyEvidence]  # by numbers of builds and rounds

BUILDS, ROUNDS = 3, 24  # the same precision as the confirmation of a search


def clock_for(rules: TuneRules, threads: int) -> Clock:
    """The clock that decides races: thread CPU time for one thread, else wall time."""
    return rules.clock if rules.clock != "auto" else "cpu" if threads == 1 else "wall"


def time_files(
    resources: Resources,
    files: Mapping[str, Path],
    feeds: GivenFeeds,
    rules: TuneRules,
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
) -> LatencyEvidence:
    """Time files by role (including ``reference`` and ``tuned``), interleaved, from fresh builds.

    Raises `BackendError` if the reference does not run; another role that fails is omitted, with its reason recorded.
    """
    bench = Bench(
        resources.backend,
        None,
        feeds,
        clock=clock_for(rules, resources.settings.threads),
        random=np.random.default_rng(resources.settings.seed),
        options=resources.options,
        exclusive=resources.exclusive,
        jobs=resources.jobs,
        report=resources.report_step,
    )
    return bench.compare(files, builds=builds, rounds=rounds)


def time_tuned(
    prepared: Prepared, tuned: Path, builds: int = BUILDS, rounds: int = ROUNDS
) -> LatencyEvidence:
    """Time the given model and another with the same inputs, interleaved, from fresh builds.

    The given model in float16 is timed too, if `half_reference` can make it, and in float32 if candidates are.
    """
    files = {"reference": require_path(prepared.given), "tuned": tuned}
    loads, rules = prepared.loads, prepared.case.tune
    with TemporaryFolder() as folder:
        files |= half_reference(prepared, folder)
        if prepared.is_converted:
            files[FLOAT32] = plain_file(prepared, folder)
        measured = time_files(prepared.resources, files, loads, rules, builds=builds, rounds=rounds)
    note_float_types(prepared, measured)
    return measured
