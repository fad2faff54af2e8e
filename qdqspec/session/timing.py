"""Times the model files of a case against each other, whatever tool made them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qdqspec.measurement.bench import Bench
from qdqspec.measurement.profiles import Feeds
from qdqspec.session.half import stand_in
from qdqspec.session.tuning import clock_for
from qdqspec.session.workbench import Workbench
from qdqspec.types import LatencyEvidence, TuneRules

BUILDS, ROUNDS = 3, 24  # the same precision as the confirmation of a search


def time_files(
    work: Workbench,
    files: Mapping[str, Path],
    feeds: Feeds,
    rules: TuneRules,
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
) -> LatencyEvidence:
    """Time files by role (including ``reference`` and ``tuned``), interleaved, from fresh builds.

    Raises `BackendError` if the reference does not run; another role that fails is omitted, with its reason recorded.
    """
    roles = {role: stand_in(path) for role, path in files.items()}
    written = {roles[role].digest: path for role, path in files.items()}
    bench = Bench(
        work.backend,
        lambda placement: written[placement.digest],
        feeds,
        clock=clock_for(rules, work.settings.threads),
        random=np.random.default_rng(work.settings.seed),
        options=work.options,
        exclusive=work.exclusive,
        jobs=work.jobs,
    )
    return bench.compare(roles, builds=builds, rounds=rounds)
