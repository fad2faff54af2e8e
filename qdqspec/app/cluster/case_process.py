"""The process in which a worker runs one case: ``python -m qdqspec.app.cluster.case_process FOLDER``.

It reads ``request.json`` of the job's folder, reports progress on standard output, one JSON line each, and writes
``answer.json``. It ends with all its children as soon as its standard input is closed, so that nothing is left of a
case whose worker was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdqspec._core.config import Settings
from qdqspec._core.files import replace_file
from qdqspec._core.records import from_data, to_data
from qdqspec.app.cluster.request import unpack
from qdqspec.errors import QdqspecError

REQUEST, ANSWER, LOG = "request.json", "answer.json", "log.txt"


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
    threading.Thread(target=_end_with_worker, daemon=True).start()
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
            errors: dict[str, Failure] = {}
            for check in case.checks:
                try:
                    session.judge(case, check)
                except QdqspecError as error:
                    errors[check.id] = Failure.of(error)
            if not case.checks:
                session.evidence(case, frozenset({"latency", "parity"}))
            return Answer(
                folder=str(folder),
                record=record_to_json(session.record()),
                renewals=to_data(session.renewals()),
                errors=errors,
            )
    except QdqspecError as error:
        return Answer(folder=str(folder), failure=Failure.of(error))


def _end_with_worker() -> None:
    """Kill this process and its children when the worker has ended."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
