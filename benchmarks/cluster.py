"""Measures a cluster on this machine: what a case costs more than without a cluster, and how fast files are sent.

    python benchmarks/cluster.py [--megabytes 200] [--tls] [--turns 3]

A scheduler and two workers are started on this machine, so that client, scheduler and workers share its processors and
the network is the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import onnx

from qdqspec._core.config import Settings
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.client import Cluster, ClusterSession
from qdqspec.app.session import Session
from qdqspec.types import Case, TuneRules

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from chains import chain_model


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
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        cluster(Path(place), tls=asked.tls) as (address, tls),
    ):
        with closing(Cluster(address, tls)) as connection:
            device = connection.device("fake")

            def seconds(content: bytes) -> float:
                """The time of a task whose case is invalid, so that its process ends at once."""
                start = time.perf_counter()
                request = {"case": {"checks": []}, "settings": {}}
                connection.run(request, {"inputs/file": content}, device, "benchmark", lambda _: None)
                return time.perf_counter() - start

            seconds(b"")
            empty = statistics.median(seconds(b"") for _ in range(3))
            print(f"a task without a case: {empty:.2f} s (median of 3)")
            sent = seconds(os.urandom(asked.megabytes << 20)) - empty
            print(f"{asked.megabytes} MB sent and written: {sent:.1f} s ({asked.megabytes / sent:.0f} MB/s)")
        model, differences = Path(place) / "chain.onnx", []
        onnx.save(chain_model(), model)
        for turn in range(asked.turns):
            settings = Settings(root=Path(place) / f"alone{turn}", backend="fake", no_cache=True)
            alone = search_seconds(model, settings)
            there = replace(
                settings, root=Path(place) / f"there{turn}", cluster=str(address), cluster_tls=tls
            )
            differences.append(search_seconds(model, there) - alone)
        print(f"a search of 12 trials: {statistics.median(differences):+.1f} s (median of {asked.turns})")


def search_seconds(model: Path, settings: Settings) -> float:
    """The time of a search, with the start of its session."""
    settings.root.mkdir()
    start = time.perf_counter()
    with closing((Session if settings.cluster is None else ClusterSession)(settings)) as session:
        session.search(Case(id="default", model=model, tune=TuneRules(trials=12)))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
