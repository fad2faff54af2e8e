"""Static analysis of a model for a target: finds nodes that it refuses or runs slowly, without a build or the target.

`lint_model` is the entry point; each rule is a function that registers itself with a documented id.
"""

from __future__ import annotations

from qdqspec.qdq.lint.rules import Rule, lint_model, rules_for

__all__ = ["Rule", "lint_model", "rules_for"]
