"""Measures a cluster on this machine: overhead of a case, transfer rates, time to recover from a lost worker.

    python benchmarks/cluster.py [--megabytes 500] [--tls]

A scheduler and two workers are started here, so that client, scheduler and workers share its processors and the network
is the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from qdqspec.cluster.address import Address
from qdqspec.cluster.case_process import Answer
from qdqspec.cluster.client import Cluster
from qdqspec.cluster.request import Package

_NOTHING: dict[str, Any] = {"checks": []}  # no case: its process ends with an error at once


class Listener:
    """A job without a case, which receives files; notes when each of its attempts began."""

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

    def begin(self, worker: str, host: str) -> None:  # noqa: ARG002 - the listener of a case has it
        self.begun.append(time.perf_counter())
        self.workers.append(worker)

    def news(self, news: Mapping[str, Any]) -> None:
        if news["phase"] == "receiving":
            self.running.set()

    def results(self, files: Mapping[str, Path], answer: Answer) -> None:
        del files, answer  # nothing is kept
        self.done = time.perf_counter()


@contextmanager
def cluster(folder: Path, *, tls: bool) -> Iterator[tuple[Address, Path]]:
    """A scheduler and two workers with the simulated device."""
    program = (
        "import sys\nfrom qdqspec.cli import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    )
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
        for name in ("one", "two"):
            start("worker", address, "--backend", "fake", "--folder", str(folder / name))
        print(f"two workers connected after {time.perf_counter() - begin:.1f} s")
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, cluster(Path(place), tls=asked.tls) as (address, tls):
        small, big = Path(place) / "small.bin", Path(place) / "big.bin"
        small.write_bytes(os.urandom(1000))
        with big.open("wb") as file:
            for _ in range(asked.megabytes):
                file.write(os.urandom(1 << 20))
        notes: list[str] = []
        with closing(Cluster(address, tls, lease=10.0, note=notes.append)) as connection:
            device = connection.device("fake")

            def timed(files: list[Path]) -> tuple[float, float]:
                """Seconds until the job began, and until it was done."""
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
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                print(
                    f"a worker gets {fault.name}: {recovery(connection, device, fault, place):.1f} s until elsewhere"
                )
        print("\n".join(notes))


def recovery(connection: Cluster, device: Any, fault: signal.Signals, place: str) -> float:
    """Seconds from a worker's fault, while it receives, until the job begins on another one."""
    file = Path(place) / f"{fault.name}.bin"
    with file.open("wb") as out:
        for _ in range(400):
            out.write(os.urandom(1 << 20))
    listener = Listener([file])
    thread = threading.Thread(target=connection.run, args=(listener, device, f"benchmark {fault.name}"))
    thread.start()
    listener.running.wait()
    (worker,) = listener.workers
    pid = connection._client.run(os.getpid, workers=[worker])[worker]  # noqa: SLF001 - its process gets the fault
    os.kill(pid, fault)
    at = time.perf_counter()
    thread.join()
    if fault == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    return listener.begun[-1] - at


if __name__ == "__main__":
    main()
