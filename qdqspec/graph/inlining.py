"""Inlines local functions, and the branches that an If on a constant takes; fixes inputs to values."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec.graph.flat import bodies_of, defined_in, free_name, unique_node_names
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import (
    all_graphs,
    constants_of,
    copy_model,
    free_initializers,
    graphs_inside,
    is_external,
    refill,
)

# Domains whose operators a runtime has kernels for: their functions are definitions for other runtimes.
_RUNTIMES = ("ai.onnx.", "com.microsoft.", "trt.")
_TOKEN = re.compile(r"^<(\d+)>")
_Key: TypeAlias = tuple[str, str, str]  # domain, name and overload of a function


def inlined(proto: onnx.ModelProto, *, kept: tuple[str, ...] = _RUNTIMES) -> onnx.ModelProto:
    """A copy with local functions inlined; the model itself if it has none.

    Functions whose domain begins with one of ``kept`` stay calls, by default those in the domain of a runtime, as do
    those of operator sets in another version than the model's. A node of a function is named ``<call>/<node>``.
    """
    imports = {(o.domain or "ai.onnx", o.version) for o in proto.opset_import}
    called = [
        function
        for function in proto.functions
        if function.domain
        and not f"{function.domain}.".startswith(kept)
        and all((o.domain or "ai.onnx", o.version) in imports for o in function.opset_import)
    ]
    if not called:
        return proto
    functions = {(f.domain, f.name, f.overload): f for f in called}
    copies, names = list[onnx.FunctionProto](), list[str]()

    def replace_calls(
        holder: onnx.GraphProto | onnx.FunctionProto, path: str | None, within: tuple[_Key, ...]
    ) -> None:
        """Give each call, in bodies too, a copy of the function, with nodes named by a number: ``<17>``.

        ``path`` is that of the call around them, which gives the nodes numbers; ``None`` for the nodes of the model.
        """
        for node, name in zip(holder.node, unique_node_names(holder.node), strict=True):
            full = name if path is None else f"{path}{name}"
            key = (node.domain, node.op_type, node.overload)
            if key in functions and key not in within:
                clone = copy.deepcopy(functions[key])
                node.op_type = clone.name = f"{clone.name}#{len(copies)}"
                node.overload = clone.overload = ""
                copies.append(clone)
                replace_calls(clone, f"{full}/", (*within, key))
            if path is not None:
                node.name = f"<{len(names)}>"
                names.append(full)
            for body in graphs_inside(node):
                replace_calls(body, None if path is None else "", within)

    light = copy_model(proto, but={"initializer"})
    refill(light.functions, ())
    replace_calls(light.graph, None, ())
    light.functions.extend(copies)
    copied = copy_model(inliner.inline_local_functions(light))
    for graph in all_graphs(copied.graph):
        for node in graph.node:
            if found := _TOKEN.match(node.name):  # the inliner appends to names
                node.name = names[int(found[1])]
    copied.functions.extend(f for f in proto.functions if f not in called)
    refill(copied.graph.initializer, proto.graph.initializer)
    return copied


# ---- fixed inputs, and branches ------------------------------------------------------------------


def fix_inputs(model: Model, values: Mapping[str, Array]) -> onnx.ModelProto:
    """The model without these inputs, specialized to their values; Q and DQ are never folded.

    Tensors of a taken branch keep their names if the surrounding graph has no such names. If the value
    decides nothing, the input is a constant and the rest of the model is unchanged.
    """
    proto = copy_model(model.proto)
    free_initializers(proto)
    refill(proto.graph.input, [i for i in proto.graph.input if i.name not in values])
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    while True:
        proto = copy_model(fold_constants(Model(proto, path=model.path)).model.proto)
        if not _inline_constant_ifs(proto.graph, {}):
            return proto


def _inline_constant_ifs(graph: onnx.GraphProto, around: Mapping[str, TensorProto]) -> bool:
    """Replace each If of a graph and its bodies whose condition is constant; return whether there was one."""
    found = False
    while True:
        fed = {value.name for value in graph.input}  # initializers that a caller's feed replaces
        own = {name: t for name, t in constants_of(graph).items() if name not in fed}
        constants = {**around, **own}
        taken = _find_constant_if(graph, constants)
        if taken is None:
            break
        number, attribute = taken
        owner = graph.node[number]
        path = f"{list(unique_node_names(graph.node))[number]}/{attribute}"
        branch = copy.deepcopy(next(body for key, body in bodies_of(owner) if key == attribute))
        nodes = _inline_branch(graph, owner, branch, path)
        refill(graph.node, [*graph.node[:number], *nodes, *graph.node[number + 1 :]])
        found = True
    for node in graph.node:
        for _, body in bodies_of(node):
            found |= _inline_constant_ifs(body, constants)
    return found


def _find_constant_if(graph: onnx.GraphProto, constants: Mapping[str, TensorProto]) -> tuple[int, str] | None:
    """The index of the first If on a constant, and the branch that it takes."""
    for number, node in enumerate(graph.node):
        is_if = node.op_type == "If" and is_default(node)
        tensor = constants.get(node.input[0]) if is_if else None
        if tensor is not None and not is_external(tensor):
            value = numpy_helper.to_array(tensor)
            if value.size == 1:
                return number, "then_branch" if value.reshape(-1)[0] else "else_branch"
    return None


def _inline_branch(
    graph: onnx.GraphProto, owner: onnx.NodeProto, branch: onnx.GraphProto, path: str
) -> list[onnx.NodeProto]:
    """The nodes of a branch as nodes of the graph; its weights become the graph's."""
    made = {name for node in branch.node for name in node.output if name}
    now: dict[str, str] = {}  # names in the graph by names in the branch
    alike: list[tuple[str, str]] = []  # outputs of the If that are copies of another tensor
    for name, source in zip(owner.output, [output.name for output in branch.output], strict=False):
        if name and source in made and source not in now:
            now[source] = name
        elif name:
            alike.append((name, source))
    taken = {*_list_names(graph, but=owner), *owner.output}
    for name in defined_in(branch):
        if name not in now:
            now[name] = free_name(f"{path}/{name}" if name in taken else name, taken)
    node_names = {node.name for node in graph.node if node is not owner}
    for part in all_graphs(branch):
        for node in part.node:
            refill(node.input, [now.get(name, name) for name in node.input])
            refill(node.output, [now.get(name, name) for name in node.output])
        sparse = (tensor.values for tensor in part.sparse_initializer)
        for named in (*part.input, *part.initializer, *part.output, *part.value_info, *sparse):
            named.name = now.get(named.name, named.name)
    for node in branch.node:
        if node.name and node.name in node_names:
            node.name = f"{path}/{node.name}"
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    graph.value_info.extend(v for v in branch.value_info if v.name not in owner.output)
    copies = [
        helper.make_node("Identity", [now.get(source, source)], [name], name=f"{path}/{name}")
        for name, source in alike
    ]
    return [*branch.node, *copies]


def _list_names(graph: onnx.GraphProto, *, but: onnx.NodeProto) -> Iterator[str]:
    """All names that a graph and the bodies in it define or read, except inside one node."""
    yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    for node in graph.node:
        yield from (*node.input, *node.output)
        for body in graphs_inside(node) if node is not but else ():
            yield from _list_names(body, but=but)
