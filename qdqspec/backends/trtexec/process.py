"""Runs trtexec 10 and 11 as a child process with files of inputs and outputs, and reads and explains its log.

Messages, recorded or from trtexec's source, either end a run or only make a measurement unreliable. An ``[E]`` line
alone does not mean failure: a tactic skipped for lack of memory writes one, and the build passes.

The output is passed on with passwords of remote URLs masked: the tuning of safety engines takes one on the command
line, and trtexec prints its command line twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import onnx

from qdqspec._core.arrays import Array
from qdqspec._core.programs import end_of_log, end_program, start_program
from qdqspec._core.units import signal_text, without_passwords
from qdqspec.backends._engine import ask_program, check_names
from qdqspec.backends.tensorrt.device import environment
from qdqspec.backends.tensorrt.log import shortened
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph import Model
from qdqspec.types import NOT_CAPTURED, ShapeProfile

RunOutcome: TypeAlias = Literal["PASSED", "FAILED", ""]

# The messages that make a measurement unreliable, by kind: a text found in the line.
NOTES: Mapping[str, str] = {
    "no_implementation_retry": r"^Engine generation failed with backend strategy",
    "out_of_memory_tactic": r"Skipping tactic .*insufficient memory|insufficient to use tactic"
    r"|[Vv]irtualMemoryBuffer.*OutOfMemory",
    "weakly_typed": r"^Weakly-typed networks have been deprecated",
    "hardware_hint": r"hardware does not accelerate",
    "unstable_timing": r"^\* GPU compute time is unstable",
    "enqueue_bound": r"^\* Throughput may be bound by Enqueue Time",
    "transfer_bound": r"^\* Throughput may be bound by (?:host-to-device|device-to-host) transfers",
    "aux_streams": r"auxiliary streams, so the .*latency may not be accurate",
    "no_cuda_graph": r"not permitted under CUDA graph|useCudaGraph flag has been ignored",
}
# The messages that end a run, the most specific first: a text found in the line, and the cure.
FATAL: Mapping[str, tuple[str, str]] = {
    "unknown_option": (
        r"^Unknown option: ",
        "leave the option out of trtexec.args, or use a trtexec that has it",
    ),
    "no_model": (r"^Model missing or format not recognized", "name an ONNX file"),
    "shapes_assumed": (
        r"^(?:Dynamic dimensions required for input: |Shape missing for input with dynamic shape: )",
        "give the input a shape in inputs.shapes of the spec: TensorRT used 1 for missing dimensions",
    ),
    "parse_zero_point": (
        r"symmetric quantization.*zero ?(?:point|pt)|shiftIsAllZeros",
        "quantize symmetrically: every zero point must be 0",
    ),
    "parse_scale": (
        r"scale coefficients must all be positive|scaleAllPositive",
        "raise scales of zero: a channel of zeros has one",
    ),
    "parse_quant_type": (
        r"TensorRT only allows .*quantization",
        "use a number format that this version knows; leave biases in float",
    ),
    "out_of_memory_fatal": (
        r"(?:Error Code 1: )?Cuda Runtime \(out of memory\)|User allocator error",
        "free memory on the GPU, or take a smaller batch",
    ),
    "no_implementation": (
        r"Could not find any implementation for node",
        "leave the Q/DQ of that node out, or update TensorRT: 8.6 lacks kernels that 10 has",
    ),
    "internal_assert": (r"Assertion .*failed", "leave the Q/DQ around that place out"),
    "api_misuse": (r"API Usage Error", ""),
    "engine_mismatch": (
        r"^Engine deserialization failed|^Got invalid engine",
        "build the engine with the TensorRT that runs it",
    ),
    "parse_failure": (r"^Parsing model failed|^Failed to parse onnx", ""),
}
_PATTERNS = {
    kind: re.compile(text) for kind, text in {**NOTES, **{k: v[0] for k, v in FATAL.items()}}.items()
}
_BANNER = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d{4,9})\])?")
_LINE = re.compile(
    r"(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?(?:\[TRT\] )?(?:\[(?P<level>[A-Z])\] ?)?(?:\[TRT\] )?(?P<text>.*)"
)
_RETRIED = "Error message: "  # after "Engine generation failed with backend strategy": another follows
_READ = 4000  # characters of a line that are searched


class Message(NamedTuple):
    """A line of a known kind, without time and severity."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The parsed output of one run of trtexec. ``verdict`` is empty after a crash."""

    verdict: RunOutcome = ""
    version: tuple[int, int, int] | None = None
    messages: tuple[Message, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of trtexec about its own measurement."""
        return tuple(
            f"{NOT_CAPTURED}: {text}" if kind == "no_cuda_graph" else text.removeprefix("* ")
            for kind, text in self.messages
            if kind in NOTES
        )

    @property
    def cause(self) -> Message | None:
        """The most specific of the messages that end a run."""
        found = [message for message in self.messages if message.kind in FATAL]
        return min(found, key=lambda message: [*FATAL].index(message.kind), default=None)


def read_log(log: str) -> Report:
    """Parse a log; unknown lines are skipped, and each message is kept once."""
    verdict: RunOutcome = ""
    version: tuple[int, int, int] | None = None
    messages, errors = dict[Message, None](), dict[str, None]()
    for line in log.split("\n"):  # not splitlines, which splits at the separators of metadata
        found = _LINE.match(line)
        assert found is not None  # every part is optional
        text = found["text"].strip()
        if banner := _BANNER.match(text):
            if digits := banner[2]:  # 8601 is 8.6.1, 101601 is 10.16.1
                number, step = int(digits), 100 if len(digits) > 4 else 10
                version = number // (100 * step), number // 100 % step, number % 100
            verdict = "PASSED" if banner[1] == "PASSED" else "FAILED" if banner[1] == "FAILED" else verdict
        kind = next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text[:_READ])), None)
        if kind is not None and not text.startswith(_RETRIED):
            messages[Message(kind, shortened(text))] = None
        if text and found["level"] in ("E", "F"):
            errors[shortened(text)] = None
    return Report(verdict=verdict, version=version, messages=tuple(messages), errors=tuple(errors))


# ---- the process -----------------------------------------------------------------------------------

NAME = "trtexec"
INSTALL = (
    "install TensorRT 10.9 or later with its command-line tools (the tar package, libnvinfer-bin, or "
    "NVIDIA's TensorRT container), and put trtexec on PATH"
)
CALL_SECONDS = 110.0  # slightly less than the caller's limit, so that the reason is reported
_USUAL_PLACES = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
_LOG_BYTES = 16 << 20  # bytes read from the end of a log; verbose ones have gigabytes
_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A trtexec executable, and its version."""

    path: str
    version: tuple[int, int, int]

    @property
    def release(self) -> str:
        """The version as text: ``10.16.1``."""
        return ".".join(map(str, self.version))

    def run(self, arguments: Sequence[str], *, model: Path, seconds: float) -> Report:
        """Run it and return its report. Raises `BackendError` with the most specific reason if it does not succeed.

        A run that succeeds with shapes that were not given is an error too.
        """
        command = [self.path, *arguments]
        with tempfile.TemporaryFile() as output:
            process = start_program(command, output=output, env=environment(), install=INSTALL)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_program(process)
            log = without_passwords(end_of_log(output, _LOG_BYTES))
        sys.stderr.write(f"{without_passwords(shlex.join(command))}\n{log}\n")
        if code is None:
            raise BackendError(
                f"trtexec was ended after {seconds:g} s; the end of its log: {_last_lines(log)}",
                where=model,
                cure="give it more time with --qdq-build-limit, or a lower --builderOptimizationLevel",
            )
        report = read_log(log)
        cause = report.cause
        if code == 0 and report.verdict == "PASSED" and (cause is None or cause.kind != "shapes_assumed"):
            return report
        errors = " | ".join(report.errors[-_LAST_LINES:])
        why = cause.text if cause else errors or _last_lines(log) or "it printed nothing"
        cure = FATAL[cause.kind][1] or None if cause else None
        if code < 0:
            what = f"was killed by {signal_text(-code)}"
        elif report.verdict == "PASSED":
            what = "measured another shape"
        else:
            failed = report.verdict or code
            what = f"failed with exit code {code}" if failed else "ended without a verdict"
        raise BackendError(f"trtexec {what}: {why}", where=model, cure=cure)


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
    """Read the version; done once for each file."""
    done = ask_program(path, "--help", INSTALL)
    text = done.stdout + done.stderr
    # Some versions end the help with FAILED, so neither verdict nor exit code is used here.
    version = read_log(text).version
    if version is None:
        why = _last_lines(without_passwords(text)) or f"exit code {done.returncode}"
        raise BackendUnavailableError(f"trtexec --help does not work: {why}", where=path, cure=INSTALL)
    return Tool(path=path, version=version)


def _last_lines(log: str) -> str:
    lines = [" ".join(line.split())[:200] for line in log.split("\n") if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])


# Accepted by TensorRT 10 and 11 and the same in both; in 11 they are the defaults.
MEASURING = ("--useCudaGraph", "--useSpinWait", "--noDataTransfers", "--separateProfileRun")

_BARE_NUMBER = re.compile(r"(?<![\w\"])(-?)(nan|inf)(?:inity)?(?![\w\"])", re.IGNORECASE)


def check_feeds(model: Model, feeds: Mapping[str, Array]) -> None:
    """Raise `BackendError` if values are missing for inputs, given for unknown ones, or of another type."""
    check_names(model.inputs, feeds, Path(model.where))
    for name in model.inputs:
        wanted, given = _dtype(model, name), feeds[name].dtype
        if given != wanted:
            raise BackendError(f"input '{name}' takes {wanted}, and {given} is given", where=model.where)


def dynamic_inputs(model: Model) -> tuple[str, ...]:
    """Inputs with a dimension that is not a number."""
    return tuple(name for name in model.inputs if None in (model.shape(name) or ()))


def shape_words(model: Model, profiles: Sequence[ShapeProfile]) -> list[str]:
    """``--minShapes``, ``--optShapes``, ``--maxShapes`` for the dynamic inputs, of each profile after its number.

    trtexec reads the three options that follow ``--profile``. Raises `BackendError` for a dynamic input without a
    shape: trtexec would use 1 for missing sizes.
    """
    dynamic = dynamic_inputs(model)
    if not dynamic:
        return []
    words = []
    for number, profile in enumerate(profiles or (ShapeProfile(),)):
        if missing := [name for name in dynamic if name not in profile.shapes]:
            raise BackendError(
                f"input {', '.join(missing)} has dynamic dimensions and no shape is given",
                where=model.where,
                cure="give it one in inputs.shapes of the spec",
            )
        words += [f"--profile={number}"] if len(profiles) > 1 else []
        words += [
            f"--{which}Shapes={joined({name: getattr(profile.shapes[name], which) for name in dynamic})}"
            for which in ("min", "opt", "max")
        ]
    return words


def joined(shapes: Mapping[str, Iterable[int]]) -> str:
    """``x:1x3x224x224,mask:1x128``; a scalar has an empty shape."""
    return ",".join(f"{quoted(name)}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def quoted(name: str) -> str:
    """A tensor's name for trtexec's command line: in quotes if it contains a separator."""
    return f"'{name}'" if set(name) & set(":,") else name


def read_outputs(text: str, model: Model) -> dict[str, Array]:
    """Output arrays from ``--exportOutput``, with the six significant digits that trtexec writes.

    Raises `BackendError` if an output is missing or its values do not match its dimensions.
    """
    arrays = {}
    try:
        # C++ prints these words, without quotes, for values that are not numbers.
        found = json.loads(_BARE_NUMBER.sub(lambda m: m[1] + _WORDS[m[2].lower()], text), strict=False)
        entries = {entry["name"]: entry for entry in found}
        for name in model.outputs:
            entry, dtype = entries[name], _dtype(model, name)
            shape = tuple(int(size) for size in str(entry["dimensions"]).split("x") if size)
            values = np.asarray(entry["values"], dtype=np.float64 if dtype.kind in "fV" else None)
            if values.size != math.prod(shape):
                raise ValueError(f"output '{name}' has {values.size} values for dimensions {shape}")
            arrays[name] = values.astype(dtype).reshape(shape)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        what = f"the outputs that trtexec wrote cannot be read: {why:.200}"
        raise BackendError(what, where=model.where) from None
    return arrays


_WORDS = {"nan": "NaN", "inf": "Infinity"}


def _dtype(model: Model, tensor: str) -> np.dtype[np.generic]:
    return onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(tensor) or onnx.TensorProto.UNDEFINED)
