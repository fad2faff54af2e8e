"""What rules look at besides the main graph: bodies and local functions. May import floors 0 and 1, onnx.

A body sees the tensors of the graphs around it. Here it gets those that are constants as initializers, and the others
as inputs of the type that is known of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import names_read_inside


def bodies_of(
    model: Model, around: Mapping[str, onnx.TensorProto] | None = None
) -> Iterator[tuple[str, Model]]:
    """Every body below a model's graph with its place, ``loop/body`` or ``choice/then_branch/loop/body``."""
    seen = {**(around or {}), **model.constants}
    for node in model.nodes:
        for name, graph in _graphs(node):
            inner = _as_model(model, graph, seen)
            yield f"{node.name}/{name}", inner
            for place, below in bodies_of(inner, seen):
                yield f"{node.name}/{name}/{place}", below


def without_functions(model: Model) -> Model:
    """The model with its local functions in the place of their calls; itself where it has none."""
    if not model.proto.functions:
        return model
    import onnx.inliner

    return Model(onnx.inliner.inline_local_functions(model.proto), path=model.path)


def _graphs(node: Node) -> Iterator[tuple[str, onnx.GraphProto]]:
    for attribute in node.proto.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g


def _as_model(outer: Model, graph: onnx.GraphProto, seen: Mapping[str, onnx.TensorProto]) -> Model:
    proto = onnx.ModelProto(ir_version=outer.proto.ir_version)
    proto.opset_import.extend(outer.proto.opset_import)
    proto.graph.CopyFrom(graph)
    own = {value.name for value in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in node.output}
    read = {name for node in graph.node for name in (*node.input, *names_read_inside(node)) if name}
    for name in sorted(read - own):
        if name in seen:
            tensor = proto.graph.initializer.add()
            tensor.CopyFrom(seen[name])
            tensor.name = name
        elif name in outer.types:
            known = outer.types[name]
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, known.elem_type, known.shape))
    return Model(proto, path=outer.path)
