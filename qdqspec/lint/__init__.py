"""What a target will refuse or run slowly, found in a model before any build and without the target.

The rooms above say `lint_model`; rules are functions, one each, that register themselves with a documented id.
"""

from __future__ import annotations

from qdqspec.lint.rules import Rule, rules_for
from qdqspec.lint.run import lint_model

__all__ = ["Rule", "lint_model", "rules_for"]
