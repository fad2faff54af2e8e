"""The process in which a worker runs one case: ``python -m qdqspec.cluster.case_process FOLDER``.

It reads ``request.json`` of the job's folder, and writes ``answer.json``. Messages are JSON lines: progress, requests
to twins and answers to another case's requests on standard output, their counterparts on standard input. The process
ends with all its children as soon as its standard input is closed or silent for the lease, so that nothing is left of a
job whose worker was killed or is frozen.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from qdqspec.cluster.request import CaseRequest, unpack
from qdqspec.codec import from_data, to_data
from qdqspec.config import Settings
from qdqspec.errors import QdqspecError
from qdqspec.files import replace_file
from qdqspec.measurement.twins import LostTwinError, Twin, Twins

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
        """The error, of its class if that takes nothing else."""
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
    request = from_data(CaseRequest, json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    worker = from_data(Settings, json.loads(sys.argv[2]))
    channel = Channel(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # whatever else is printed belongs to the log
    threading.Thread(target=_read_lines, args=(request.lease, channel.receive), daemon=True).start()
    if request.helps:
        _help(request, folder, worker, channel)
    answer = _answer(request, folder, worker, channel)
    replace_file(folder / ANSWER, json.dumps(to_data(answer)))
    return 0


class Channel:
    """The messages of this process. Those without a twin are requests of the case that it helps."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._writing = threading.Lock()
        self._twins: dict[str, _Twin] = {}
        self.requests: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message."""
        with self._writing:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()

    def receive(self, message: Mapping[str, Any]) -> None:
        """Pass a message on to its twin, or to the requests."""
        address = message.get("twin")
        if address is None:
            self.requests.put(message)
        elif message.get("state") == "joined":
            self._twins[address] = _Twin(self, address, message["name"])
        elif message.get("state") == "lost":
            if (twin := self._twins.pop(address, None)) is not None:
                twin.end()
        elif address in self._twins:
            self._twins[address].receive(message)

    def joined(self) -> list[Twin]:
        """The connected twins."""
        return list(self._twins.values())


class _Twin:
    """A connection to a twin. The answer of a request that is not awaited any more is dropped."""

    def __init__(self, channel: Channel, address: str, name: str) -> None:
        self.name = name
        self._channel, self._address = channel, address
        self._pending: dict[int, Future[Any]] = {}
        self._asked = 0
        self._is_lost = False
        self._changing = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> Future[Any]:
        found: Future[Any] = Future()
        with self._changing:
            self._asked += 1
            if self._is_lost:
                found.set_exception(LostTwinError(self.name))
                return found
            number = self._asked
            self._pending[number] = found
        self._channel.send({"twin": self._address, "message": {"id": number, "request": request}})
        return found

    def receive(self, message: Mapping[str, Any]) -> None:
        with self._changing:
            found = self._pending.pop(message["id"], None)
        if found is not None:
            found.set_result(message["answer"])

    def end(self) -> None:
        with self._changing:
            self._is_lost = True
            pending, self._pending = list(self._pending.values()), {}
        for each in pending:
            each.set_exception(LostTwinError(self.name))


def _help(request: CaseRequest, folder: Path, worker: Settings, channel: Channel) -> NoReturn:
    """Answer the requests of a case that runs on another device of the same key, until this process is ended."""
    from qdqspec.session import Session
    from qdqspec.session.tuning import TwinBench
    from qdqspec.temporary import TemporaryFolder

    case, settings = unpack(request, folder, worker)
    with closing(Session(settings)) as session, TemporaryFolder() as candidates:
        bench = TwinBench(session.work(case).setup, candidates)
        while True:
            asked = channel.requests.get()
            channel.send({"id": asked["id"], "answer": bench.answer(asked["request"])})


def _answer(request: CaseRequest, folder: Path, worker: Settings, channel: Channel) -> Answer:
    from qdqspec.report.record import record_to_json
    from qdqspec.session import Session

    def watch(state: object) -> None:
        channel.send({"progress": to_data(state)})

    try:
        case, settings = unpack(request, folder, worker)
        with closing(Session(settings, watch=watch, twins=Twins(channel.joined))) as session:
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


def _read_lines(seconds: float, receive: Callable[[Mapping[str, Any]], None]) -> None:
    """Receive the lines of standard input; an empty one only renews the lease.

    Kills this process and its children when the worker has ended, or silent for these seconds.
    """
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], seconds)
        data = os.read(0, 1 << 16) if ready else b""
        if not data:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, lines):
            receive(json.loads(line))


if __name__ == "__main__":
    sys.exit(main())
