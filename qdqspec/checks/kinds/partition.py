"""The check `partition`: which nodes of the tuned model leave the backend's device, and which run there in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import CheckParams, Whole, require_a_limit
from qdqspec.checks.verdicts import unmeasured, verdict
from qdqspec.types import BuildEvidence, Evidence, EvidenceKind, Section, Verdict
from qdqspec.types.requests import BuildRequest, Request

CPU = "cpu"
_LISTED = 20
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
            why = build.missing if build is not None else ""
            return unmeasured(
                f"backend {evidence.backend} does not tell where nodes run",
                plain(why) or "Use a backend whose runtime has several places.",
            )
        broken = [f"refused: {plain(build.refused, 300)}"] if build.refused else list(_broken(params, build))
        away, parts, integers = len(_on_cpu(build)), _parts(build), sum(_integers(build).values())
        kept = f"{count_text(away, 'node')} on the CPU, {count_text(parts, 'part')}, {integers} nodes in integers"
        return verdict(
            "fail" if broken else "pass",
            broken[0] if broken else kept,
            *_sections(build),
            numbers={"cpu_nodes": away, "partitions": parts, "integer_nodes": integers},
            advice=(build.cure or _ADVICE) if broken else "",
        )


def _broken(params: PartitionParams, build: BuildEvidence) -> Iterator[str]:
    """A message for each limit that does not hold."""
    on_cpu, integers, every = _on_cpu(build), _integers(build), Counter(build.ops.values())
    for op_type in params.forbid_cpu:
        if found := [name for name, op in on_cpu.items() if op == op_type]:
            yield f"{op_type} on the CPU: {plain(found[0], 60)}"
    for op_type, least in params.min_integer.items():
        wanted = every[op_type] if least == "all" else least
        if integers[op_type] < wanted:
            yield f"{integers[op_type]} of {every[op_type]} {op_type} in integers, fewer than {wanted}"
    if params.max_cpu_nodes is not None and len(on_cpu) > params.max_cpu_nodes:
        yield f"{count_text(len(on_cpu), 'node')} on the CPU, more than {params.max_cpu_nodes}"
    if params.max_partitions is not None and _parts(build) > params.max_partitions:
        yield f"{count_text(_parts(build), 'part')} on the device, more than {params.max_partitions}"


def _on_cpu(build: BuildEvidence) -> dict[str, str]:
    """Names and operators of the nodes on the CPU."""
    return {layer.name: layer.op_type for layer in build.layers if layer.place == CPU}


def _integers(build: BuildEvidence) -> Counter[str]:
    """The nodes in integers on the device, by operator."""
    nodes = {node for layer in build.layers if layer.integer and layer.place != CPU for node in layer.nodes}
    return Counter(build.ops[node] for node in nodes if node in build.ops)


def _parts(build: BuildEvidence) -> int:
    """The graphs of the device."""
    return len({layer.place for layer in build.layers if layer.place not in ("", CPU)})


def _sections(build: BuildEvidence) -> tuple[Section, ...]:
    """Each operator by place, and the nodes on the CPU by name."""
    integers, on_cpu = _integers(build), _on_cpu(build)
    every, away = Counter(build.ops.values()), Counter(on_cpu.values())
    rows = tuple(
        (
            op_type,
            str(integers[op_type]),
            str(max(0, count - integers[op_type] - away[op_type])),
            str(away[op_type]),
        )
        for op_type, count in sorted(every.items())
        if op_type not in ("QuantizeLinear", "DequantizeLinear")
    )
    listed = "\n".join(f"{op_type} {plain(name, 80)}" for name, op_type in list(on_cpu.items())[:_LISTED])
    named = (Section(title="Nodes on the CPU", text=listed),) if listed else ()
    title = "Nodes by place and type"
    return (
        Section(title=title, headers=("operator", "integers", "float or fused", "CPU"), rows=rows),
        *named,
    )


check = PartitionCheck()
