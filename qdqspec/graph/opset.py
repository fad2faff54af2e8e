"""Raising the version of the default operator set, and nothing else.

onnx's version converter keeps the meaning of a model but not its bytes: it drops node metadata, encodes
initializers anew and writes inferred shapes into the graph. All that is put back here, so that a raised
model differs from the original only where an operator's definition changed. Big weights do not pass
through the converter at all, which makes it cheap and indifferent to models above 2 GB.
"""

from __future__ import annotations

from math import prod

import onnx
from onnx import version_converter

from qdqspec.errors import ModelError
from qdqspec.graph.protos import copy_model, is_external, refill
from qdqspec.graph.scopes import bodies_of

_SMALL = 1024  # elements: constants an operator's adapter may want to look into (axes, shapes, bounds)
IR_WITH_FREE_INITIALIZERS = 4  # before it, every initializer had to be a graph input as well


def opset_of(proto: onnx.ModelProto) -> int:
    """The version of the default operator set; 1 where none is imported, as ONNX rules."""
    return max((int(o.version) for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)


def raise_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The same model at default opset ``version`` or above, as a new proto.

    The IR version rises to 4 where it was lower, so that new initializers need not be graph inputs.
    Raises `ModelError` saying from, to and why where the converter cannot do it.
    """
    if opset_of(proto) >= version:
        raised = copy_model(proto)
    else:
        raised = _converted(proto, version)
        _put_back(proto, raised)
    raised.ir_version = max(raised.ir_version, IR_WITH_FREE_INITIALIZERS)
    return raised


def _converted(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    try:
        return version_converter.convert_version(_with_weights_as_inputs(proto), version)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises RuntimeError and its own classes
        # "/project/onnx/version_converter/convert.cc:101: f: Assertion `x` failed: why"
        why = str(error).strip().partition("failed: ")[2] or str(error).strip() or type(error).__name__
        raise ModelError(
            f"the opset cannot be raised from {opset_of(proto)} to {version}: {why.splitlines()[0][:300]}",
            cure=f"export the model with opset {version}, or choose a number format that needs none",
        ) from None


def _with_weights_as_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    light = copy_model(proto, but={"initializer"})
    light.ir_version = max(light.ir_version, IR_WITH_FREE_INITIALIZERS)  # or one that is no input is not seen
    declared = {i.name for i in proto.graph.input}
    for tensor in proto.graph.initializer:
        if prod(tensor.dims) <= _SMALL and not is_external(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return light


def _put_back(original: onnx.ModelProto, raised: onnx.ModelProto) -> None:
    """Undo what the converter changed beside the operators."""
    refill(raised.metadata_props, original.metadata_props)
    refill(raised.functions, original.functions)
    _put_back_graph(original.graph, raised.graph)


def _put_back_graph(original: onnx.GraphProto, raised: onnx.GraphProto) -> None:
    known = {t.name for t in original.initializer}
    added = [t for t in raised.initializer if t.name not in known]
    refill(raised.initializer, [*original.initializer, *added])
    refill(raised.input, original.input)
    refill(raised.output, original.output)
    refill(raised.value_info, original.value_info)
    refill(raised.metadata_props, original.metadata_props)
    before = {n.output[0]: n for n in original.node if n.output}
    for node in raised.node:
        source = before.get(node.output[0]) if node.output else None
        if source is not None and source.op_type == node.op_type:
            refill(node.metadata_props, source.metadata_props)
            bodies = dict(bodies_of(source))
            for name, graph in bodies_of(node):
                _put_back_graph(bodies[name], graph)
