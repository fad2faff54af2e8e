"""Inlines local functions of a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import TypeAlias

import onnx
from onnx import inliner

from qdqspec.graph.protos import all_graphs, copy_model, graphs_inside, refill
from qdqspec.graph.scopes import unique_node_names

# Domains whose operators a runtime has kernels for: their functions are definitions for other runtimes.
_RUNTIMES = ("ai.onnx", "com.microsoft")
_TOKEN = re.compile(r"^<(\d+)>")
_Key: TypeAlias = tuple[str, str, str]  # domain, name and overload of a function


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with local functions inlined; the model itself if it has none.

    Functions in the domain of a runtime (``trt``, ``com.microsoft``) stay calls, as do those of operator sets in
    another version than the model's. A node of a function is named ``<call>/<node>``.
    """
    imports = {(o.domain or "ai.onnx", o.version) for o in proto.opset_import}
    called = [f for f in proto.functions if _is_inlined(f, imports)]
    if not called:
        return proto
    light = copy_model(proto, but={"initializer"})
    refill(light.functions, ())
    naming = _Naming(light, called)
    copied = copy_model(inliner.inline_local_functions(light))
    naming.restore(copied)
    copied.functions.extend(f for f in proto.functions if f not in called)
    refill(copied.graph.initializer, proto.graph.initializer)
    return copied


def _is_inlined(function: onnx.FunctionProto, imports: set[tuple[str, int]]) -> bool:
    domain = function.domain
    if not domain or domain.split(".")[0] == "trt" or domain.startswith(_RUNTIMES):
        return False
    return all((o.domain or "ai.onnx", o.version) in imports for o in function.opset_import)


class _Naming:
    """Gives each call its own copy of the function, with nodes named by a number: ``<17>``.

    The inliner appends to names; `restore` replaces the leading number by the full name.
    """

    def __init__(self, proto: onnx.ModelProto, functions: Iterable[onnx.FunctionProto]) -> None:
        self._names: list[str] = []
        self._functions = {(f.domain, f.name, f.overload): f for f in functions}
        self._copies: list[onnx.FunctionProto] = []
        for graph in all_graphs(proto.graph):
            for node, name in zip(graph.node, unique_node_names(graph.node), strict=True):
                self._call(node, name, ())
        proto.functions.extend(self._copies)

    def restore(self, proto: onnx.ModelProto) -> None:
        """Restore the names of the nodes of a model."""
        for graph in all_graphs(proto.graph):
            for node in graph.node:
                if found := _TOKEN.match(node.name):
                    node.name = self._names[int(found[1])]

    def _call(self, node: onnx.NodeProto, path: str, within: tuple[_Key, ...]) -> None:
        """If a node is a call, make it call a copy of the function."""
        called = (node.domain, node.op_type, node.overload)
        if called not in self._functions or called in within:
            return
        clone = copy.deepcopy(self._functions[called])
        node.op_type = clone.name = f"{clone.name}#{len(self._copies)}"
        node.overload = clone.overload = ""
        self._copies.append(clone)
        for inner, name in zip(clone.node, unique_node_names(clone.node), strict=True):
            self._call(inner, f"{path}/{name}", (*within, called))
            self._name(inner, f"{path}/{name}")
            for body in graphs_inside(inner):
                for graph in all_graphs(body):
                    for below, own in zip(graph.node, unique_node_names(graph.node), strict=True):
                        self._call(below, own, (*within, called))
                        self._name(below, own)

    def _name(self, node: onnx.NodeProto, name: str) -> None:
        node.name = f"<{len(self._names)}>"
        self._names.append(name)
