"""Closed sets of words that packages share."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["fp", "in+out", "in-only", "dynamic", "weight-only", "activation-only"]
Label: TypeAlias = str  # a kind, prefixed with the format if it is not the case's first: "int4:in-only"
Method: TypeAlias = Literal["max", "percentile", "entropy", "mse", "mean"]  # of calibration
Granularity: TypeAlias = Literal["per-channel", "per-tensor"]  # of the scales of weights
RealType: TypeAlias = Literal["float32", "float16", "bfloat16"]
StartScales: TypeAlias = Literal["keep", "recalibrate"]  # of quantized models that a search starts from
RegionSource: TypeAlias = Literal["structure", "names", "fusion", "manual"]
Preset: TypeAlias = Literal["quick", "default", "extensive"]
Objective: TypeAlias = Literal["latency", "coverage", "pareto"]
Clock: TypeAlias = Literal["cpu", "wall"]
ClockChoice: TypeAlias = Literal["auto", "cpu", "wall"]
Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
Status: TypeAlias = Literal["tuned", "untimed", "unchanged", "skipped", "not run"]  # of a case
Severity: TypeAlias = Literal["error", "warn"]
EvidenceKind: TypeAlias = Literal[
    "latency",
    "parity",
    "accuracy",
    "placement",
    "size",
    "survival",
    "regression",
    "lint",
    "builds",
    "figures",
]
LintTarget: TypeAlias = str  # a lint target that a backend declares, see `qdqspec._core.hooks`
FindingSeverity: TypeAlias = Literal["refused", "slow", "note"]
Optimizer: TypeAlias = str  # one of `OPTIMIZERS`, or one that a backend declares
RegionType: TypeAlias = Literal["LEAF", "COMPOSITE", "ROOT"]

OPTIMIZERS = ("constant-folding", "onnxslim", "onnxscript")  # that belong to no backend
LABELS: tuple[Kind, ...] = ("fp", "in+out", "in-only", "dynamic")
HALVES: tuple[Kind, ...] = ("weight-only", "activation-only")  # few kernels use these; on request


def label_of(number_format: str, kind: Kind) -> Label:
    """``int4:in-only``; the kind alone if the format is ``""``, the case's first."""
    return f"{number_format}:{kind}" if number_format and kind != "fp" else kind


def format_of(label: Label) -> str:
    """The format of a label; ``""`` for the case's first one, and for float."""
    return label.rpartition(":")[0]


def kind_of(label: Label) -> Kind:
    """The kind of a label. Raises ``ValueError`` if it is unknown."""
    kind = label.rpartition(":")[2]
    for known in (*LABELS, *HALVES):
        if kind == known:
            return known
    raise ValueError(f"unknown label {label!r}")
