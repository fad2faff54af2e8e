"""Closed sets of words that packages share."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["fp", "in+out", "in-only", "dynamic", "weight-only", "activation-only"]
Label: TypeAlias = str  # a kind, prefixed with the format if it is not the case's first: "int4:in-only"
Clock: TypeAlias = Literal["cpu", "wall"]
Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
Status: TypeAlias = Literal["tuned", "unchanged", "skipped", "not run"]  # of a case
Severity: TypeAlias = Literal["error", "warn"]
EvidenceKind: TypeAlias = Literal[
    "latency", "parity", "accuracy", "placement", "size", "survival", "regression", "lint"
]
LintTarget: TypeAlias = Literal[
    "tensorrt-10", "tensorrt-10.9", "tensorrt-10.10", "tensorrt-10.11", "tensorrt-10.12", "tensorrt-10.13",
    "tensorrt-10.14", "tensorrt-10.15", "tensorrt-10.16", "tensorrt-11", "tensorrt-11.0", "tensorrt-11.1",
    "tensorrt-11.2", "tensorrt-11.3", "tensorrt-11.4", "onnxruntime-cpu",
]  # fmt: skip
FindingSeverity: TypeAlias = Literal["refused", "slow", "note"]
Optimizer: TypeAlias = Literal[
    "constant-folding",
    "onnxruntime-basic",
    "onnxruntime-extended",
    "onnxruntime-all",
    "onnxslim",
    "onnxscript",
]
RegionType: TypeAlias = Literal["LEAF", "COMPOSITE", "ROOT"]

LABELS: tuple[Kind, ...] = ("fp", "in+out", "in-only", "dynamic")
HALVES: tuple[Kind, ...] = (
    "weight-only",
    "activation-only",
)  # few kernels use these; available on request


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
