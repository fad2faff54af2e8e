"""Passes any bytes to all readers of files: ``python benchmarks/fuzz.py [SECONDS] [--reader NAME] [--seed 0]``.

Valid files are mutated at random and read in child processes with limits on memory and on the time for one input. A
reader must return or raise a `QdqspecError`; anything else (another exception, a hang, a crash, exhausted memory) is a
fault, which is printed with the input. With ``--atheris`` (if this package is installed) inputs are selected by
coverage instead.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

MEMORY = 3 << 30  # bytes of address space for a child process, including libraries
LONGEST = 10  # seconds for one input


class HangError(BaseException):
    """The time limit of an input. Not an ``Exception``, so that no reader catches it."""


def attempt(read: object, data: bytes, folder: Path) -> str | None:
    """The fault as a line with its location, or an empty text."""
    from qdqspec.errors import QdqspecError

    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        read(data, folder)  # type: ignore[operator]  # a Reader's own function
    except QdqspecError:
        return None
    except (Exception, HangError) as error:  # noqa: BLE001 - other exceptions are the faults
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/qdqspec/" in f.filename][-1:]
        places = " in ".join(f"{Path(f.filename).name}:{f.lineno}" for f in (frame, *ours))
        return f"{type(error).__name__}: {str(error)[:100]!r} at {places}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def child(name: str, seconds: float, seed: int, folder: Path) -> None:
    """Read mutated files until the time limit; the current input and faults are written to ``folder``."""
    from readers import READERS, mutated

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _hang)
    reader, until, count = READERS[name], time.monotonic() + seconds, 0
    seeds, chance = reader.seeds(), random.Random(seed)
    found: dict[str, str] = {}
    while True:
        data = mutated(chance.choice(seeds), chance)
        (folder / "input").write_bytes(data)
        if (fault := attempt(reader.read, data, folder)) is not None and fault not in found:
            kept = folder.parent / f"{name.replace(' ', '-')}-{len(found)}-{seed}"
            kept.write_bytes(data)
            found[fault] = str(kept)
        count += 1
        if time.monotonic() > until:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    (folder / "found.json").write_text(json.dumps({"count": count, "found": found, "peak_mib": peak}))


def _hang(*_: object) -> None:
    raise HangError(f"more than {LONGEST} s")


def fuzz(name: str, seconds: float, seed: int, home: Path) -> tuple[int, dict[str, str], int]:
    """The number of inputs of a reader, faults by input, and the peak memory in MiB."""
    folder = home / f"work-{name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, str(seconds), "--reader", name, "--seed", str(seed)]
    run = subprocess.run(
        [*command, "--child", str(folder)],
        capture_output=True,
        text=True,
        timeout=None,
        check=False,
    )
    if run.returncode:
        kept = home / f"{name.replace(' ', '-')}-crash-{seed}"
        kept.write_bytes((folder / "input").read_bytes() if (folder / "input").exists() else b"")
        return 0, {f"exit code {run.returncode}: {run.stderr[-300:]}": str(kept)}, 0
    results = json.loads((folder / "found.json").read_text())
    return results["count"], results["found"], results["peak_mib"]


def guided(name: str, seconds: float, home: Path) -> None:
    """Fuzz with atheris in this process, which ends at the first fault and writes the input to ``home``."""
    import atheris  # type: ignore[import-not-found]  # optional

    with atheris.instrument_imports(include=["qdqspec"]):
        from readers import READERS
    reader = READERS[name]
    signal.signal(signal.SIGALRM, _hang)
    with tempfile.TemporaryDirectory() as work:
        corpus = Path(work) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(reader.seeds()):
            (corpus / str(number)).write_bytes(seed)

        def one(data: bytes) -> None:
            if (fault := attempt(reader.read, data, Path(work))) is not None:
                raise RuntimeError(fault)

        limits = [
            f"-max_total_time={int(seconds)}",
            f"-rss_limit_mb={MEMORY >> 20}",
            f"-timeout={2 * LONGEST}",
            f"-artifact_prefix={home}/",
        ]
        atheris.Setup([sys.argv[0], str(corpus), *limits], one)
        atheris.Fuzz()


def main() -> None:
    """Fuzz one reader or all and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="?", default=600, help="for all readers together")
    parser.add_argument("--reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "qdqspec-fuzz")
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.reader, given.seconds, given.seed, given.child)
        return
    given.keep.mkdir(parents=True, exist_ok=True)
    if given.atheris:
        guided(given.reader or "spec", given.seconds, given.keep)
        return
    from readers import READERS

    chosen = [given.reader] if given.reader else list(READERS)
    faults = 0
    print("| reader | inputs | peak MiB | faults |\n|---|---|---|---|")
    for name in chosen:
        count, found, peak = fuzz(name, given.seconds / len(chosen), given.seed, given.keep)
        print(f"| {name} | {count:,} | {peak} | {len(found)} |", flush=True)
        for fault, path in found.items():
            print(f"    {fault}\n    {path}", flush=True)
        faults += len(found)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
