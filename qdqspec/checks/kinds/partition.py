"""The check `partition`: which nodes of the tuned model leave the backend's device, and which run there in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import CheckParams, Whole, require_a_limit
from qdqspec.checks.verdicts import unmeasured, verdict
from qdqspec.types import Evidence, EvidenceKind, Section, Verdict
from qdqspec.types.requests import BuildRequest, Request

CPU = "cpu"
_LISTED = 20  # most nodes on the CPU that are named
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_ADVICE = "Change the pairs around the nodes that are listed, or leave these nodes in float; `qdqspec lint` says why."


class PartitionParams(CheckParams):
    """Limits on nodes that leave the device, and on those that run there in float."""

    kind: Literal["partition"]
    max_cpu_nodes: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="Most nodes on the CPU, without pairs of inputs, outputs and constants."
    )
    max_partitions: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="Most parts into which nodes on the CPU divide the graph of the device."
    )
    min_integer: Mapping[str, Whole | Literal["all"]] = Field(
        {}, description="By operator: how many of its nodes run in integers on the device, or `all`."
    )
    forbid_cpu: tuple[str, ...] = Field((), description="Operators that may not run on the CPU.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not self.min_integer:
            require_a_limit(self, "max_cpu_nodes", "max_partitions", "forbid_cpu")
        return self


class PartitionCheck:
    """Judges the kernels of one build by their places and types."""

    Params: ClassVar[type[CheckParams]] = PartitionParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"builds"})

    def requests(self, params: PartitionParams) -> tuple[Request, ...]:  # noqa: ARG002 - of every check
        """One build by the case's backend."""
        return (BuildRequest(),)

    def judge(self, params: PartitionParams, evidence: Evidence) -> Verdict:
        """Pass if all limits hold; inconclusive where the runtime does not tell where nodes run."""
        build = evidence.builds.get(BuildRequest().key)
        if build is None or not (build.refused or any(layer.place for layer in build.layers)):
            why = f"backend {evidence.backend} does not tell where nodes run"
            cure = plain(build.missing) if build is not None else ""
            return unmeasured(why, cure or "Use a backend whose runtime has several places.")
        away = {layer.name: layer.op_type for layer in build.layers if layer.place == CPU}
        parts = len({layer.place for layer in build.layers} - {"", CPU})
        on_device = [layer for layer in build.layers if layer.integer and layer.place != CPU]
        nodes = {node for layer in on_device for node in layer.nodes}
        integers = Counter(op_type for node, op_type in build.ops.items() if node in nodes)
        counts = f"{count_text(len(away), 'node')} on the CPU, {count_text(parts, 'part')}"
        broken = tuple(_broken(params, away, parts, integers, Counter(build.ops.values())))
        if build.refused:
            broken = (f"refused: {plain(build.refused, 300)}",)
        return verdict(
            "fail" if broken else "pass",
            next(iter(broken), f"{counts}, {integers.total()} nodes in integers"),
            *_sections(build.ops, away, integers),
            numbers={"cpu_nodes": len(away), "partitions": parts, "integer_nodes": integers.total()},
            advice=build.cure or _ADVICE,
        )


def _broken(
    params: PartitionParams, away: Mapping[str, str], parts: int, integers: Counter[str], ops: Counter[str]
) -> Iterator[str]:
    """A message for each limit that does not hold."""
    for name, op_type in away.items():
        if op_type in params.forbid_cpu:
            yield f"{op_type} on the CPU: {plain(name, 60)}"
    for op_type, least in params.min_integer.items():
        if integers[op_type] < (wanted := ops[op_type] if least == "all" else least):
            yield f"{integers[op_type]} of {ops[op_type]} {op_type} in integers, fewer than {wanted}"
    if params.max_cpu_nodes is not None and len(away) > params.max_cpu_nodes:
        yield f"{count_text(len(away), 'node')} on the CPU, more than {params.max_cpu_nodes}"
    if params.max_partitions is not None and parts > params.max_partitions:
        yield f"{count_text(parts, 'part')} on the device, more than {params.max_partitions}"


def _sections(ops: Mapping[str, str], away: Mapping[str, str], integers: Counter[str]) -> Iterator[Section]:
    """Each operator by place, and the nodes on the CPU by name."""
    on_cpu = Counter(away.values())
    every = Counter(op_type for op_type in sorted(ops.values()) if op_type not in _PAIRS)
    rows = [(op, integers[op], max(0, n - integers[op] - on_cpu[op]), on_cpu[op]) for op, n in every.items()]
    headers = ("operator", "integers", "float or fused", "CPU")
    yield Section(
        title="Nodes by place and type", headers=headers, rows=tuple(tuple(map(str, row)) for row in rows)
    )
    if away:
        listed = [f"{op_type} {plain(name, 80)}" for name, op_type in away.items()][:_LISTED]
        yield Section(title="Nodes on the CPU", text="\n".join(listed))


check = PartitionCheck()
