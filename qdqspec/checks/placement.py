"""Do the Q/DQ pairs stand where they should? May import floor 0 and pydantic."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import require_a_limit
from qdqspec.checks._verdicts import left_alone, unmeasured, verdict
from qdqspec.checks.base import CheckParams
from qdqspec.registry import did_you_mean
from qdqspec.types import Evidence, EvidenceKind, Section, Verdict
from qdqspec.units import count_text, plain

Entry = Annotated[str, Field(min_length=1)]


class PlacementParams(CheckParams):
    """What must be quantized, what must not, and how many activation pairs there may be."""

    kind: Literal["placement"]
    require: tuple[Entry, ...] = Field(
        (), description="Op types, or globs over node names; each needs a node that reads a quantized tensor."
    )
    forbid: tuple[Entry, ...] = Field(
        (), description="Op types, or globs over node names; none of these nodes may read a quantized tensor."
    )
    max_pairs: int | None = Field(None, ge=0, description="Most activation Q/DQ pairs.")
    min_pairs: int | None = Field(None, ge=0, description="Fewest activation Q/DQ pairs.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "require", "forbid", "max_pairs", "min_pairs")
        if None not in (self.min_pairs, self.max_pairs) and (self.min_pairs or 0) > (self.max_pairs or 0):
            raise ValueError(f"min_pairs {self.min_pairs} is above max_pairs {self.max_pairs}")
        return self


class PlacementCheck:
    """Looks at the pairs as shipped, in names of the model without Q/DQ."""

    Params: ClassVar[type[CheckParams]] = PlacementParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"placement"})

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        """Pass where every entry and both counts hold. Weight pairs count for entries, not for the counts."""
        assert isinstance(params, PlacementParams)
        if (params.require or params.forbid) and not evidence.node_ops:
            return unmeasured("the model's nodes are not known", "Run the case again, so that it is tuned.")
        rules = [*_entry_rules(params, evidence), *_count_rules(params, evidence)]
        broken = [rule for rule in rules if not rule.holds]
        return verdict(
            "fail" if broken else "pass",
            broken[0].words if broken else _held(evidence, rules),
            Section(
                title="Placement",
                headers=("rule", "found", "verdict"),
                rows=tuple((r.name, r.found, "pass" if r.holds else "fail") for r in rules),
            ),
            numbers={"pairs": _pairs(evidence), "weights": len(evidence.pairs) - _pairs(evidence)},
            advice=_advice(params, evidence, broken),
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule of the spec as held against the placement; ``words`` is the headline where it is broken."""

    name: str
    found: str
    holds: bool
    words: str


def _entry_rules(params: PlacementParams, evidence: Evidence) -> list[_Rule]:
    quantized = {end.node for pair in evidence.pairs for end in pair.site.consumers}
    rules = []
    for entry in params.require:
        nodes = _matching(entry, evidence)
        hit = [node for node in nodes if node in quantized]
        words = f"required {plain(entry, 30)}: 0 of {count_text(len(nodes), 'node')} quantized"
        rules.append(_Rule(f"require {plain(entry)}", _found(hit, nodes), bool(hit), words))
    for entry in params.forbid:
        nodes = _matching(entry, evidence)
        hit = [node for node in nodes if node in quantized]
        first = f", first {plain(hit[0], 20)}" if hit else ""
        words = f"forbidden {plain(entry, 24)}: {count_text(len(hit), 'node')} quantized{first}"
        rules.append(_Rule(f"forbid {plain(entry)}", _found(hit, nodes), not hit, words))
    return rules


def _count_rules(params: PlacementParams, evidence: Evidence) -> list[_Rule]:
    pairs = _pairs(evidence)
    found = count_text(pairs, "activation pair")
    rules = []
    if params.max_pairs is not None:
        words = f"{found} > {params.max_pairs} allowed"
        rules.append(_Rule(f"max_pairs {params.max_pairs}", found, pairs <= params.max_pairs, words))
    if params.min_pairs is not None:
        words = f"{found} < {params.min_pairs} asked"
        rules.append(_Rule(f"min_pairs {params.min_pairs}", found, pairs >= params.min_pairs, words))
    return rules


def _matching(entry: str, evidence: Evidence) -> list[str]:
    """The nodes of the model whose op type is the entry, or whose name the glob matches."""
    return [
        node for node, op_type in evidence.node_ops.items() if entry == op_type or fnmatchcase(node, entry)
    ]


def _found(hit: list[str], nodes: list[str]) -> str:
    return f"{len(hit)} of {count_text(len(nodes), 'node')} quantized" if nodes else "no such node"


def _pairs(evidence: Evidence) -> int:
    return sum(not pair.site.weight for pair in evidence.pairs)


def _held(evidence: Evidence, rules: list[_Rule]) -> str:
    alone = ", left alone" if left_alone(evidence) else ""
    return f"{count_text(_pairs(evidence), 'activation pair')}{alone}: {count_text(len(rules), 'rule')} held"


def _advice(params: PlacementParams, evidence: Evidence, broken: list[_Rule]) -> str:
    known = tuple({*evidence.node_ops.values(), *evidence.node_ops})
    for entry in params.require:
        if not _matching(entry, evidence):
            near = did_you_mean(entry, known)
            return f"'{plain(entry)}' is no op type and no node of this model{near}: correct the entry."
    if any(rule.name.startswith("require") for rule in broken) and left_alone(evidence):
        return (
            "The search left the model alone, because nothing proved faster: drop the entry, or allow more."
        )
    return "Say the same in patterns (allow, deny, nodes.exclude), so that the search looks there only."


check = PlacementCheck()
