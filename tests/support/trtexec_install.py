"""Installs stand-ins for trtexec and nvidia-smi into a folder on PATH, or runs them in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import IO

import pytest

DATA = Path(__file__).parents[1] / "data" / "tensorrt"
OPTIONS: Mapping[str, list[str]] = json.loads((DATA / "api" / "trtexec-options.json").read_text())
GPU = "NVIDIA A100 80GB PCIe, 8.0, 550.54.15"
OTHER_GPU = "NVIDIA L4, 8.9, 550.54.15"  # the GPU of all indices except 0


@dataclass(frozen=True)
class Trtexec:
    """An installed stand-in."""

    folder: Path

    def calls(self) -> list[list[str]]:
        """The command lines of its runs, except those for help."""
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words != ["--help"]]


def put_trtexec(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str = "10.16",
    *,
    fault: Mapping[str, str] | None = None,
) -> Trtexec:
    """Install a stand-in of a version."""
    from qdqspec.backends.tensorrt import device as nvidia_smi

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "version": version,
        "samples": str(DATA / "samples"),
        "options": OPTIONS.get(version, OPTIONS["10.9"]),
        "fault": dict(fault or {}),
        "calls": str(folder / "calls.jsonl"),
    }
    (folder / "standin.json").write_text(json.dumps(config))
    source = (Path(__file__).parent / "trtexec_standin.py").read_text()
    _executable(folder / "trtexec", f"#!{sys.executable}\n{source}")
    _executable(folder / "nvidia-smi", answering_for(GPU, OTHER_GPU))
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    # a separate cache, so that other tests do not use this GPU
    monkeypatch.setattr(nvidia_smi, "_queried", functools.cache(nvidia_smi._queried.__wrapped__))
    return Trtexec(folder)


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


# ---- scripts that imitate nvidia-smi -------------------------------------------------------------


def answering(fields: Mapping[str, str]) -> str:
    """A script that returns these fields in the order of the query; an unknown field is an error with code 2."""
    cases = "".join(f'    {name}) row="$row, {text}" ;;\n' for name, text in fields.items())
    return (
        '#!/bin/sh\nfor word in "$@"; do case "$word" in --query-gpu=*) asked=${word#*=} ;; esac; done\n'
        'row=\nfor name in $(echo "$asked" | tr , " "); do case "$name" in\n'
        f'{cases}    *) echo "Field \\"$name\\" is not a valid field to query."; exit 2 ;;\nesac; done\n'
        'echo "${row#, }"\n'
    )


def answering_for(first: str, others: str) -> str:
    """A script that returns one row for GPU 0 and another for other indices, and fails for ``none``."""
    return f"#!/bin/sh\ncase $2 in 0) echo {shlex.quote(first)};; none) exit 6;; *) echo {shlex.quote(others)};; esac\n"


# ---- without processes ---------------------------------------------------------------------------

_ONE_AT_A_TIME = threading.Lock()  # standard output and the command line belong to the process


@dataclass(frozen=True)
class Over:
    """A finished run of the stand-in, with the interface of a process."""

    code: int

    @property
    def pid(self) -> int:
        raise ProcessLookupError  # the run has ended

    def wait(self, _seconds: float | None = None) -> int:
        return self.code


def run_here(command: Sequence[str], *, output: IO[bytes], **_: object) -> Over:
    """Like `start_program`, but runs the installed stand-in in this process."""
    script, code = Path(command[0]), 0
    with (
        _ONE_AT_A_TIME,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", list(command))
        try:
            exec(_compiled(script.read_text()), {"__name__": "__main__", "__file__": str(script)})
        except SystemExit as end:
            code = int(end.code or 0)
    output.write(printed.getvalue().encode())
    return Over(code)


@functools.cache
def _compiled(source: str) -> CodeType:
    return compile(source, "trtexec", "exec")
