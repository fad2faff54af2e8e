"""Regions by the module names that exporters write into a model.

Names are paths (``/layer1/0/conv1/Conv``); where they are flat, PyTorch's exporter writes the scopes to node
metadata under ``pkg.torch.onnx.name_scopes``, as a Python list literal.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from qdqspec.graph.model import Node
from qdqspec.graph.protos import metadata
from qdqspec.regions.blocks import Block, Composite, Leaf, dissolve, join_tiny, pack_run
from qdqspec.regions.flow import Flow

DEEPEST = 50  # levels; names are user input and recursion depth follows them
SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass(slots=True)
class _Scope:
    """One module: its own nodes and its submodules, in order of first appearance."""

    size: int = 0
    entries: list[int | str] = field(default_factory=list)
    inner: dict[str, _Scope] = field(default_factory=dict)


def blocks_of_names(flow: Flow, max_nodes: int) -> list[Block]:
    """The blocks below the root; empty if fewer than half of the nodes have a module name.

    A module of at most ``max_nodes`` nodes is a leaf, a larger one a composite. Nodes without a module name
    belong to the root.
    """
    searched = [i for i in flow.order if i not in flow.carried] or list(flow.order)
    paths = {index: scope_of(flow.model.nodes[index]) for index in searched}
    if 2 * sum(map(bool, paths.values())) < len(paths):
        return []
    root = _Scope()
    for index, path in paths.items():
        _add(root, path, index)
    whole = Composite(_blocks(root, max_nodes, flow))
    dissolve(whole, max_nodes, flow.linked)
    return whole.children


def scope_of(node: Node) -> tuple[str, ...]:
    """The modules that contain a node, outermost first; empty if unknown."""
    if (listed := metadata(node.proto, SCOPES_KEY)) is not None:
        return _scopes_from_metadata(listed)
    return tuple(part for part in node.name.split("/")[:-1] if part)[:DEEPEST]


def _scopes_from_metadata(text: str) -> tuple[str, ...]:
    """The modules in a list of dotted names ending with the operator: ['', 'layer1', 'layer1.0', 'conv2d']."""
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    path: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):
        path.append(name.removeprefix(f"{before}."))
        before = name
    return tuple(path[:DEEPEST])


def _add(scope: _Scope, path: tuple[str, ...], index: int) -> None:
    scope.size += 1
    for part in path:
        if part not in scope.inner:
            scope.inner[part] = _Scope()
            scope.entries.append(part)
        scope = scope.inner[part]
        scope.size += 1
    scope.entries.append(index)


def _blocks(scope: _Scope, limit: int, flow: Flow) -> list[Block]:
    blocks: list[Block] = []
    for entry in scope.entries:
        if isinstance(entry, int):
            blocks.append(Leaf([entry], light=flow.is_light([entry])))
        else:
            blocks.append(_block(scope.inner[entry], limit, flow))
    return join_tiny(pack_run(blocks, limit), limit, flow.linked)


def _block(scope: _Scope, limit: int, flow: Flow) -> Block:
    if scope.size <= limit:
        nodes = _nodes(scope)
        return Leaf(nodes, closed=True, light=flow.is_light(nodes))
    inside = _blocks(scope, limit, flow)
    return inside[0] if len(inside) == 1 else Composite(inside)


def _nodes(scope: _Scope) -> list[int]:
    found: list[int] = []
    for entry in scope.entries:
        found += [entry] if isinstance(entry, int) else _nodes(scope.inner[entry])
    return found
