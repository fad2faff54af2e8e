"""Measures a cluster on this machine: overhead of cases and trials, transfer rates, time to recover from a lost worker.

    python benchmarks/cluster.py [--megabytes 500] [--tls] [--trials 12] [--turns 3]

A scheduler and two workers are started on this machine, so that client, scheduler and workers share its processors and
the network is the loopback interface. The overhead of a trial is the time between two trials of a small model on the
simulated device, measured in the client, minus that of the same search without a cluster, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from qdqspec._core.config import Settings
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.case_process import Answer
from qdqspec.app.cluster.client import Cluster
from qdqspec.app.cluster.request import Package
from qdqspec.app.cluster.session import ClusterSession
from qdqspec.app.session import Session
from qdqspec.types import Case, TuneRules

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from chains import chain_model

_NOTHING: dict[str, Any] = {"checks": []}  # no valid case, so that its process ends with an error


class Listener:
    """A job without a case, which receives files and records the start of each attempt."""

    def __init__(self, files: list[Path]) -> None:
        self._package = Package(case=_NOTHING, settings={})
        for number, file in enumerate(files):
            self._package.add(f"inputs/{number}/{file.name}", file)
        self.begun: list[float] = []
        self.workers: list[str] = []
        self.running = threading.Event()
        self.done = 0.0

    def package(self) -> Package:
        return self._package

    def begin(self, worker: str, host: str) -> None:  # noqa: ARG002 - part of the interface
        self.begun.append(time.perf_counter())
        self.workers.append(worker)

    def news(self, news: Mapping[str, Any]) -> None:
        if news["phase"] == "receiving":
            self.running.set()

    def results(self, files: Mapping[str, Path], answer: Answer) -> None:
        del files, answer  # results are not stored
        self.done = time.perf_counter()


@contextmanager
def cluster(folder: Path, *, tls: bool) -> Iterator[tuple[Address, Path]]:
    """A scheduler and two workers that share one device."""
    program = "import sys\nfrom qdqspec.app.cli import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    (folder / "run.py").write_text(program)
    run, started = [sys.executable, str(folder / "run.py")], []
    certificates = folder / "tls"

    def start(*words: str) -> str:
        process = subprocess.Popen(
            [*run, *words, "--cluster-tls", str(certificates)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    try:
        if tls:
            words = ("cluster", "certificates", "--cluster-tls", str(certificates))
            subprocess.run([*run, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        host = "tls://127.0.0.1" if tls else "127.0.0.1"
        address = start("cluster", "start", "--host", host, "--port", "0")
        begin = time.perf_counter()
        for name in ("0", "1"):
            start("worker", address, "--backend", "fake", "--folder", str(folder / name))
        print(f"2 workers connected after {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        yield Address.parse(address), certificates
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        cluster(Path(place), tls=asked.tls) as (address, tls),
    ):
        small, big = Path(place) / "small.bin", Path(place) / "big.bin"
        small.write_bytes(os.urandom(1000))
        with big.open("wb") as file:
            for _ in range(asked.megabytes):
                file.write(os.urandom(1 << 20))
        notes: list[str] = []
        with closing(Cluster(address, tls, lease=10.0, note=notes.append)) as connection:
            device = connection.device("fake")

            def timed(files: list[Path]) -> tuple[float, float]:
                """Seconds until the start of the job, and until its end."""
                listener, start = Listener(files), time.perf_counter()
                connection.run(listener, device, "benchmark")
                return listener.begun[-1] - start, listener.done - start

            timed([small])
            found = [timed([small]) for _ in range(3)]
            begin, whole = (sorted(each)[1] for each in zip(*found, strict=True))
            print(f"a job without a case: begins after {begin:.2f} s, done after {whole:.2f} s (median of 3)")
            _, sent = timed([small, big])
            rate = asked.megabytes / (sent - whole)
            print(f"{asked.megabytes} MB sent, verified, stored: {sent - whole:.1f} s ({rate:.0f} MB/s)")
            _, again = timed([small, big])
            print(f"the same files again: {again - whole:+.1f} s")
            compare_trials(Path(place), address, tls, asked.trials, asked.turns)
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                print(
                    f"a worker gets {fault.name}: {recovery(connection, device, fault, place):.1f} s until elsewhere"
                )
        print("\n".join(notes))


def compare_trials(place: Path, address: Address, tls: Path, trials: int, turns: int) -> None:
    """Print the seconds between two trials and of the whole search, with and without the cluster."""
    model, found = place / "chain.onnx", []
    onnx.save(chain_model(), model)
    for turn in range(turns):
        pair = []
        for name in ("alone", "cluster"):
            settings = Settings(root=place / f"{name}{turn}", backend="fake", no_cache=True)
            if name == "cluster":
                settings = replace(settings, cluster=str(address), cluster_tls=tls)
            lines, end = searched(model, settings, trials)
            times = [seconds for line, seconds in lines if line["phase"] not in ("noise", "confirm")]
            pair.append(((times[-1] - times[0]) / (len(times) - 1), end))
        found.append(pair)
    for what, number in (("two trials", 0), ("a whole search", 1)):
        alone, there = (statistics.median(pair[n][number] for pair in found) for n in (0, 1))
        more = statistics.median(pair[1][number] - pair[0][number] for pair in found)
        print(f"{what}: {alone:.3f} s alone, {there:.3f} s on the cluster, {more:+.3f} s (median of {turns})")


def searched(
    model: Path, settings: Settings, trials: int
) -> tuple[list[tuple[dict[str, Any], float]], float]:
    """The lines of the journal with the seconds until each was written, and the seconds of the search."""
    settings.root.mkdir()
    case = Case(id="default", model=model, tune=TuneRules(trials=trials))
    begin = time.perf_counter()
    seen: list[float] = []
    with closing((Session if settings.cluster is None else ClusterSession)(settings)) as session:
        journal = session.output(case) / "trials.jsonl"
        thread = threading.Thread(target=session.search, args=(case,))
        thread.start()
        while thread.is_alive():
            count = journal.read_bytes().count(b"\n") if journal.exists() else 0
            seen += [time.perf_counter() - begin] * (count - len(seen))
            thread.join(0.05)
        end = time.perf_counter() - begin
        lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    seen += [end] * (len(lines) - len(seen))
    return list(zip(lines, seen, strict=True)), end


def recovery(connection: Cluster, device: Any, fault: signal.Signals, place: str) -> float:
    """Seconds from a fault of a worker during a transfer until the job starts on another one."""
    file = Path(place) / f"{fault.name}.bin"
    with file.open("wb") as out:
        for _ in range(400):
            out.write(os.urandom(1 << 20))
    listener = Listener([file])
    thread = threading.Thread(target=connection.run, args=(listener, device, f"benchmark {fault.name}"))
    thread.start()
    listener.running.wait()
    (worker,) = listener.workers
    pid = connection._client.run(os.getpid, workers=[worker])[worker]  # noqa: SLF001 - the fault is injected into its process
    os.kill(pid, fault)
    at = time.perf_counter()
    thread.join()
    if fault == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    return listener.begun[-1] - at


if __name__ == "__main__":
    main()
