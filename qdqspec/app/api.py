"""The functions of the package. Each opens a session, does one thing, and closes it.

For several operations on one model, open a `Session`, which keeps its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, overload

from qdqspec.app.evidence.parity import MOST
from qdqspec.app.evidence.timing import time_tuned
from qdqspec.app.given_data import GivenFiles
from qdqspec.app.report.compare import Comparison, compare_runs
from qdqspec.app.report.record import read_record
from qdqspec.app.report.write import write_reports, write_results
from qdqspec.app.session import Session
from qdqspec.app.session.result import Result
from qdqspec.checks import needs_of
from qdqspec.errors import BackendError
from qdqspec.graph import Model, load_model
from qdqspec.graph.regions import find_regions as regions_of
from qdqspec.spec import AskedWithStrategy, GivenModel, PathLike
from qdqspec.types import (
    Case,
    CulpritEvidence,
    LatencyEvidence,
    ParityEvidence,
    Region,
    RegionRules,
    RunRecord,
)

_TIMED = frozenset({"latency", "regression"})


class Machine(TypedDict, total=False):
    """Machine and session options: fields of `qdqspec._core.config.Settings`."""

    backend: str
    backend_option: tuple[str, ...]  # each as ``BACKEND.WORD=VALUE``
    device: int
    threads: int
    jobs: int
    seed: int
    output: Path
    cache_dir: Path
    no_cache: bool
    time_limit: float


class AskedHere(AskedWithStrategy, Machine, total=False):
    """Options of a case, of the machine and of the session."""


def tune(model: GivenModel | Case, **asked: Unpack[AskedHere]) -> Result:
    """Search the fastest Q/DQ placement of a model: ``tune("net.onnx", calibration="data.npz").speedup``.

    The model is a path or an ``onnx.ModelProto``; data is a path, arrays by input name with samples along the first
    axis, or an iterable of feeds, one a sample.

    Its files, ``result.json`` among them, are written to ``reports/<model>/<name>/``, or to ``output``.

    Raises `QdqspecError` if model, data or machine are unsuitable.
    """
    here, rest = _divided(asked)
    with Session(**here) as session:
        result = session.tune(model, **rest)
    write_results(result.record)
    return result


def measure(
    model: GivenModel | Case, tuned: GivenModel | None = None, **asked: Unpack[AskedHere]
) -> LatencyEvidence:
    """Time a model against its known winner, or against ``tuned``: fresh builds of both, interleaved.

    Raises `StateError` if no winner is known for these options, `BackendError` if a model does not run.
    """
    here, rest = _divided(asked)
    with Session(mode="measure", **here) as session:
        if tuned is None:
            return session.tune(model, **rest).latency
        path = _path(cast("PathLike", session.file(tuned)))
        measured = time_tuned(session.work(session.case(model, rest)).prepared, path)
        if "tuned" not in measured.samples:
            raise BackendError(f"the model does not run: {measured.failures['tuned']}", where=path)
        return measured


@overload
def verify(model: GivenModel | Case, tuned: GivenModel, **asked: Unpack[AskedHere]) -> ParityEvidence: ...


@overload
def verify(model: GivenModel | Case, tuned: None = None, **asked: Unpack[AskedHere]) -> RunRecord: ...


def verify(
    model: GivenModel | Case, tuned: GivenModel | None = None, **asked: Unpack[AskedHere]
) -> ParityEvidence | RunRecord:
    """Compare the outputs of ``tuned`` with a model's, on its evaluation or calibration data; nothing is timed.

    Without ``tuned``, ``model`` is a case of a spec (``net.qdq.yaml::int8``): its checks that need no timing
    are judged on its known winner. Raises `StateError` if none is known.
    """
    here, rest = _divided(asked)
    with Session(mode="verify", **here) as session:
        case = session.case(model, rest)
        if tuned is not None:
            return session.work(case).parity_with(_path(cast("PathLike", session.file(tuned))))
        for check in case.checks:
            if not needs_of(check) & _TIMED:
                session.judge(case, check)
        return session.record()


def find_culprits(
    model: GivenModel | Case,
    tuned: GivenModel | None = None,
    *,
    most: int | None = MOST,
    **asked: Unpack[AskedHere],
) -> CulpritEvidence:
    """Rank the Q/DQ pairs of ``tuned``, from any quantizer, by the accuracy they cost; without it, of the known winner.

    Raises `StateError` if no winner is known for these options.
    """
    here, rest = _divided(asked)
    with Session(mode="verify", **here) as session:
        return session.find_culprits(model, tuned, most=most, **rest)


def compare(before: RunRecord | PathLike, after: RunRecord | PathLike) -> Comparison:
    """Compare two runs, or the JSON records of two runs, case by case: faster, same or slower, with intervals.

    Raises `StateError` if they are not comparable.
    """
    return compare_runs(_record(before), _record(after))


def render(record: RunRecord, path: PathLike) -> Path:
    """Write a report; the suffix selects its format. Raises `ConfigError` for an unknown one."""
    target = _path(path)
    write_reports(record, [target])
    return target


def find_regions(
    model: Model | GivenModel, rules: RegionRules | None = None, *, groups: Sequence[Sequence[str]] = ()
) -> tuple[Region, ...]:
    """Cut a model into regions, by structure or according to ``rules``; ``groups`` are the fusions of a backend."""
    files = GivenFiles()  # its files exist as long as it does
    given = files.model(model)
    loaded = given if isinstance(given, Model) else load_model(_path(cast("PathLike", given)))
    return regions_of(loaded, rules or RegionRules(), groups=groups)


def _divided(asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    here = Machine.__annotations__
    return {k: v for k, v in asked.items() if k in here}, {k: v for k, v in asked.items() if k not in here}


def _path(path: PathLike) -> Path:
    return Path(path).absolute()


def _record(run: RunRecord | PathLike) -> RunRecord:
    return run if isinstance(run, RunRecord) else read_record(_path(run))
