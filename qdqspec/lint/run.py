"""Looking at a model through the rules of a target. May import floors 0 and 1 and this room."""

from __future__ import annotations

from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model

# Imported for their rules.
from qdqspec.lint import (
    onnxruntime_numbers,  # noqa: F401 - registers its rules
    onnxruntime_placement,  # noqa: F401 - registers its rules
    tensorrt_hardware,  # noqa: F401 - registers its rules
    tensorrt_numbers,  # noqa: F401 - registers its rules
    tensorrt_placement,  # noqa: F401 - registers its rules
)
from qdqspec.lint.rules import TARGETS, rules_for
from qdqspec.lint.view import View
from qdqspec.registry import did_you_mean
from qdqspec.types import Finding, LintTarget

_ORDER = ("refused", "slow", "note")


def lint_model(
    model: Model, target: LintTarget, *, compute_capability: tuple[int, int] | None = None
) -> tuple[Finding, ...]:
    """What the target will refuse, run slowly, or what is worth knowing: gravest first, then by rule and graph order.

    ``compute_capability`` is the GPU's, such as ``(8, 9)``; without one, what depends on it is only noted.
    Raises `ConfigError` for an unknown target. Bodies of If, Loop and Scan are not looked into.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"unknown lint target '{target}'{did_you_mean(target, TARGETS)}",
            cure=f"known: {', '.join(TARGETS)}",
        )
    view = View(model, target, compute_capability)
    found = [
        Finding(
            id=rule.id,
            severity=rule.severity,
            node=hit.node,
            message=hit.detail,
            title=rule.title,
            cure=rule.cure,
            source=rule.source,
        )
        for rule in rules_for(target)
        for hit in rule.find(view)
    ]
    return tuple(sorted(found, key=lambda finding: (_ORDER.index(finding.severity), finding.id)))
