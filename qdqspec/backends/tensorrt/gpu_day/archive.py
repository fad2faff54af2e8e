"""Runs the parts one after the other, each in a process of its own, and writes all of their files as one archive.

The process of one part is ``python -m qdqspec.backends.tensorrt.gpu_day.archive PART DAY``, a `Day` as JSON.

Names, folders and serial numbers, which identify a person or a machine, are removed from texts of the archive.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from qdqspec import __version__
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.gpu_day.parts import BY_NAME, LARGE_MIB, PARTS, SCRATCH, Day, DayPart, Facts
from qdqspec.backends.tensorrt.options import options_from
from qdqspec.codec import from_data, to_data
from qdqspec.errors import BackendUnavailableError, QdqspecError
from qdqspec.files import write_whole
from qdqspec.programs import end_of_log, end_program, python_command, start_program
from qdqspec.temporary import TemporaryFolder
from qdqspec.units import signal_text, without_passwords

SCHEMA_VERSION = 1
_ROOT = "gpu-day"
_RESULT = "result.json"
_MOST_LOG = 32 << 20  # bytes kept of a log, its last ones
_BINARY = (".onnx",)  # files that contain no text of this machine
# Medians in ms that NVIDIA recorded on an A100 with TensorRT 8, batch 32 (tests/data/tensorrt).
RECORDED = {"fp16": 0.862, "qat": 0.883, "residual": 0.546, "residual-qgap": 0.500}

Launch: TypeAlias = Callable[[DayPart, Day, Path], str]


def write_bundle(
    path: Path,
    options: BuildOptions,
    *,
    say: Callable[[str], None] = lambda _: None,
    parts: Sequence[DayPart] = PARTS,
    large_mib: int = LARGE_MIB,
    launch: Launch | None = None,
) -> Facts:
    """Run ``parts`` and write the archive; return its ``summary.json``. A part that fails does not stop the others.

    ``launch`` runs one part and returns why its process did not end by itself, or nothing. Raises `OutputError` if the
    archive cannot be written.
    """
    run = launch or start
    write_whole(path, b"", what="the archive")  # before the work, not after it
    results: list[Facts] = []
    with TemporaryFolder() as folder:
        try:
            for number, part in enumerate(parts, start=1):
                day = Day(
                    folder=folder / part.name,
                    device=options.device,
                    extra=dict(options.extra),
                    large_mib=large_mib,
                )
                day.folder.mkdir()
                result = _result(part, day, run)
                results.append(result)
                why = f" ({result['why']})" if result["why"] else ""
                say(
                    f"{number}/{len(parts)} {part.name}: {result['status']} in {result['seconds']:.1f} s{why}"
                )
        finally:  # also after Ctrl-C: the recordings so far are useful
            summary = _summary(results, len(parts))
            given = [file.parent for file in options_from(options.extra).plugins]
            write_whole(path, _packed(folder, summary, hidden_words(given)), what="the archive")
    return summary


def start(part: DayPart, day: Day, log: Path) -> str:
    """Run a part in a fresh interpreter, which is ended with all of its children after the part's time."""
    module = "qdqspec.backends.tensorrt.gpu_day.archive"
    command, env = python_command(module, part.name, json.dumps(to_data(day)))
    with log.open("wb") as output:
        process = start_program(command, output=output, env=env, install="see: qdqspec doctor")
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {part.seconds:g} s and was ended"
        finally:
            end_program(process)
    if code < 0:
        return f"its process was killed by {signal_text(-code)}"
    return f"its process ended with exit code {code}" if code else ""


def run_part(name: str, day: Day) -> None:
    """Run a part in this process and write its result; called in the process of the part."""
    status, why, facts = "done", "", {}
    try:
        facts = BY_NAME[name].run(day)
    except BackendUnavailableError as error:
        status, why = "unavailable", error.what
    except QdqspecError as error:
        status, why = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - a fault that was not foreseen must not cost the other parts
        traceback.print_exc()
        status, why = "failed", f"{type(error).__name__}: {error}"
    result = {"status": status, "why": why, "facts": facts}
    (day.folder / _RESULT).write_text(json.dumps(result), encoding="utf-8")


def _result(part: DayPart, day: Day, run: Launch) -> Facts:
    began = time.perf_counter()
    log, file = day.folder / f"{part.name}.log", day.folder / _RESULT
    why = run(part, day, log)
    found: Facts = {"status": "ended", "why": why, "facts": {}}
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    file.unlink(missing_ok=True)
    seconds = round(time.perf_counter() - began, 3)
    return {"name": part.name, "asks": part.asks, "seconds": seconds, **found}


def _summary(results: Sequence[Facts], asked: int) -> Facts:
    return {
        "schema_version": SCHEMA_VERSION,
        "qdqspec": __version__,
        "whole": len(results) == asked,
        "answers": answers_from(
            {result["name"]: result["facts"] for result in results if result["status"] == "done"}
        ),
        "parts": list(results),
    }


def answers_from(facts: Mapping[str, Facts]) -> Facts:
    """The answers that need several parts; ``None`` if a part is missing."""
    medians = {name: facts.get(f"resnet18-{name}", {}).get("median_ms") for name in RECORDED}
    known = {name: value for name, value in medians.items() if value is not None}
    whole = len(known) == len(RECORDED)
    order = sorted(known, key=known.__getitem__)
    rejected = {
        name.removeprefix("refused-"): fact for name, fact in facts.items() if name.startswith("refused-")
    }
    return {
        "runs": "three-layers" in facts,
        "trtexec_agrees": facts.get("cross-check", {}).get("agrees"),
        "resnet18_ms": medians,
        "resnet18_order_as_recorded": order == sorted(RECORDED, key=RECORDED.__getitem__) if whole else None,
        "lint_disagrees": sorted(rule for rule, fact in rejected.items() if fact.get("agrees") is False),
    }


def _packed(folder: Path, summary: Facts, hidden: Mapping[str, str]) -> bytes:
    """The archive: all files of the parts and the summary, without the ``hidden`` words of this machine."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        _add(archive, "summary.json", cleaned(json.dumps(summary, indent=2), hidden).encode())
        for file in sorted(folder.rglob("*")):
            if not file.is_file() or file.is_symlink() or SCRATCH in file.relative_to(folder).parts:
                continue
            name = file.relative_to(folder).as_posix()
            if file.suffix in _BINARY:
                _add(archive, name, file.read_bytes())
                continue
            with file.open("rb") as opened:
                text = cleaned(end_of_log(opened, _MOST_LOG), hidden)
            _add(archive, name, text.encode())
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(f"{_ROOT}/{name}")
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


_SHORTEST = 3  # letters of a name that is replaced: a shorter one is part of too many words
# of no person, and words in logs
_NAMES = frozenset({"root", "user", "localhost", "nobody", "runner", "docker"})
_HOMES = re.compile(r"(/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s\"':,;]+")
_UUID = re.compile(r"\b((?:GPU|MIG)-)[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_IDENTIFIED = re.compile(
    r"^(\s*(?:Serial Number|Board ID|Chassis Serial Number|Module ID|GPU GUID)\s*:).*$", re.MULTILINE
)
# of nvidia-smi -q, with their paths
_PROCESSES = re.compile(r"^(\s*)Processes\b.*(?:\n(?:\1\s+.*)?$)*", re.MULTILINE)


def hidden_words(given: Iterable[Path] = ()) -> dict[str, str]:
    """Folders and names of this machine, with their replacements; longer ones first. ``given`` are further folders."""
    found: dict[str, str] = {}

    def hide(path: str | Path, name: str) -> None:
        for text in {str(path), str(Path(path).resolve())}:
            if len(Path(text).parts) > 1:  # not the root
                found.setdefault(text, name)

    for parent in given:
        hide(parent, "<given>")
    hide(tempfile.gettempdir(), "<tmp>")
    for folder in (*sys.path, sys.prefix, sys.base_prefix):
        if folder:
            hide(folder, "<python>")
    hide(Path.cwd(), "<here>")
    with suppress(RuntimeError):  # there is none
        hide(Path.home(), "<home>")
    names = {platform.node(): "<host>", platform.node().partition(".")[0]: "<host>"}
    with suppress(OSError, KeyError, ImportError):
        names[getpass.getuser()] = "<user>"
    names |= {os.environ[key]: "<user>" for key in ("USER", "LOGNAME", "SUDO_USER") if os.environ.get(key)}
    found |= {
        name: text for name, text in names.items() if len(name) >= _SHORTEST and name.lower() not in _NAMES
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def cleaned(text: str, hidden: Mapping[str, str]) -> str:
    """The text without ``hidden`` words, home folders, identifiers of GPUs, processes and passwords."""
    for word, replacement in hidden.items():
        if "/" in word or "\\" in word:
            text = text.replace(word, replacement)
        else:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", replacement, text)
    text = _HOMES.sub(r"\1/<user>", text)
    text = _UUID.sub(r"\g<1>00000000-0000-0000-0000-000000000000", text)
    text = _IDENTIFIED.sub(r"\1 <removed>", _PROCESSES.sub(r"\1Processes: <removed>", text))
    return "\n".join(without_passwords(line) if "://" in line else line for line in text.split("\n"))


if __name__ == "__main__":
    run_part(sys.argv[1], from_data(Day, json.loads(sys.argv[2])))
