"""Applies the rules of a target to a model."""

from __future__ import annotations

from collections.abc import Iterator

from qdqspec.config import hooks
from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model
from qdqspec.lint.rules import rules_for
from qdqspec.lint.view import View
from qdqspec.registry import did_you_mean
from qdqspec.types import Finding, LintTarget

_ORDER = ("refused", "slow", "note")


def lint_model(
    model: Model, target: LintTarget, *, compute_capability: tuple[int, int] | None = None
) -> tuple[Finding, ...]:
    """The findings of a target: most severe first, then by rule and graph order.

    A target of a major version alone is judged for all its versions: the title of a finding states
    in which of them it applies, and in which that is unknown.
    ``compute_capability`` is the GPU's, such as ``(8, 9)``; without one, findings that depend on it are
    notes. Nodes in bodies of If, Loop and Scan are named by their path: ``choice/then_branch/conv``; those of
    local functions as in ONNX's inliner: ``conv__1``, ``conv__2`` for the first and second call. Raises
    `ConfigError` for an unknown target.
    """
    if not hooks.declares("lint_targets", target):
        known = hooks.all_names("lint_targets")
        raise ConfigError(
            f"unknown lint target '{target}'{did_you_mean(target, known)}", cure=f"known: {', '.join(known)}"
        )
    found = _findings(View(_without_functions(model), target, compute_capability))
    return tuple(sorted(found, key=lambda finding: (_ORDER.index(finding.severity), finding.id)))


def _without_functions(model: Model) -> Model:
    """The model with its local functions inlined; itself if it has none."""
    if not model.proto.functions:
        return model
    import onnx.inliner

    return Model(onnx.inliner.inline_local_functions(model.proto), path=model.path)


def _findings(view: View) -> Iterator[Finding]:
    for rule in rules_for(view.target):
        if not any(map(rule.holds_for, view.versions or (None,))):
            continue
        scope = rule.scope(view.versions)
        for hit in rule.find(view):
            yield Finding(
                id=rule.id,
                severity=rule.severity,
                node=hit.node,
                message=hit.detail,
                title=f"{rule.title} ({scope})" if scope else rule.title,
                cure=rule.cure,
                source=rule.source,
            )
