"""Raises the version of the default operator set, without other changes.

onnx's version converter keeps the meaning of a model but not its bytes: it drops node metadata, re-encodes
initializers and writes inferred shapes into the graph. These changes are undone here, so that the converted
model differs from the original only where an operator's definition changed. Big weights are not passed to the
converter, which makes it fast and independent of the 2 GB limit.
"""

from __future__ import annotations

import onnx
from onnx import version_converter

from qdqspec.errors import ModelError
from qdqspec.graph.flat import bodies_of
from qdqspec.graph.protos import DEFAULT_DOMAINS, copy_model, refill, without_weights

IR_WITH_FREE_INITIALIZERS = 4  # before, each initializer had to be a graph input as well


def opset_of(proto: onnx.ModelProto) -> int:
    """The version of the default operator set; 1 if none is imported, as in ONNX."""
    return max((int(o.version) for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), default=1)


def raise_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The same model at default opset ``version`` or above, as a new proto.

    The IR version is at least 4, as by `free_initializers`. Raises `ModelError` with both versions and the reason if
    the converter fails.
    """
    if opset_of(proto) >= version:
        raised = copy_model(proto)
    else:
        raised = _converted(proto, version)
        raised.ir_version = proto.ir_version
        refill(raised.metadata_props, proto.metadata_props)
        refill(raised.functions, proto.functions)
        _put_back_graph(proto.graph, raised.graph)
    free_initializers(raised)
    return raised


def free_initializers(proto: onnx.ModelProto) -> None:
    """Raise the IR version to at least 4, where initializers need not be graph inputs. Changes ``proto``.

    Inputs that have an initializer are removed then: from IR version 4 on, a caller may replace them, so that a runtime
    would no longer fold them or fuse the operators that read them.
    """
    if proto.ir_version < IR_WITH_FREE_INITIALIZERS:
        proto.ir_version = IR_WITH_FREE_INITIALIZERS
        constants = {tensor.name for tensor in proto.graph.initializer}
        refill(proto.graph.input, [i for i in proto.graph.input if i.name not in constants])


def _converted(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    light = without_weights(proto)
    # else the converter does not see initializers that are not inputs
    light.ir_version = max(light.ir_version, IR_WITH_FREE_INITIALIZERS)
    try:
        return version_converter.convert_version(light, version)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises RuntimeError and its own classes
        # "/project/onnx/version_converter/convert.cc:101: f: Assertion `x` failed: why"
        why = str(error).strip().partition("failed: ")[2] or str(error).strip() or type(error).__name__
        if why == "unordered_map::at":  # onnx before 1.23
            why = "onnx converts no operator of one of its names"
        raise ModelError(
            f"the opset cannot be raised from {opset_of(proto)} to {version}: {why.splitlines()[0][:300]}",
            cure=f"export the model with opset {version}, or choose a number format that needs none",
        ) from None


def _put_back_graph(original: onnx.GraphProto, raised: onnx.GraphProto) -> None:
    """Undo the converter's changes other than those of operators."""
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
