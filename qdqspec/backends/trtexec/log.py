"""Reads the log of trtexec 10 and 11, and explains its messages.

Messages, recorded or from trtexec's source, either end a run or only make a measurement unreliable. An ``[E]`` line
alone does not mean failure: a tactic skipped for lack of memory writes one, and the build passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from qdqspec.types import NOT_CAPTURED

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
_LONGEST = 400  # characters of a message that are shown: node names of fused layers have thousands


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
    version = None
    messages, errors = dict[Message, None](), dict[str, None]()
    for line in log.split("\n"):  # not splitlines, which splits at the separators of metadata
        found = _LINE.match(line)
        assert found is not None  # every part is optional
        text = found["text"].strip()
        if banner := _BANNER.match(text):
            version = _version(banner[2]) or version
            verdict = "PASSED" if banner[1] == "PASSED" else "FAILED" if banner[1] == "FAILED" else verdict
        kind = next((kind for kind, pattern in _PATTERNS.items() if pattern.search(text[:_READ])), None)
        if kind is not None and not text.startswith(_RETRIED):
            messages[Message(kind, shortened(text))] = None
        if text and found["level"] in ("E", "F"):
            errors[shortened(text)] = None
    return Report(verdict=verdict, version=version, messages=tuple(messages), errors=tuple(errors))


def _version(digits: str | None) -> tuple[int, int, int] | None:
    """``8601`` is 8.6.1, ``101601`` is 10.16.1."""
    if digits is None:
        return None
    number, step = int(digits), 100 if len(digits) > 4 else 10
    return number // (100 * step), number // 100 % step, number % 100


def shortened(text: str) -> str:
    """One line of limited length, with its middle removed."""
    line = " ".join(text.split())
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"
