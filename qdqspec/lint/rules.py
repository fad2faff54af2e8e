"""Lint rules and their registry."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from packaging.version import Version

from qdqspec import registry
from qdqspec.config import hooks
from qdqspec.lint.view import View
from qdqspec.types import FindingSeverity, LintTarget


class Hit(NamedTuple):
    """A place that breaks a rule: the node (empty for the whole model), and the problem."""

    node: str
    detail: str


Find: TypeAlias = Callable[[View], Iterator[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One property that a target refuses or handles badly. Ids are stable and never reused.

    It applies to versions of the target's runtime from ``since``, if that is not empty, and before ``until``.
    ``unknown`` are two such bounds between which no source states whether it applies; it is applied there, and the
    finding states that.
    """

    id: str
    severity: FindingSeverity
    title: str
    cure: str
    source: str
    targets: tuple[LintTarget, ...]
    find: Find
    since: str = ""
    until: str = ""
    unknown: tuple[str, str] | None = None

    def holds_for(self, runtime: Version | None) -> bool:
        """Whether the rule applies to a version of the runtime; if that is unknown, to the newest."""
        return not self.until if runtime is None else _is_between(runtime, self.since, self.until)

    def is_for(self, target: LintTarget) -> bool:
        """Whether it is one of a target's rules, in some version at least."""
        return any(target == each or target.startswith(f"{each}.") for each in self.targets)

    def scope(self, versions: Sequence[Version]) -> str:
        """The versions among those judged that it applies to, and those where that is unknown; empty if it is all."""
        holding = [version for version in versions if self.holds_for(version)]
        found = [range_text(self.since, self.until)] if len(holding) < len(versions) else []
        if self.unknown is not None and any(_is_between(version, *self.unknown) for version in holding):
            found.append(f"not known {range_text(*self.unknown)}")
        return "; ".join(found)


def range_text(since: str, until: str) -> str:
    """``from 10.13 before 11.0``."""
    return " ".join(text for text, given in ((f"from {since}", since), (f"before {until}", until)) if given)


def _is_between(version: Version, since: str, until: str) -> bool:
    is_old = bool(since) and version < Version(since)
    return not is_old and (not until or version < Version(until))


_RULES: dict[str, Rule] = {}


def rule(
    name: str,
    severity: FindingSeverity,
    title: str,
    *,
    cure: str,
    source: str,
    targets: Iterable[LintTarget],
    since: str = "",
    until: str = "",
    unknown: tuple[str, str] | None = None,
) -> Callable[[Find], Find]:
    """Register a function as the rule of that id, three capital letters and three digits.

    A target of a major version is one of all its versions: a rule for ``x-10`` is one for ``x-10.1``.
    """

    def register(find: Find) -> Find:
        if name in _RULES:
            raise ValueError(f"two lint rules are called {name}")
        _RULES[name] = Rule(
            id=name,
            severity=severity,
            title=title,
            cure=cure,
            source=source,
            targets=tuple(targets),
            find=find,
            since=since,
            until=until,
            unknown=unknown,
        )
        return find

    return register


def rules_for(target: LintTarget | None = None) -> tuple[Rule, ...]:
    """The rules of a target, or of all backends, by id. Imports the rules of the backend that the target belongs to."""
    for backend in registry.names("backend") if target is None else [hooks.owner_of(target)]:
        if module := hooks.declaration_of(backend).lint_rules:
            importlib.import_module(module)
    known = sorted(_RULES.values(), key=lambda each: each.id)
    return tuple(each for each in known if target is None or each.is_for(target))
