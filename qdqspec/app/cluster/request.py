"""A case with its settings and files as a request to a worker, the process that runs it, and its answer.

The request is JSON data. The folder of a job mirrors the client's disk below ``disk``: a file of the case, its output
folder and the cache have the same paths there, so that the results are valid paths on the client without that prefix.
A worker runs one case by ``python -m qdqspec.app.cluster.request FOLDER SETTINGS``: it reads ``request.json`` of the
folder, reports progress on standard output, one JSON line each, and writes ``answer.json``. It ends with all its
children as soon as its standard input is closed, so that nothing is left of a case whose worker was killed.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from qdqspec._core.config import Settings
from qdqspec._core.files import replace_file
from qdqspec._core.options import check_option
from qdqspec._core.records import from_data, to_data
from qdqspec._core.registry import resolve
from qdqspec.app.cases import with_paths
from qdqspec.app.evidence.baselines import baseline_folder
from qdqspec.checks import Check, requested
from qdqspec.errors import ConfigError, DataError, QdqspecError
from qdqspec.graph import load_model
from qdqspec.types import Case, CheckSpec, Data
from qdqspec.types.requests import ScoreRequest

_TO_WORKER = "to: qdqspec worker ADDRESS"
DISK = "disk"  # the folder of a job that mirrors the client's disk
REQUEST, ANSWER, LOG = "request.json", "answer.json", "log.txt"
# Settings that a client decides. The device, plugins and the worker's own options of backends are the worker's.
_SENT = (
    "backend", "mode", "retune", "no_cache", "seed", "threads", "jobs", "time_limit", "build_limit", "require",
    "scheme", "baseline", "update", "update_in_ci", "backend_option", "in_ci",
)  # fmt: skip


def in_job(path: Path) -> Path:
    """The place of a file or folder of the client in the folder of a job."""
    return Path(DISK) / path.relative_to(path.anchor)


def pack(
    case: Case, settings: Settings, output: Path, more: Iterable[Path] = ()
) -> tuple[dict[str, Any], dict[str, Path]]:
    """The request of a case that writes to ``output``, and the files that it needs, ``more`` too, by place in the job.

    Raises `QdqspecError` if it depends on something that cannot be sent.
    """
    _refuse_local(case, settings)
    files: dict[str, Path] = {}

    def send(path: Path | None) -> Path | None:
        """Add a file, the files of a folder or those of a glob; its place in the job."""
        if path is None:
            return None
        found = [path]
        if glob.has_magic(str(path)) and not path.exists():
            found = [*map(Path, glob.glob(str(path), recursive=True))]  # noqa: PTH207 - it is absolute
        for one in found:
            if not one.exists():
                raise DataError("this file does not exist", where=path)
            for file in one.rglob("*") if one.is_dir() else [one]:
                if file.is_file():
                    files[in_job(file).as_posix()] = file
        return in_job(path)

    moved = with_paths(case, send)
    for file in (*load_model(case.model).external_files(), *more):
        send(file)
    for file in baseline_folder(case.spec).glob("*.json") if case.spec is not None else ():
        send(file)
    folders = {"root": settings.root, "output": output, "cache": settings.cache_dir}
    return {
        "case": to_data(replace(moved, metrics={}, loaders={})),
        "settings": {name: to_data(getattr(settings, name)) for name in _SENT},
        "folders": {name: in_job(folder).as_posix() for name, folder in folders.items()},
    }, files


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

    case = replace(with_paths(case, lambda path: path and folder / path), checks=tuple(checks))
    given = from_data(Settings, {name: value for name, value in request["settings"].items() if name in _SENT})
    folders = {name: folder / path for name, path in request["folders"].items()}
    return case, replace(
        given,
        root=folders["root"],
        output=folders["output"],
        cache_dir=folders["cache"],
        layout="",
        device=worker.device,
        plugin=worker.plugin,
        backend_option=(*given.backend_option, *worker.backend_option),
    )


def _refuse_local(case: Case, settings: Settings) -> None:
    """Reject parts that exist only on the client: loaders and metrics in Python, plugins, settings of the device."""
    for source in (case.inputs.calibration, case.inputs.evaluation):
        if isinstance(source, Data) and (source.loader or source.path is None):
            raise ConfigError(
                f"the data loader {source.loader} is Python code of this project, which is not sent to workers",
                cure="save its feeds as .npz, or run this case without --qdq-cluster",
            )
    asked = {request.metric for request in requested(case.checks, ScoreRequest)}
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
    """A `QdqspecError` as data."""

    what: str
    where: str | None = None
    cure: str | None = None

    @classmethod
    def of(cls, error: QdqspecError) -> Failure:
        """The failure of an error."""
        return cls(what=error.what, where=error.where, cure=error.cure)

    def error(self) -> QdqspecError:
        """The error."""
        return QdqspecError(self.what, where=self.where, cure=self.cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a case: its run record and baselines as JSON data, and the errors of its checks by id.

    ``failure`` is an error before any check.
    """

    folder: str = ""  # which paths in the other fields begin with
    record: Any = None
    renewals: tuple[Any, ...] = ()
    errors: dict[str, Failure] = field(default_factory=dict)
    failure: Failure | None = None


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
    from qdqspec.app.session import Session, judge_case

    def watch(state: object) -> None:
        os.write(progress, json.dumps(to_data(state)).encode() + b"\n")  # at once: several threads report

    try:
        case, settings = unpack(request, folder, worker)
        with closing(Session(settings, watch=watch)) as session:
            found = session.availability(case)
            if not found.usable:
                raise ConfigError(f"the worker cannot run the case: {found.why}", where=case.name)
            errors = judge_case(session, case)
            return Answer(
                folder=str(folder / DISK),
                record=record_to_json(session.record()),
                renewals=to_data(session.renewals()),
                errors={check: Failure.of(error) for check, error in errors.items()},
            )
    except QdqspecError as error:
        return Answer(folder=str(folder / DISK), failure=Failure.of(error))


if __name__ == "__main__":
    sys.exit(main())
