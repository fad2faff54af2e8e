"""Runs trtexec as a child process and turns whatever becomes of it into a report or an error.

May import floor 0. What it prints is passed on with passwords of remote URLs blotted out: the tuning of
safety engines takes one on the command line, and trtexec prints its command line twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from qdqspec.backends._nvidia_smi import environment
from qdqspec.backends._trtexec_log import Report, read_log
from qdqspec.backends._trtexec_messages import cause_of
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.units import without_passwords

NAME = "trtexec"
INSTALL = (
    "install TensorRT 10.9 or later with its command-line tools (the tar package, libnvinfer-bin, or "
    "NVIDIA's TensorRT container), and put trtexec on PATH"
)
CALL_SECONDS = 110.0  # a little less than our caller waits, so that the reason is told
_HELP_SECONDS = 60.0
_USUAL_PLACES = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9]*")
_ONLY_11 = "--includeDataTransfers"
# A run without these still measures, so they are left out where a version turns out not to know them.
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
_LOG_BYTES = 16 << 20  # read of a log from its end; verbose ones grow to gigabytes
_LAST_LINES = 6
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A trtexec: what it is called, which options it lists, which version it says it is.

    ``refused`` are options that it turned out not to know although nothing had told so.
    """

    path: str
    options: frozenset[str]
    version: tuple[int, int, int] | None
    refused: set[str] = field(default_factory=set)

    @property
    def major(self) -> int:
        """The major version, told by the options where the banner does not."""
        return self.version[0] if self.version else 11 if _ONLY_11 in self.options else 10

    def knows(self, option: str) -> bool:
        """Whether an option may be passed: listed in the help, or no help could be read."""
        return option not in self.refused and (not self.options or option in self.options)

    def run(
        self, arguments: Sequence[str], *, model: Path, seconds: float, wanted: Sequence[str] = ()
    ) -> Report:
        """Run it with ``arguments``, and those of ``wanted`` that it knows; return what it reported.

        Raises `BackendError` where it ends in anything but success.
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
    """How a run ended: exit code (negative for a signal), its log without passwords, what that says."""

    code: int
    log: str
    report: Report

    @property
    def unknown(self) -> tuple[str, ...]:
        """Options that it said not to know."""
        texts = (f.text for f in self.report.findings if f.kind == "unknown_option")
        return tuple(text.removeprefix("Unknown option: ") for text in texts)

    def report_or_error(self, model: Path) -> Report:
        """The report of a run that passed; the error that says best why it did not."""
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
    """The trtexec on PATH, else where packages put it."""
    places = os.pathsep.join(_USUAL_PLACES)
    return shutil.which(NAME) or shutil.which(NAME, path=places)


def require_tool() -> Tool:
    """The trtexec of this machine; raises `BackendUnavailableError` where there is none that works."""
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
    # Some versions end the help with FAILED, so neither verdict nor exit code say anything here.
    if "--onnx" not in options:
        why = _last_lines(without_passwords(text)) or f"exit code {done.returncode}"
        raise BackendUnavailableError(f"trtexec --help does not work: {why}", where=path, cure=INSTALL)
    return Tool(path=path, options=options, version=read_log(text).version)


def _run(command: Sequence[str], seconds: float, model: Path) -> _Outcome:
    with tempfile.TemporaryFile() as output:
        process = _start(command, output)
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


def _start(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # From 3.12 on Python warns of code between fork and exec where there are threads; ours is one system call.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_dying_with_us(),
                env=environment(),
            )
        except OSError as error:
            raise BackendUnavailableError(
                f"trtexec cannot be run: {error}", where=command[0], cure=INSTALL
            ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, helpers that it started included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dying_with_us() -> Callable[[], None] | None:
    """On Linux, a request to be killed when this process is: a candidate that was given up must not go on."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


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
