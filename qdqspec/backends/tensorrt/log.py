"""TensorRT's log: kept for error messages, and written where the process prints.

TensorRT reports the reason of a failure in its log only: calls return nothing, or false.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.backends._engine import one_line
from qdqspec.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt

_LONGEST = 400  # characters of a message that are shown: node names of fused layers have thousands
_KEPT = 400  # lines; a builder that runs out of memory writes one for every kernel it drops
_QUOTED = 4  # lines in a message
_NOTED = 3  # warnings noted on the samples
SHORT_OF_MEMORY = (
    "short of GPU memory: the builder skipped kernels, and the latency depends on the free memory"
)
_MEMORY = re.compile(r"out ?of ?memory|OutOfMemory|cudaErrorMemoryAllocation|bad_alloc", re.IGNORECASE)
_DROPPED = re.compile(r"Skipping tactic .*(insufficient|memory)", re.IGNORECASE)
# Without a driver each error text is followed by this, whatever the error is.
_NO_DRIVER = re.compile(r"\[checkMacros\.cpp::catchCudaError::\d+\].*?\(cudaError \d+: [^)]*\)+\.?")
KERNELS = "Layers:"  # the beginning of the message with all compiled kernels
_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}


def shortened(text: str) -> str:
    """One line of limited length, with its middle removed."""
    line, half = " ".join(text.split()), _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


def plainly(text: str) -> str:
    """A text of TensorRT on one line, without the unrelated error of a missing driver that may follow it."""
    return " ".join(_NO_DRIVER.sub("", text).split())


class Log:
    """The lines of one process, as pairs of TensorRT's severity letter (F, E, W, I, V) and the text."""

    def __init__(self) -> None:
        self.logger: Any = None  # TensorRT's, which adds lines here
        self.verbose = False
        self.kernels = ""  # the last list of compiled kernels
        self._lines: deque[tuple[str, str]] = deque(maxlen=_KEPT)

    def add(self, severity: str, text: str) -> None:
        """Add one line. All but verbose lines are printed, so that the last ones are available after a crash."""
        letter = _LETTERS.get(severity, "V")
        if letter != "V" or self.verbose:
            sys.stderr.write(f"[TRT] [{letter}] {text}\n")
            sys.stderr.flush()
        if letter in "FEW":
            if plain := plainly(text):
                self._lines.append((letter, plain))
        elif text.startswith(KERNELS):
            self.kernels = text

    def clear(self) -> None:
        """Remove the lines of earlier steps."""
        self._lines.clear()
        self.kernels = ""

    @property
    def errors(self) -> tuple[str, ...]:
        """Distinct error lines, oldest first."""
        return tuple(dict.fromkeys(text for letter, text in self._lines if letter in "FE"))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Distinct warnings, oldest first."""
        return tuple(dict.fromkeys(text for letter, text in self._lines if letter == "W"))

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out: kernels that are skipped for lack of memory are not a failure."""
        return any(_MEMORY.search(line) and not _DROPPED.search(line) for line in self.errors)

    @property
    def dropped_kernels(self) -> bool:
        """Whether the builder skipped kernels for lack of memory, so that the engine may be slow."""
        return any(_DROPPED.search(line) for line in (*self.errors, *self.warnings))

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for reports: kernels skipped for lack of memory as one, the first few others unchanged."""
        others = [shortened(text) for text in self.warnings if not _DROPPED.search(text)]
        found = [f"TensorRT warns: {text}" for text in others[:_NOTED]]
        if len(others) > _NOTED:
            found.append(f"TensorRT warns of {len(others) - _NOTED} more things: see builds.jsonl")
        if self.dropped_kernels:
            found.insert(0, SHORT_OF_MEMORY)
        return tuple(found)

    def failure(self, what: str, model: Path, cure: str | None = None) -> BackendError:
        """The error that states ``what`` happened, with the last lines of the log as the reason."""
        reasons = " | ".join(self.errors[-_QUOTED:]) or "TensorRT gave no reason"
        if self.out_of_memory:
            what = f"{what}: out of memory"
            cure = "free memory on the GPU, take a smaller batch, or set tensorrt.workspace"
        return BackendError(f"{what}: {reasons}", where=model, cure=cure)


@contextmanager
def refusals(log: Log, what: str, model: Path) -> Iterator[None]:
    """Convert exceptions of TensorRT's bindings to a `BackendError` with the lines of the log."""
    try:
        yield
    except (BackendError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - the bindings raise whatever C++ did
        if log.errors:
            raise log.failure(what, model) from None
        raise BackendError(f"{what}: {one_line(error)}", where=model) from None


@cache
def open_log() -> Log:
    """The log of this process with its TensorRT logger: TensorRT keeps the first logger that it was given."""
    import tensorrt as trt

    log = Log()

    class Logger(trt.ILogger):  # type: ignore[misc]  # TensorRT ships no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            log.add(severity.name, msg)

    log.logger = Logger()
    return log
