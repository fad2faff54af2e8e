"""Closed sets of words that cross rooms. Standard library only."""

from __future__ import annotations

from typing import Literal, TypeAlias

Label: TypeAlias = Literal["fp", "in+out", "in-only"]
Clock: TypeAlias = Literal["cpu", "wall"]
Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
Severity: TypeAlias = Literal["error", "warn"]
EvidenceKind: TypeAlias = Literal[
    "latency", "parity", "accuracy", "placement", "size", "survival", "regression", "lint"
]
LintTarget: TypeAlias = Literal["tensorrt-10", "tensorrt-11", "onnxruntime-cpu"]
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

LABELS: tuple[Label, ...] = ("fp", "in+out", "in-only")
