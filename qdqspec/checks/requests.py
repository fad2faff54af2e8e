"""The evidence that the checks of a case request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from qdqspec.checks.base import Check, CheckParams
from qdqspec.registry import resolve
from qdqspec.types import CheckSpec, EvidenceKind
from qdqspec.types.requests import Request


class RequestingCheck(Check, Protocol):
    """A check that requests evidence with parameters. The session collects equal requests of several checks once."""

    def requests(self, params: CheckParams) -> Iterable[Request]:
        """The evidence for these parameters."""
        ...


def requests_of(check: CheckSpec) -> tuple[Request, ...]:
    """The evidence that a check of a case requests with parameters."""
    kind = resolve("check", check.kind)
    return tuple(cast("RequestingCheck", kind).requests(check.params)) if hasattr(kind, "requests") else ()


def needs_of(check: CheckSpec) -> frozenset[EvidenceKind]:
    """All kinds of evidence that a check of a case needs."""
    kind = cast("Check", resolve("check", check.kind))
    return kind.needs | {request.kind for request in requests_of(check)}
