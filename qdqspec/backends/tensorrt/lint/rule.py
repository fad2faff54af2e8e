"""The decorator of the rules for TensorRT, ids ``TRT001`` and so on, and their sources. None was measured by us."""

from __future__ import annotations

from collections.abc import Callable

from qdqspec.qdq.lint import Find, rule as register
from qdqspec.types import FindingSeverity

TARGETS = ("tensorrt-10", "tensorrt-11")
# Headers and parser were read up to 11.1: whether later versions refuse the same is not known.
_NOT_READ = ("11.2", "")


def rule(
    name: str,
    severity: FindingSeverity,
    title: str,
    *,
    until: str = "",
    unknown: tuple[str, str] | None = None,
    **texts: str,
) -> Callable[[Find], Find]:
    """Register a rule for TensorRT with the ``texts`` of `register`; later versions than those read are unknown."""
    unread = _NOT_READ if severity == "refused" and not until else None
    return register(name, severity, title, targets=TARGETS, until=until, unknown=unknown or unread, **texts)


# Refused by the documents of TensorRT; that it builds elsewhere is no proof that it does in TensorRT.
BUILDS_IN_RTX = "TensorRT for RTX 1.7.1.116 builds such models"
TABLES = "onnx-tensorrt, docs/operators.md of 10.1, 10.15 and 11.1, and its changelog up to 10.15"
GUIDE = 'NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations'
FUSIONS = "NVIDIA, TensorRT best practices, layer fusion"
ISSUE = "github.com/NVIDIA/TensorRT issue"
MODEL_OPTIMIZER = "github.com/NVIDIA/Model-Optimizer"
