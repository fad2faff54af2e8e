"""Reads the output of trtexec, versions 8 to 11, and explains its messages.

The result is the median of ``GPU Compute Time``: ``Latency`` includes transfers over PCIe up to 10. Messages, recorded
or from trtexec's source, either end a build or only make a measurement unreliable. An ``[E]`` line alone does not mean
failure: a tactic skipped for lack of memory writes one, and the build passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from qdqspec.types import NOT_CAPTURED

RunOutcome: TypeAlias = Literal["PASSED", "FAILED", ""]

_BANNER = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d{4,9})\])?")
_MEDIAN = re.compile(r"GPU Compute Time: (?:.*, )?median = ([-+\w.]{1,40})")
_PROFILE = "=== Profile ("
_TOTAL = "Total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The parsed output of one run of trtexec. ``verdict`` is empty after a crash.

    ``median_ms`` is that of the GPU compute time; ``None`` where the run printed no summary, or no usable one.
    ``profile`` contains mean milliseconds of the layers it printed.
    """

    verdict: RunOutcome = ""
    version: tuple[int, int, int] | None = None
    median_ms: float | None = None
    findings: tuple[MatchedMessage, ...] = ()
    errors: tuple[str, ...] = ()
    profile: tuple[tuple[str, float], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of trtexec about its own measurement."""
        found = (finding for finding in self.findings if finding.rule.weight == "note")
        texts = (
            f"{NOT_CAPTURED}: {each.text}"
            if each.rule.kind == "no_cuda_graph"
            else each.text.removeprefix("* ")
            for each in found
        )
        return tuple(dict.fromkeys(texts))


def read_log(log: str) -> Report:
    """Parse a log; unknown lines are skipped."""
    lines = list(plain_lines(log))
    verdict: RunOutcome = ""
    version = median_ms = None
    for _, text in lines:
        if banner := _BANNER.match(text):
            version = _version(banner[2]) or version
            verdict = "PASSED" if banner[1] == "PASSED" else "FAILED" if banner[1] == "FAILED" else verdict
        elif summary := _MEDIAN.match(text):
            median_ms = _number(summary[1])
    return Report(
        verdict=verdict,
        version=version,
        median_ms=median_ms,
        findings=find_all(log),
        errors=tuple(dict.fromkeys(shortened(text) for level, text in lines if level in ("E", "F") and text)),
        profile=tuple(_profile_rows(log)),
    )


def _version(digits: str | None) -> tuple[int, int, int] | None:
    """``8601`` is 8.6.1, ``8510`` is 8.5.1 (its build last), ``101601`` is 10.16.1."""
    if digits is None:
        return None
    number = int(digits)
    if number >= 10_000:
        return number // 10_000, number // 100 % 100, number % 100
    rest = number % 100
    return number // 1000, number // 100 % 10, rest if rest < 10 else rest // 10


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _profile_rows(log: str) -> Iterator[tuple[str, float]]:
    """Name and mean of each row of the table that ``--dumpProfile`` prints: total, mean, median, share, name."""
    is_table = False
    for _, text in plain_lines(log):
        if _PROFILE in text:
            is_table = True
        elif is_table and not text.startswith("Time("):  # the heading
            cells = text.split(maxsplit=4)
            mean = _number(cells[1]) if len(cells) == 5 else None
            is_table = mean is not None and cells[4] != _TOTAL
            if is_table and mean is not None:
                yield cells[4], mean


Weight: TypeAlias = Literal["fatal", "note"]


@dataclass(frozen=True, slots=True)
class MessageRule:
    """A kind of message: the text found in a line, its meaning, and the remedy of a fatal one."""

    kind: str
    weight: Weight
    pattern: re.Pattern[str]
    cure: str = ""


@dataclass(frozen=True, slots=True)
class MatchedMessage:
    """A message and the rule that it matches. ``text`` is the line without time and severity."""

    rule: MessageRule
    text: str


def _rule(kind: str, weight: Weight, pattern: str, cure: str = "") -> MessageRule:
    return MessageRule(kind, weight, re.compile(pattern), cure)


# The most specific first: a line belongs to the first rule that matches, a failed run to the first one found.
RULES = (
    _rule(
        "unknown_option",
        "fatal",
        r"^Unknown option: ",
        "leave the option out of trtexec.args, or use a trtexec that has it",
    ),
    _rule("no_model", "fatal", r"^Model missing or format not recognized", "name an ONNX file"),
    _rule(
        "shapes_assumed",
        "fatal",
        r"^(?:Dynamic dimensions required for input: |Shape missing for input with dynamic shape: )",
        "give the input a shape in inputs.shapes of the spec: TensorRT used 1 for missing dimensions",
    ),
    _rule(
        "parse_zero_point",
        "fatal",
        r"symmetric quantization.*zero ?(?:point|pt)|shiftIsAllZeros",
        "quantize symmetrically: every zero point must be 0",
    ),
    _rule(
        "parse_scale",
        "fatal",
        r"scale coefficients must all be positive|scaleAllPositive",
        "raise scales of zero: a channel of zeros has one",
    ),
    _rule(
        "parse_quant_type",
        "fatal",
        r"TensorRT only allows .*quantization",
        "use a number format that this version knows; leave biases in float",
    ),
    _rule("no_implementation_retry", "note", r"^Engine generation failed with backend strategy"),
    _rule(
        "out_of_memory_tactic",
        "note",
        r"Skipping tactic .*insufficient memory|insufficient to use tactic|[Vv]irtualMemoryBuffer.*OutOfMemory",
    ),
    _rule(
        "out_of_memory_fatal",
        "fatal",
        r"(?:Error Code 1: )?Cuda Runtime \(out of memory\)|User allocator error",
        "free memory on the GPU, or take a smaller batch",
    ),
    _rule(
        "no_implementation",
        "fatal",
        r"Could not find any implementation for node",
        "leave the Q/DQ of that node out, or update TensorRT: 8.6 lacks kernels that 10 has",
    ),
    _rule("internal_assert", "fatal", r"Assertion .*failed", "leave the Q/DQ around that place out"),
    _rule("api_misuse", "fatal", r"API Usage Error"),
    _rule(
        "engine_mismatch",
        "fatal",
        r"^Engine deserialization failed|^Got invalid engine",
        "build the engine with the TensorRT that runs it",
    ),
    _rule("parse_failure", "fatal", r"^Parsing model failed|^Failed to parse onnx"),
    _rule("weakly_typed", "note", r"^Weakly-typed networks have been deprecated"),
    _rule("hardware_hint", "note", r"hardware does not accelerate"),
    _rule("unstable_timing", "note", r"^\* GPU compute time is unstable"),
    _rule("enqueue_bound", "note", r"^\* Throughput may be bound by Enqueue Time"),
    _rule(
        "transfer_bound",
        "note",
        r"^\* Throughput may be bound by (?:host-to-device|device-to-host) transfers",
    ),
    _rule("aux_streams", "note", r"auxiliary streams, so the .*latency may not be accurate"),
    _rule("no_cuda_graph", "note", r"not permitted under CUDA graph|useCudaGraph flag has been ignored"),
)

_LINE = re.compile(
    r"(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?(?:\[TRT\] )?(?:\[(?P<level>[A-Z])\] ?)?(?:\[TRT\] )?(?P<text>.*)"
)
_CRASH = _rule(
    "crash_no_verdict",
    "fatal",
    r"^\S+: \S+:\d+: .*Assertion `",
    "TensorRT itself crashed: leave this candidate out",
)  # found first, and the least specific one
_RETRIED = "Error message: "  # after "Engine generation failed with backend strategy": another follows
_READ = 4000  # characters of a line that are searched
_LONGEST = 400  # characters of a message that are shown: node names of fused layers have thousands


def plain_lines(log: str) -> Iterator[tuple[str, str]]:
    """Severity and text of each line; the severity is empty if the log was filtered or a library wrote the line."""
    for line in log.split("\n"):  # not splitlines, which splits at the separators of metadata
        found = _LINE.match(line)
        assert found is not None  # every part is optional
        yield found["level"] or "", found["text"].strip()


def find_all(log: str) -> tuple[MatchedMessage, ...]:
    """Every message that matches a rule, in order, each text once."""
    found: dict[MatchedMessage, None] = {}
    for _, text in plain_lines(log):
        rule = next((rule for rule in (_CRASH, *RULES) if rule.pattern.search(text[:_READ])), None)
        if rule is not None and not text.startswith(_RETRIED):
            found[MatchedMessage(rule, shortened(text))] = None
    return tuple(found)


def cause_of(findings: Iterable[MatchedMessage]) -> MatchedMessage | None:
    """The most specific of the messages that end a run."""
    fatal = [finding for finding in findings if finding.rule.weight == "fatal"]
    return min(fatal, key=lambda finding: (*RULES, _CRASH).index(finding.rule), default=None)


def shortened(text: str) -> str:
    """One line of limited length, with its middle removed."""
    line = " ".join(text.split())
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"
