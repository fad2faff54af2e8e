"""The check `partition` on known kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqspec.testing.records import check_named, faster_case, params_of
from qdqspec.types import BuildEvidence, LayerTime, Verdict
from qdqspec.types.requests import BuildRequest

OPS = {"a": "Conv", "b": "Conv", "c": "LayerNormalization", "d": "Relu"}


def kernel(node: str, place: str = "npu", *, integer: bool = True) -> LayerTime:
    return LayerTime(
        name=node, op_type=OPS[node], milliseconds=0.0, nodes=(node,), integer=integer, place=place
    )


MIXED = (kernel("a"), kernel("b", integer=False), kernel("c", "cpu", integer=False), kernel("d", "npu-2"))


def judge(build: BuildEvidence, **limits: object) -> Verdict:
    evidence = replace(faster_case().evidence, builds={BuildRequest().key: build})
    return check_named("partition").judge(params_of("partition", **limits), evidence)


MADE = BuildEvidence(backend="onnxruntime-qnn", layers=MIXED, ops=OPS)


@pytest.mark.parametrize(
    ("limits", "headline"),
    [
        ({"max_cpu_nodes": 1, "max_partitions": 2, "min_integer": {"Conv": 1}}, ""),
        ({"max_cpu_nodes": 0}, "1 node on the CPU, more than 0"),
        ({"max_partitions": 1}, "2 parts on the device, more than 1"),
        ({"min_integer": {"Conv": "all"}}, "1 of 2 Conv in integers, fewer than 2"),
        ({"forbid_cpu": ["LayerNormalization"]}, "LayerNormalization on the CPU: c"),
    ],
)
def test_each_limit_is_judged(limits: dict[str, object], headline: str) -> None:
    found = judge(MADE, **limits)
    assert found.outcome == ("fail" if headline else "pass")
    assert found.headline == (headline or "1 node on the CPU, 2 parts, 2 nodes in integers")
    assert found.numbers == {"cpu_nodes": 1, "partitions": 2, "integer_nodes": 2}


def test_a_refused_build_fails_with_its_reason() -> None:
    found = judge(replace(MADE, layers=(), refused="MEM_ALLOC 1002", cure="choose a chip"), max_cpu_nodes=0)
    assert (found.outcome, found.headline, found.advice) == (
        "fail",
        "refused: MEM_ALLOC 1002",
        "choose a chip",
    )


def test_a_runtime_that_tells_no_places_is_inconclusive() -> None:
    build = replace(MADE, layers=(replace(MIXED[0], place=""),))
    assert judge(build, max_cpu_nodes=0).outcome == "inconclusive"
