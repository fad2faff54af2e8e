"""Builds odd models from ONNX's text syntax, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx
from onnx_text import parsed

Outcome: TypeAlias = Literal["searched", "nothing", "refused"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

CONV: Shapes = {"w": (4, 3, 3, 3), "v": (4, 4, 3, 3)}
DENSE: Shapes = {"w": (8, 8), "v": (8, 8)}
ONE: Shapes = {"w": (8, 8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OddModel:
    """One model, created by ``make``, and the expected result of tuning it.

    ``searched``: placements are tried, and the status follows from the measurements. ``nothing``: it is
    unchanged, since nothing in it can be quantized. ``refused``: one error that contains ``error_text``.
    """

    name: str
    oddity: str
    make: Callable[[], onnx.ModelProto]
    outcome: Outcome = "searched"
    error_text: str = ""


def odd(
    name: str,
    oddity: str,
    graph: str,
    weights: Shapes | None = None,
    *,
    refused: str = "",
    nothing: bool = False,
    change: Callable[[onnx.ModelProto], object] | None = None,
    **how: int,
) -> OddModel:
    """An odd model from text, which ``change`` completes with what text cannot express; ``how`` are its versions."""

    def make() -> onnx.ModelProto:
        proto = parsed(graph, **how, **(weights or {})).proto
        if change is not None:
            change(proto)
        return proto

    outcome: Outcome = "refused" if refused else "nothing" if nothing else "searched"
    return OddModel(name=name, oddity=oddity, make=make, outcome=outcome, error_text=refused)


def rename_tensors(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """The model with tensors of its main graph renamed."""
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return proto


def name_nodes(proto: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """The model with these names for the nodes of its main graph, in order."""
    for node, name in zip(proto.graph.node, names, strict=True):
        node.name = name
    return proto
