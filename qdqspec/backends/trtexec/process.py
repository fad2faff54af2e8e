"""Runs trtexec as a child process and returns a report or raises an error.

Its output is passed on with passwords of remote URLs masked: the tuning of
safety engines takes one on the command line, and trtexec prints its command line twice.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from qdqspec.backends._nvidia.smi import environment
from qdqspec.backends._orphans import start_program
from qdqspec.backends.trtexec.log import Report, read_log
from qdqspec.backends.trtexec.messages import cause_of
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.units import without_passwords

NAME = "trtexec"
INSTALL = (
    "install TensorRT 10.9 or later with its command-line tools (the tar package, libnvinfer-bin, or "
    "NVIDIA's TensorRT container), and put trtexec on PATH"
)
CALL_SECONDS = 110.0  # slightly less than the caller's limit, so that the reason is reported
_HELP_SECONDS = 60.0
_USUAL_PLACES = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9]*")
_ONLY_11 = "--includeDataTransfers"
# A run without these still measures, so they are omitted if a version rejects them.
PROFILING = frozenset(
    {
        "--dumpProfile",
        "--exportLayerInfo",
        "--exportProfile",
        "--exportTimes",
        "--profilingVerbosity",
        "--separateProfileRun",
    }
)
_LOG_BYTES = 16 << 20  # bytes read from the end of a log; verbose ones have gigabytes
_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A trtexec executable: its path, the options it lists, and its version.

    ``refused`` are options that it rejected although the help gave no indication.
    """

    path: str
    options: frozenset[str]
    version: tuple[int, int, int] | None
    refused: set[str] = field(default_factory=set)

    @property
    def major(self) -> int:
        """The major version, derived from the options if the banner does not contain it."""
        return self.version[0] if self.version else 11 if _ONLY_11 in self.options else 10

    def knows(self, option: str) -> bool:
        """Whether an option may be passed: listed in the help, or the help could not be read."""
        return option not in self.refused and (not self.options or option in self.options)

    def run(
        self, arguments: Sequence[str], *, model: Path, seconds: float, wanted: Sequence[str] = ()
    ) -> Report:
        """Run it with ``arguments``, and the options of ``wanted`` that it supports; return its report.

        Raises `BackendError` if the run does not succeed.
        """
        asked = [word for word in wanted if self.knows(_option_of(word))]
        outcome = _run([self.path, *arguments, *asked], seconds, model)
        gone = PROFILING & {_option_of(word) for word in outcome.unknown} & set(map(_option_of, asked))
        if gone:
            self.refused.update(gone)
            asked = [word for word in asked if self.knows(_option_of(word))]
            outcome = _run([self.path, *arguments, *asked], seconds, model)
        return outcome.report_or_error(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of a run: exit code (negative for a signal), its log without passwords, and its messages."""

    code: int
    log: str
    report: Report

    @property
    def unknown(self) -> tuple[str, ...]:
        """Options that it reported as unknown."""
        texts = (f.text for f in self.report.findings if f.kind == "unknown_option")
        return tuple(text.removeprefix("Unknown option: ") for text in texts)

    def report_or_error(self, model: Path) -> Report:
        """The report of a successful run; otherwise the error with the most specific reason."""
        assumed = next((f for f in self.report.findings if f.kind == "shapes_assumed"), None)
        if assumed is not None:
            raise BackendError(
                f"trtexec measured another shape: {assumed.text}", where=model, cure=assumed.cure
            )
        if self.code == 0 and self.report.verdict == "PASSED":
            return self.report
        cause = cause_of(self.report.findings)
        if cause is not None:
            raise BackendError(f"trtexec {self._fate}: {cause.text}", where=model, cure=cause.cure or None)
        said = " | ".join(self.report.errors[-_LAST_LINES:]) or _last_lines(self.log) or "it printed nothing"
        raise BackendError(f"trtexec {self._fate}: {said}", where=model)

    @property
    def _fate(self) -> str:
        if self.code < 0:
            known = -self.code in set(signal.Signals)
            return f"was killed by {signal.Signals(-self.code).name if known else f'signal {-self.code}'}"
        if self.report.verdict == "FAILED" or self.code:
            return f"failed with exit code {self.code}"
        return "ended without saying whether it passed"


def find_trtexec() -> str | None:
    """The trtexec on PATH, or else in the folders where packages install it."""
    places = os.pathsep.join(_USUAL_PLACES)
    return shutil.which(NAME) or shutil.which(NAME, path=places)


def require_tool() -> Tool:
    """The trtexec of this machine; raises `BackendUnavailableError` if no working one is found."""
    path = find_trtexec()
    if path is None:
        raise BackendUnavailableError("there is no trtexec on PATH", cure=INSTALL)
    return _examined(path, Path(path).stat().st_mtime_ns)


@cache
def _examined(path: str, _changed: int) -> Tool:
    """Read the help; done once for each file."""
    try:
        done = subprocess.run(
            [path, "--help"],
            capture_output=True,
            timeout=_HELP_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"trtexec cannot be run: {error}", where=path, cure=INSTALL) from None
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    options = frozenset(_OPTION.findall(text))
    # Some versions end the help with FAILED, so neither verdict nor exit code is used here.
    if "--onnx" not in options:
        why = _last_lines(without_passwords(text)) or f"exit code {done.returncode}"
        raise BackendUnavailableError(f"trtexec --help does not work: {why}", where=path, cure=INSTALL)
    return Tool(path=path, options=options, version=read_log(text).version)


def _run(command: Sequence[str], seconds: float, model: Path) -> _Outcome:
    with tempfile.TemporaryFile() as output:
        process = start_program(command, output=output, env=environment(), install=INSTALL)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        log = without_passwords(_end_of(output))
    sys.stderr.write(f"{without_passwords(shlex.join(command))}\n{log}\n")
    if code is None:
        raise BackendError(
            f"trtexec was ended after {seconds:g} s; its last words: {_last_lines(log)}",
            where=model,
            cure="give it more time with --qdq-build-limit, or a lower --builderOptimizationLevel",
        )
    return _Outcome(code=code, log=log, report=read_log(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of the run, including helper processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _LOG_BYTES))
    return output.read().decode("utf-8", "replace")


def _last_lines(log: str) -> str:
    lines = [" ".join(line.split())[:200] for line in log.split("\n") if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])


def _option_of(word: str) -> str:
    """``--exportTimes`` of ``--exportTimes=file``, and of ``--exportTimes file`` as the log writes it."""
    return re.split(r"[= ]", word, maxsplit=1)[0]
