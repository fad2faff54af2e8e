"""The check `placement`: which nodes are quantized, and the number of Q/DQ pairs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import CheckParams, LimitResult, Whole, require_a_limit, unmeasured, verdict
from qdqspec.spec import short_form
from qdqspec.types import Evidence, EvidenceKind, Section, Verdict

Entry = Annotated[str, Field(min_length=1)]


def _require_number_or_all(value: object) -> object:
    if isinstance(value, str) and value != "all":
        raise ValueError(f"'{value}' is not a number of nodes, or 'all'")
    return value


Least: TypeAlias = Annotated[
    Annotated[Whole, Field(ge=1), Tag("number")] | Annotated[Literal["all"], Tag("all")],
    Discriminator(lambda value: "all" if value == "all" else "number"),
    BeforeValidator(
        _require_number_or_all, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["all"]
    ),
]
Counted: TypeAlias = Annotated[dict[Entry, Least], Field(min_length=1)]
Needed: TypeAlias = Annotated[Counted, short_form(str, lambda name: {name: 1}, Entry | Counted)]
Needs: TypeAlias = Annotated[
    tuple[Needed, ...],
    short_form(dict, lambda part: [part] * bool(part), Counted | tuple[Entry | Counted, ...]),
]


class PlacementCheck(CheckParams):
    """Required and forbidden quantized nodes, and the number of activation pairs."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"placement"})
    kind: Literal["placement"]
    require: Needs = Field(
        (),
        description="Op types, or globs over node names. For each, at least one node must read a quantized tensor, or "
        "the number given: {Conv: all, MatMul: 2}.",
    )
    forbid: tuple[Entry, ...] = Field(
        (), description="Op types, or globs over node names; none of these nodes may read a quantized tensor."
    )
    max_pairs: Whole | None = Field(None, ge=0, description="Largest number of activation Q/DQ pairs.")
    min_pairs: Whole | None = Field(None, ge=0, description="Smallest number of activation Q/DQ pairs.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "require", "forbid", "max_pairs", "min_pairs")
        if None not in (self.min_pairs, self.max_pairs) and (self.min_pairs or 0) > (self.max_pairs or 0):
            raise ValueError(f"min_pairs {self.min_pairs} is above max_pairs {self.max_pairs}")
        return self

    @property
    def required(self) -> list[tuple[str, int | str]]:
        """Each required entry, with the least number of its nodes, or ``all``."""
        return [(name, least) for part in self.require for name, least in part.items()]

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if each entry and both counts hold. Weight pairs count for entries, not for the counts."""
        if (self.require or self.forbid) and not evidence.node_ops:
            return unmeasured("the model's nodes are not known", "Run the case again, so that it is tuned.")
        pairs = sum(not pair.site.weight for pair in evidence.pairs)
        counted = count_text(pairs, "activation pair")
        rules = _judge_entries(self, evidence)
        if (most := self.max_pairs) is not None:
            row = (f"max_pairs {most}", counted)
            rules.append(LimitResult(f"{counted} > {most} allowed", pairs <= most, row))
        if (least := self.min_pairs) is not None:
            row = (f"min_pairs {least}", counted)
            rules.append(LimitResult(f"{counted} < {least} asked", pairs >= least, row))
        broken = [rule for rule in rules if not rule.holds]
        alone = ", unchanged" if evidence.status == "unchanged" else ""
        headline = f"{counted}{alone}: {count_text(len(rules), 'rule')} held"
        # an operator that the model lacks is one of a rule for several models; a name that no node has may be misspelt
        if names := [
            each for each in self.forbid if not each.isidentifier() and not _match_nodes(each, evidence)
        ]:
            headline += f"; no node has the forbidden name {plain(names[0], 30)}"
        if broken:
            more = f" (and {count_text(len(broken) - 1, 'more rule')})" if len(broken) > 1 else ""
            headline = f"{broken[0].headline}{more}"
        return verdict(
            "fail" if broken else "pass",
            headline,
            Section(
                title="Placement",
                headers=("rule", "found", "verdict"),
                rows=tuple((*rule.row, "pass" if rule.holds else "fail") for rule in rules),
            ),
            numbers={"pairs": pairs, "weights": len(evidence.pairs) - pairs},
            advice=_advice(self, evidence, broken),
        )


def _judge_entries(params: PlacementCheck, evidence: Evidence) -> list[LimitResult]:
    quantized = {end.node for pair in evidence.pairs for end in pair.site.consumers}
    rules = []
    for entry, least in params.required:
        nodes = _match_nodes(entry, evidence)
        hit = [node for node in nodes if node in quantized]
        asked = "" if least == 1 else f", {least} asked" if nodes else ""
        words = f"required {plain(entry, 30)}: {_found_text(hit, nodes)}{asked}"
        enough = len(hit) >= (max(len(nodes), 1) if least == "all" else int(least))
        name = f"require {plain(entry)}" + ("" if least == 1 else f": {least}")
        rules.append(LimitResult(words, enough, (name, _found_text(hit, nodes))))
    for entry in params.forbid:
        nodes = _match_nodes(entry, evidence)
        hit = [node for node in nodes if node in quantized]
        first = f", first {plain(hit[0], 40)}" if hit else ""
        words = f"forbidden {plain(entry, 24)}: {count_text(len(hit), 'node')} quantized{first}"
        rules.append(LimitResult(words, not hit, (f"forbid {plain(entry)}", _found_text(hit, nodes))))
    return rules


def _match_nodes(entry: str, evidence: Evidence) -> list[str]:
    """The nodes of the model whose op type is the entry, or whose name the glob matches."""
    return [
        node for node, op_type in evidence.node_ops.items() if entry == op_type or fnmatchcase(node, entry)
    ]


def _found_text(hit: list[str], nodes: list[str]) -> str:
    return f"{len(hit)} of {count_text(len(nodes), 'node')} quantized" if nodes else "no such node"


def _advice(params: PlacementCheck, evidence: Evidence, broken: list[LimitResult]) -> str:
    known = tuple({*evidence.node_ops.values(), *evidence.node_ops})
    for entry, _ in params.required:
        if not _match_nodes(entry, evidence):
            near = did_you_mean(entry, known)
            return f"'{plain(entry)}' is no op type and no node of this model{near}: correct the entry."
    if any(rule.row[0].startswith("require") for rule in broken) and evidence.status == "unchanged":
        return (
            "The model is unchanged, as no placement was selected: remove the entry, or allow more patterns."
        )
    if broken and broken[0].row[0].startswith("require"):
        return (
            "The search quantizes only what is proved faster: require fewer nodes, or allow only these "
            "(patterns.allow). `qdqspec inspect` states why a node cannot be quantized."
        )
    return "Set the same restriction in patterns (allow, deny, nodes.exclude), so that the search meets it."


check = PlacementCheck
