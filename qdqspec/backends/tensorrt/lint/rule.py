"""The decorators of the rules for TensorRT, ids ``TRT001`` and so on, and their sources. None was measured by us."""

from __future__ import annotations

from collections.abc import Callable

from qdqspec.qdq.lint import Find, also_for, severities
from qdqspec.types import FindingSeverity

TARGETS = ("tensorrt-10", "tensorrt-11")
RTX_TARGETS = ("tensorrt-rtx-1",)
_refused, slow, note = severities(*TARGETS)
# Headers and parser were read up to 11.1: whether later versions refuse the same is not known.
_NOT_READ = ("11.2", "")
NOT_KNOWN = ("10.9", "")  # in any version

# Refused by the documents of TensorRT; that it builds elsewhere is no proof that it does in TensorRT.
BUILDS_IN_RTX = "TensorRT for RTX 1.7.1.116 builds such models"
MEASURED = "measured with TensorRT for RTX 1.7.1.116"
TABLES = "onnx-tensorrt, docs/operators.md of 10.1, 10.15 and 11.1, and its changelog up to 10.15"
GUIDE = 'NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations'
FUSIONS = "NVIDIA, TensorRT best practices, layer fusion"
ISSUE = "github.com/NVIDIA/TensorRT issue"
MODEL_OPTIMIZER = "github.com/NVIDIA/Model-Optimizer"


def refused(
    name: str, title: str, *, until: str = "", unknown: tuple[str, str] | None = None, **texts: str
) -> Callable[[Find], Find]:
    """Register a rule of what TensorRT refuses, with the ``texts`` of `register`; unread versions are unknown."""
    unread = None if until else _NOT_READ
    return _refused(name, title, until=until, unknown=unknown or unread, **texts)


def compiled(
    name: str,
    title: str,
    *,
    cure: str,
    words: str,
    severity: FindingSeverity = "refused",
    in_rtx: FindingSeverity | None = None,
) -> Callable[[Find], Find]:
    """Register a rule for TensorRT for RTX, whose compiler says so in these ``words``, and for TensorRT.

    No source of NVIDIA states it for TensorRT, whose severity may be lower than that ``in_rtx``.
    """
    register = {"refused": _refused, "note": note}[severity]

    def both(find: Find) -> Find:
        source = f"sources of NVIDIA: none found; {MEASURED}: {words}"
        register(name, title, cure=cure, source=source, unknown=NOT_KNOWN)(find)
        also_for(RTX_TARGETS, name, f"{MEASURED}: {words}", severity=in_rtx or severity)
        return find

    return both
