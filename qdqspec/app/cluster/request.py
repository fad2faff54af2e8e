"""A case with its settings and files as a request to a worker, the process that runs it, and its answer.

The request is JSON data, and each path of the case is relative to the job's folder. A worker runs one case by
``python -m qdqspec.app.cluster.request FOLDER SETTINGS``: it reads ``request.json`` of the folder, reports progress on
standard output, one JSON line each, and writes ``answer.json``. It ends with all its children as soon as its standard
input is closed, so that nothing is left of a case whose worker was killed.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from qdqspec._core.config import Settings
from qdqspec._core.files import replace_file
from qdqspec._core.options import check_option
from qdqspec._core.records import from_data, to_data
from qdqspec._core.registry import resolve
from qdqspec.app.cases import judge_case
from qdqspec.checks import FOLDER, Check, baseline_folder, requested
from qdqspec.errors import ConfigError, DataError, ModelError, QdqspecError
from qdqspec.graph import load_model
from qdqspec.types import Case, CheckSpec, Data, DataSource
from qdqspec.types.requests import ScoreRequest

_TO_WORKER = "to: qdqspec worker ADDRESS"
INPUTS, OUTPUT, CACHE = "inputs", "output", "cache"  # folders of a job
REQUEST, ANSWER, LOG = "request.json", "answer.json", "log.txt"
# Settings that a client decides. The device, plugins and the worker's own options of backends are the worker's.
_SENT = (
    "backend", "mode", "retune", "no_cache", "seed", "threads", "jobs", "time_limit", "build_limit", "require",
    "scheme", "baseline", "update", "update_in_ci", "backend_option", "in_ci",
)  # fmt: skip


@dataclass(slots=True)
class Package:
    """The request of a case, with its settings, as JSON data, and the files that both need."""

    request: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)  # by path in the job's folder
    places: list[tuple[str, Path]] = field(default_factory=list)  # a path of the case in the job, and here

    def add_folder(self, path: str, source: Path) -> None:
        """Add all files below a folder."""
        for file in sorted(each for each in source.rglob("*") if each.is_file()):
            self.files[f"{path}/{file.relative_to(source).as_posix()}"] = file

    def place(self, path: Path | None) -> Path | None:
        """Add a file, a folder or the files of a glob of the case, and return its path in the job's folder."""
        if path is None:
            return None
        if path.exists() or not glob.has_magic(str(path)):
            place = f"{INPUTS}/{len(self.places)}/{path.name}"
            self.places.append((place, path))
            if path.is_dir():
                self.add_folder(place, path)
            elif path.is_file():
                self.files[place] = path
            else:
                raise DataError("this file does not exist", where=path)
            return Path(place)
        base = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
        place = f"{INPUTS}/{len(self.places)}"
        self.places.append((place, base))
        for name in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 - it is absolute
            if Path(name).is_file():
                self.files[f"{place}/{Path(name).relative_to(base).as_posix()}"] = Path(name)
        return Path(place) / path.relative_to(base)


def pack(case: Case, settings: Settings) -> Package:
    """The package of a case. Raises `QdqspecError` if it depends on something that cannot be sent."""
    _refuse_local(case, settings)
    package = Package()
    moved = _move_paths(case, package.place)
    for file in load_model(case.model).external_files():
        relative = Path(os.path.relpath(file, case.model.parent))
        if ".." in relative.parts:
            raise ModelError("its external data is not below its own folder", where=case.model)
        package.files[(moved.model.parent / relative).as_posix()] = file
    if case.spec is not None and moved.spec is not None:
        own, sent = baseline_folder(case.spec), moved.spec.parent / FOLDER / case.spec_name
        package.files |= {(sent / file.name).as_posix(): file for file in sorted(own.glob("*.json"))}
    package.request["case"] = to_data(replace(moved, metrics={}, loaders={}))
    package.request["settings"] = {name: to_data(getattr(settings, name)) for name in _SENT}
    return package


def unpack(request: Mapping[str, Any], folder: Path, worker: Settings) -> tuple[Case, Settings]:
    """The case and settings of a request, with paths in ``folder`` and the worker's own device, plugins and options.

    Nothing is checked again: a client that reaches the port can run any code on a worker.
    """
    data = dict(request["case"])
    checks = []
    for check in data.pop("checks"):
        kind = cast("Check", resolve("check", check["kind"]))
        checks.append(CheckSpec(**{**check, "params": kind.Params.model_validate(check["params"])}))
    case = from_data(Case, data)

    case = replace(_move_paths(case, lambda path: path and folder / path), checks=tuple(checks))
    given = from_data(Settings, {name: value for name, value in request["settings"].items() if name in _SENT})
    return case, replace(
        given,
        root=folder / INPUTS,
        output=folder / OUTPUT,
        cache_dir=folder / CACHE,
        layout="",
        device=worker.device,
        plugin=worker.plugin,
        backend_option=(*given.backend_option, *worker.backend_option),
    )


def _move_paths(case: Case, path: Callable[[Path | None], Path | None]) -> Case:
    """The case with all paths changed, also the paths of its data."""

    def data(source: DataSource | None) -> DataSource | None:
        if not isinstance(source, Data):
            return path(source)
        return replace(source, path=path(source.path), labels=path(source.labels))

    model = path(case.model)
    assert model is not None
    return replace(
        case,
        model=model,
        spec=path(case.spec),
        inputs=replace(
            case.inputs,
            calibration=data(case.inputs.calibration),
            scales=path(case.inputs.scales),
            evaluation=data(case.inputs.evaluation),
        ),
        regions=replace(case.regions, graph=path(case.regions.graph)),
        tune=replace(case.tune, start_from=tuple(filter(None, map(path, case.tune.start_from)))),
    )


def _refuse_local(case: Case, settings: Settings) -> None:
    """Reject parts that exist only on the client: loaders and metrics in Python, plugins, settings of the device."""
    for source in (case.inputs.calibration, case.inputs.evaluation):
        if isinstance(source, Data) and (source.loader or source.path is None):
            raise ConfigError(
                f"the data loader {source.loader} is Python code of this project, which is not sent to workers",
                cure="save its feeds as .npz, or run this case without --qdq-cluster",
            )
    asked = {request.metric for _, request in requested(case.checks, ScoreRequest)}
    if case.tune.accuracy is not None:
        asked.add(case.tune.accuracy.metric)
    own = sorted(asked & set(case.metrics))
    if own:
        raise ConfigError(
            f"the metric {', '.join(own)} is Python code of this project, which is not sent to workers",
            where=case.name,
            cure="use top1, top5 or miou, or run this case without --qdq-cluster",
        )
    if settings.plugin:
        raise ConfigError(
            "--qdq-plugin loads native code, which a worker loads only if its own command line names it",
            cure=f"give --plugin {_TO_WORKER}",
        )
    for option in settings.backend_option:
        what = "--qdq-backend-option with --qdq-cluster"
        check_option(option, what, command_line=False, prefix="--", place=_TO_WORKER)


# ---- the process of a case -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A `QdqspecError` as data, by the name of its class."""

    kind: str
    what: str
    where: str | None = None
    cure: str | None = None

    @classmethod
    def of(cls, error: QdqspecError) -> Failure:
        """The failure of an error."""
        return cls(kind=type(error).__name__, what=error.what, where=error.where, cure=error.cure)

    def error(self) -> QdqspecError:
        """The error, of the same class; a `PatternError` becomes a `SpecError`."""
        from qdqspec import errors

        kind: Any = getattr(errors, self.kind, QdqspecError)
        if kind is errors.PatternError:
            kind = errors.SpecError
        found: QdqspecError = kind(self.what, where=self.where, cure=self.cure)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a case: its run record and baselines as JSON data, and the errors of its checks by id.

    ``failure`` is an error before any check; ``skipped`` is why the device cannot run the case.
    """

    folder: str = ""  # of the job, which paths in the other fields begin with
    record: Any = None
    renewals: tuple[Any, ...] = ()
    errors: dict[str, Failure] = field(default_factory=dict)
    failure: Failure | None = None
    skipped: str = ""


def main() -> int:
    """Run the case of the folder that is the first argument; the second one are the settings of the worker."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    worker = from_data(Settings, json.loads(sys.argv[2]))
    progress = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed belongs to the log

    def end_with_worker() -> None:
        """Kill this process and its children when the worker has ended."""
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=end_with_worker, daemon=True).start()
    answer = _answer(request, folder, worker, progress)
    replace_file(folder / ANSWER, json.dumps(to_data(answer)))
    return 0


def _answer(request: Mapping[str, Any], folder: Path, worker: Settings, progress: int) -> Answer:
    from qdqspec.app.report.record import record_to_json
    from qdqspec.app.session import Session

    def watch(state: object) -> None:
        os.write(progress, json.dumps(to_data(state)).encode() + b"\n")  # at once: several threads report

    try:
        case, settings = unpack(request, folder, worker)
        with closing(Session(settings, watch=watch)) as session:
            found = session.availability(case)
            if not found.usable:
                return Answer(folder=str(folder), skipped=found.why)
            errors = judge_case(session, case)
            return Answer(
                folder=str(folder),
                record=record_to_json(session.record()),
                renewals=to_data(session.renewals()),
                errors={check: Failure.of(error) for check, error in errors.items()},
            )
    except QdqspecError as error:
        return Answer(folder=str(folder), failure=Failure.of(error))


if __name__ == "__main__":
    sys.exit(main())
