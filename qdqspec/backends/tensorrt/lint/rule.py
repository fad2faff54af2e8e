"""The decorator of the rules for TensorRT, ids ``TRT001`` and so on."""

from __future__ import annotations

from collections.abc import Callable

from qdqspec.lint import rules
from qdqspec.lint.rules import Find
from qdqspec.types import FindingSeverity

TARGETS = ("tensorrt-10", "tensorrt-11")
# Headers and parser were read up to 11.1: whether later versions refuse the same is not known.
_NOT_READ = ("11.2", "")


def rule(
    name: str,
    severity: FindingSeverity,
    title: str,
    *,
    cure: str,
    source: str,
    since: str = "",
    until: str = "",
    unknown: tuple[str, str] | None = None,
) -> Callable[[Find], Find]:
    """Register a function as the rule of that id, for all versions from ``since`` and before ``until``."""
    unread = _NOT_READ if severity == "refused" and not until else None
    return rules.rule(
        name,
        severity,
        title,
        cure=cure,
        source=source,
        targets=TARGETS,
        since=since,
        until=until,
        unknown=unknown or unread,
    )
