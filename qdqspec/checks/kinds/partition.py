"""The check `partition`: which nodes of the tuned model leave the backend's device, and which run there in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import CheckParams, Whole, require_a_limit, unmeasured, verdict
from qdqspec.types import Evidence, EvidenceKind, Section, Verdict
from qdqspec.types.requests import BuildRequest, Request

_LISTED = 20  # most nodes on the CPU that are named
_ADVICE = "Change the pairs around the nodes that are listed, or leave these nodes in float; `qdqspec lint` says why."


class PartitionCheck(CheckParams):
    """Limits on nodes that leave the device, and on those that run there in float."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"builds"})
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
        require_a_limit(self, "max_cpu_nodes", "max_partitions", "min_integer", "forbid_cpu")
        return self

    def requests(self) -> tuple[Request, ...]:
        """One build by the case's backend."""
        return (BuildRequest(),)

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if all limits hold; inconclusive where the runtime does not tell where nodes run."""
        build = evidence.builds.get(BuildRequest().key)
        if build is None or not (build.refused or any(layer.place for layer in build.layers)):
            cure = plain(build.missing) if build is not None else ""
            what = f"backend {evidence.backend} does not tell where nodes run"
            return unmeasured(what, cure or "Use a backend whose runtime has several places.")
        away = {layer.name: layer.op_type for layer in build.layers if layer.place == "cpu"}
        parts = len({layer.place for layer in build.layers} - {"", "cpu"})
        nodes = {node for each in build.layers if each.integer and each.place != "cpu" for node in each.nodes}
        integers = Counter(op_type for node, op_type in build.ops.items() if node in nodes)
        on_cpu, on_device = count_text(len(away), "node"), count_text(parts, "part")
        broken = [f"refused: {plain(build.refused, 300)}"] if build.refused else []
        broken += [
            f"{op} on the CPU: {plain(name, 60)}" for name, op in away.items() if op in self.forbid_cpu
        ]
        ops = Counter(build.ops.values())
        for op, least in self.min_integer.items():
            if integers[op] < (wanted := ops[op] if least == "all" else least):
                broken.append(f"{integers[op]} of {ops[op]} {op} in integers, fewer than {wanted}")
        if self.max_cpu_nodes is not None and len(away) > self.max_cpu_nodes:
            broken.append(f"{on_cpu} on the CPU, more than {self.max_cpu_nodes}")
        if self.max_partitions is not None and parts > self.max_partitions:
            broken.append(f"{on_device} on the device, more than {self.max_partitions}")
        cpu, rows = Counter(away.values()), []
        for op in sorted(ops.keys() - {"QuantizeLinear", "DequantizeLinear"}):
            counts = (integers[op], max(0, ops[op] - integers[op] - cpu[op]), cpu[op])
            rows.append((op, *map(str, counts)))
        headers = ("operator", "integers", "float or fused", "CPU")
        listed = [f"{op} {plain(name, 80)}" for name, op in away.items()][:_LISTED]
        kept = f"{on_cpu} on the CPU, {on_device}, {integers.total()} nodes in integers"
        return verdict(
            "fail" if broken else "pass",
            broken[0] if broken else kept,
            Section(title="Nodes by place and type", headers=headers, rows=tuple(rows)),
            Section(title="Nodes on the CPU", text="\n".join(listed)),
            numbers={"cpu_nodes": len(away), "partitions": parts, "integer_nodes": integers.total()},
            advice=build.cure or _ADVICE,
        )


check = PartitionCheck
