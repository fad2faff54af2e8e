"""Lint rules and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from packaging.version import Version

from qdqspec.lint.view import View
from qdqspec.types import FindingSeverity, LintTarget

TENSORRT: tuple[LintTarget, ...] = ("tensorrt-10", "tensorrt-11")
ONNXRUNTIME: tuple[LintTarget, ...] = ("onnxruntime-cpu",)
TARGETS: tuple[LintTarget, ...] = (*TENSORRT, *ONNXRUNTIME)


class Hit(NamedTuple):
    """A place that breaks a rule: the node (empty for the whole model), and the problem."""

    node: str
    detail: str


Find: TypeAlias = Callable[[View], Iterator[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One property that a target refuses or handles badly. Ids are stable and never reused.

    It applies to versions of the target's runtime from ``since``, if that is not empty, and before ``until``.
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

    def holds_for(self, runtime: Version | None) -> bool:
        """Whether the rule applies to a version of the runtime; if that is unknown, to the newest."""
        if runtime is None:
            return not self.until
        is_old = self.since and runtime < Version(self.since)
        return not (is_old or (self.until and runtime >= Version(self.until)))


_RULES: dict[str, Rule] = {}


def rule(
    name: str,
    severity: FindingSeverity,
    title: str,
    *,
    cure: str,
    source: str,
    since: str = "",
    until: str = "",
) -> Callable[[Find], Find]:
    """Register a function as the rule of that id; ``TRT`` ones are for TensorRT, ``ORT`` ones for ONNX Runtime."""

    def register(find: Find) -> Find:
        if name in _RULES:
            raise ValueError(f"two lint rules are called {name}")
        targets = TENSORRT if name.startswith("TRT") else ONNXRUNTIME
        _RULES[name] = Rule(
            id=name,
            severity=severity,
            title=title,
            cure=cure,
            source=source,
            targets=targets,
            find=find,
            since=since,
            until=until,
        )
        return find

    return register


def rules_for(target: LintTarget | None = None) -> tuple[Rule, ...]:
    """The rules of a target, or all, by id. Their modules must be imported first (`qdqspec.lint.run`)."""
    known = sorted(_RULES.values(), key=lambda each: each.id)
    return tuple(each for each in known if target is None or target in each.targets)
