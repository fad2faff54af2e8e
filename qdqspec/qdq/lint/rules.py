"""Lint rules, their registry, their application to a model, findings made by loading, and the text of findings."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from packaging.version import Version

from qdqspec._core import hooks, registry
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text, plain
from qdqspec.errors import ConfigError
from qdqspec.graph import Model, Node
from qdqspec.qdq.lint.view import View, type_name
from qdqspec.types import Finding, FindingSeverity, LintTarget

# A place that breaks a rule: the node, or ``None`` for the whole model, and the problem.
Hit: TypeAlias = tuple[Node | None, str]
Find: TypeAlias = Callable[[View], Iterator[Hit]]
Register: TypeAlias = partial[Callable[[Find], Find]]
ALL = "all"  # as the target of a rule: it holds for each one
_ORDER: tuple[FindingSeverity, ...] = ("refused", "slow", "note")


@dataclass(frozen=True, slots=True)
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


_RULES: dict[tuple[str, tuple[LintTarget, ...]], Rule] = {}


def _add(rule: Rule) -> None:
    if any(name == rule.id and not set(targets).isdisjoint(rule.targets) for name, targets in _RULES):
        raise ValueError(f"two lint rules are called {rule.id}")
    _RULES[rule.id, rule.targets] = rule


def rule(
    name: str,
    title: str,
    *,
    severity: FindingSeverity,
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
        _add(Rule(name, severity, title, cure, source, tuple(targets), find, since, until, unknown))
        return find

    return register


def severities(*targets: LintTarget) -> tuple[Register, Register, Register]:
    """The decorators of rules for these targets: `rule` for what is refused, what is slow, and notes."""
    refused, slow, note = (partial(rule, severity=severity, targets=targets) for severity in _ORDER)
    return refused, slow, note


def also_for(targets: tuple[LintTarget, ...], name: str, source: str, **changes: Any) -> None:
    """Register a known rule for other targets too, with its own source there, for all their versions.

    ``changes`` are other fields of `Rule`: severity, title, cure, find.
    """
    known = next(rule for (other, _), rule in _RULES.items() if other == name)
    bounds: dict[str, Any] = {"since": "", "until": "", "unknown": None}
    _add(replace(known, targets=targets, source=source, **bounds | changes))


def rules_for(target: LintTarget | None = None) -> tuple[Rule, ...]:
    """The rules of a target, or of all, by id. Imports the rules of the backend that the target belongs to."""
    importlib.import_module("qdqspec.qdq.lint.definition")  # the rules of all targets
    for backend in registry.names("backend") if target is None else [hooks.owner_of(target)]:
        if module := hooks.declaration_of(backend).lint_rules:
            importlib.import_module(module)
    known = sorted(_RULES.values(), key=lambda each: each.id)
    if target is None:
        return tuple(known)

    def is_of(one: LintTarget) -> bool:
        return one in (ALL, target) or target.startswith(f"{one}.")

    return tuple(rule for rule in known if any(map(is_of, rule.targets)))


def formats_newer_than_opset(view: View) -> Iterator[Hit]:
    """A stored type that ONNX's operators do not have in the model's opset; ONNX's checker does not check this."""
    for node, numbers in view.heads:
        if node.name in view.too_new:
            since = view.too_new[node.name]
            yield node, f"is {type_name(numbers.elem_type)}, and the opset is {view.model.opset}, not {since}"


def unequal_scales(view: View, moves: Callable[[Node], bool]) -> Iterator[Hit]:
    """Each node that moves values between a DQ and a Q of different scales or zero points."""
    for node in view.operators:
        before = view.dequantizer(node.inputs[0]) if node.inputs and moves(node) else None
        if before is None:
            continue
        after = [q for output in node.outputs for q in view.quantizers(output)]
        other = next((q for q in after if not view.numbers(before).same_scale(view.numbers(q))), None)
        if other is not None:
            yield node, f"is between '{before.name}' and '{other.name}'"


def lint_model(
    model: Model, target: LintTarget, *, compute_capability: tuple[int, int] | None = None
) -> tuple[Finding, ...]:
    """The findings of a target: most severe first, then by rule and graph order.

    A target of a major version alone is judged for all its versions: the title of a finding states
    in which of them it applies, and in which that is unknown.
    ``compute_capability`` is the GPU's, such as ``(8, 9)``; without one, findings that depend on it are
    notes. Nodes in bodies of If, Loop and Scan are named by their path: ``choice/then_branch/conv``; those of
    local functions by their call: ``block/conv``. Raises `ConfigError` for an unknown target.
    """
    if not hooks.declares("lint_targets", target):
        known = hooks.all_names("lint_targets")
        raise ConfigError(
            f"unknown lint target '{target}'{did_you_mean(target, known)}", cure=f"known: {', '.join(known)}"
        )
    if model.proto.functions:
        from qdqspec.graph import inlined

        model = Model(inlined(model.proto, kept=()), path=model.path)
    view, findings = View(model, target, compute_capability), []
    for rule in rules_for(target):
        if any(map(rule.holds_for, view.versions or (None,))):
            scope = rule.scope(view.versions)
            title = f"{rule.title} ({scope})" if scope else rule.title
            for node, problem in rule.find(view):
                findings.append(
                    Finding(
                        id=rule.id,
                        severity=rule.severity,
                        node="" if node is None else node.name,
                        message=problem,
                        title=title,
                        cure=rule.cure,
                        source=rule.source,
                    )
                )
    return tuple(sorted(findings, key=lambda finding: (_ORDER.index(finding.severity), finding.id)))


# ---- findings that no static rule makes: what ONNX's checker and a runtime refuse ----------------------

_refusal = partial(Finding, severity="refused", node="", message="")
CHECKER = _refusal(
    id="ONX001",
    title="ONNX's checker refuses the model: types or shapes contradict each other",
    cure="convert the node's inputs to one type, or export the model with a newer opset, where more types are allowed",
    source="onnx.checker.check_model with full_check; a note where the runtime of the target loaded the model",
)
LOAD = _refusal(
    id="RUN001",
    title="The runtime does not load the model",
    cure="change the node that the message names, or leave it in float",
    source="runtime: one load by the installed version",
)
RUN = _refusal(
    id="RUN002",
    title="The runtime loads the model, and cannot run it with its optimizations",
    cure="leave the nodes around the one that fails in float, or run the model without the runtime's optimizations",
    source="runtime: one run by the installed version, which succeeds without optimizations",
)
VALUES = _refusal(
    id="RUN003",
    title="The runtime computes other values with its optimizations than ONNX defines",
    cure="leave the node in float, change it, or run the model without the runtime's optimizations",
    source="runtime: one run by the installed version, below 20 dB of a run without optimizations",
)
BY_LOADING = (CHECKER, LOAD, RUN, VALUES)

_AFTER_NAME = re.compile(r"""name:\s*['"]?([^'"(),]+)""")
_ENCLOSED = re.compile(r"""['"(]([^'"()]+)['")]""")
# Where a text refers to a node or a tensor: 'x', constant (x), tensor x.
_POINTED = re.compile(
    r"'([^']+)'|\b(?:constant|layer|node|operation|tensor) \(?([^\s(),']+?)\.?(?=[\s(),']|$)"
)
_ADDED = re.compile(
    r"(\.\d+)?(_myl\d+(_\d+)?)?$"
)  # by compilers to names of tensors and layers: x.1, x_myl0_3


def named_node(model: Model, text: str) -> str:
    """The node of a model that a message names, itself or by a tensor that it makes or reads; empty if there is none.

    A name is in quotes, in brackets, after ``name:`` or after a word such as ``node``. A runtime names a node of a body
    without the path of the body.
    """
    known = {name.rpartition("/")[2]: name for name in model.by_name} | {name: name for name in model.by_name}
    words = [word.strip() for pattern in (_AFTER_NAME, _ENCLOSED) for word in pattern.findall(text)]
    pointed = [match[1] or match[2] for match in _POINTED.finditer(text)]
    pointed += [_ADDED.sub("", word) for word in pointed]
    nodes = [known[word] for word in (*words, *pointed) if word in known]
    makers = [model.producer[word].name for word in pointed if word in model.producer]
    readers = [model.consumers[word][0].node for word in pointed if model.consumers.get(word)]
    return max(nodes, key=len, default="") or next(iter(makers + readers), "")


def with_refusals(found: Iterable[Finding], refusals: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of static rules, and refusals of nodes that no earlier one refuses; the refused ones first."""
    every = list(found)
    for refusal in refusals:
        known = {finding.node for finding in every if finding.severity == "refused"}
        if not refusal.node or refusal.node not in known:
            every.append(refusal)
    return tuple(sorted(every, key=lambda finding: _ORDER.index(finding.severity)))


# ---- texts -------------------------------------------------------------------------------------------


def render_findings(
    target: LintTarget, findings: Sequence[Finding], *, most: int = 5, judged: str = ""
) -> str:
    """Findings by rule, most severe first, ``most`` nodes each; all of them if ``most`` is 0.

    ``judged`` states what judged the model beside the static rules.
    """
    counts = Counter(finding.severity for finding in findings)
    counted = [f"{counts[severity]} {severity}" for severity in ("refused", "slow") if counts[severity]]
    counted += [count_text(counts["note"], "note")] if counts["note"] else []
    lines = [f"{target}: {', '.join(counted) or 'nothing found'}{judged and f'; {judged}'}"]
    for (severity, name), group in groupby(findings, key=lambda finding: (finding.severity, finding.id)):
        found = list(group)
        lines += ["", f"{severity} {name}: {found[0].title}"]
        shown = found[:most] if most else found
        lines += [f"  {plain(f'{f.node}: {f.message}' if f.node else f.message)}" for f in shown]
        lines += [f"  and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
        lines.append(f"  cure: {found[0].cure}")
    return "\n".join(lines)


def findings_to_json(found: Mapping[LintTarget, Sequence[Finding]]) -> dict[str, Any]:
    """The findings of each target as data, never cut, and their numbers by severity."""
    return {
        "targets": {target: [asdict(finding) for finding in findings] for target, findings in found.items()},
        "counts": {
            target: Counter(finding.severity for finding in findings) for target, findings in found.items()
        },
    }
