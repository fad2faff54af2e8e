"""Reads the output of trtexec, versions 8 to 11.

``Latency`` is not used: up to 10 it includes transfers over PCIe. The result is the median of
``GPU Compute Time``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from qdqspec.backends.trtexec.messages import MatchedMessage, find_all, plain_lines, shortened
from qdqspec.types import NOT_CAPTURED

RunOutcome: TypeAlias = Literal["PASSED", "FAILED", ""]

_BANNER = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d{4,9})\])?")
_SUMMARY = re.compile(
    r"(Latency|Enqueue Time|H2D Latency|GPU Compute Time|D2H Latency): (?=min = |max = |mean = |median = )"
)
_STATISTIC = re.compile(r"(min|max|mean|median|percentile\([\d.]{1,12}%\)) = ([-+\w.]{1,40})")
_FACT = re.compile(r"(Selected Device|Compute Capability|TensorRT version|Precision): (.+)")
_PROFILE = "=== Profile ("
_TOTAL = "Total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The parsed output of one run of trtexec. ``statistics`` are in ms: ``{"GPU Compute Time": {"median": ...}}``.

    ``verdict`` is empty after a crash; ``profile`` contains mean milliseconds of the layers it printed;
    ``layers`` are those of ``--dumpLayerInfo``, one line each.
    """

    verdict: RunOutcome = ""
    version: tuple[int, int, int] | None = None
    statistics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[MatchedMessage, ...] = ()
    errors: tuple[str, ...] = ()
    profile: tuple[tuple[str, float], ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def median_ms(self) -> float | None:
        """The median GPU compute time; ``None`` where the run printed no summary, or no usable one."""
        return self.statistics.get("GPU Compute Time", {}).get("median")

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of trtexec about its own measurement."""
        found = (finding for finding in self.findings if finding.weight == "note")
        return tuple(
            dict.fromkeys(
                f"{NOT_CAPTURED}: {each.text}"
                if each.kind == "no_cuda_graph"
                else each.text.removeprefix("* ")
                for each in found
            )
        )


def read_log(log: str) -> Report:
    """Parse a log; unknown lines are skipped."""
    lines = list(plain_lines(log))
    verdict: RunOutcome = ""
    version = None
    statistics: dict[str, Mapping[str, float]] = {}
    facts: dict[str, str] = {}
    for _, text in lines:
        if banner := _BANNER.match(text):
            version = _version(banner[2]) or version
            verdict = "PASSED" if banner[1] == "PASSED" else "FAILED" if banner[1] == "FAILED" else verdict
        elif summary := _SUMMARY.match(text):
            statistics[summary[1]] = _statistics(text)
        elif fact := _FACT.match(text):
            facts[fact[1]] = fact[2]
    return Report(
        verdict=verdict,
        version=version,
        statistics=statistics,
        facts=facts,
        findings=find_all(log),
        errors=tuple(dict.fromkeys(shortened(text) for level, text in lines if level in ("E", "F") and text)),
        profile=tuple(_profile_rows(log)),
        layers=tuple(_layer_lines(log)),
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


def _statistics(text: str) -> dict[str, float]:
    """The numeric values of a summary line."""
    found = {name: _number(value) for name, value in _STATISTIC.findall(text)}
    return {name: value for name, value in found.items() if value is not None}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _profile_rows(log: str) -> Iterator[tuple[str, float]]:
    """Rows of the table printed by ``--dumpProfile``: up to 8 the name comes first, later last."""
    heading, waiting = "", False
    for _, text in plain_lines(log):
        if _PROFILE in text:
            heading, waiting = "", True
        elif waiting and "Layer" in text:
            heading, waiting = text, False
        elif heading:
            row = _row(text, heading)
            if row is None or row[0] == _TOTAL:
                heading = ""
            else:
                yield row


def _row(text: str, heading: str) -> tuple[str, float] | None:
    """Name and mean of one row: total, mean, median (not in old versions), share."""
    columns = 4 if "Median" in heading else 3
    if heading.startswith("Layer"):
        cells = text.rsplit(maxsplit=columns)
        cells = cells[1:] + cells[:1]
    else:
        cells = text.split(maxsplit=columns)
    mean = _number(cells[1]) if len(cells) == columns + 1 else None
    return None if mean is None else (cells[-1], mean)


def _layer_lines(log: str) -> Iterator[str]:
    """The lines between ``Layers:`` and the blank line or heading that ends them."""
    inside = False
    for line in log.split("\n"):  # not splitlines, which splits at the separators of metadata
        if line.rstrip().endswith("Layers:"):
            inside = True
        elif inside and (not line.strip() or line.startswith(("Bindings:", "I/O Tensors:", "&&&&"))):
            inside = False
        elif inside:
            yield line
