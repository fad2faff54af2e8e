"""A network in float16, as a runtime would be given it: ONNX Runtime's converter. May import floors 0 and 1, and onnx.

Only for looking at what a runtime makes of it: no range is checked, so its numbers may be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import TensorProto

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model
from qdqspec.graph.scopes import unique_node_names

_CONVERTER = "onnxruntime.transformers.float16"


def has_floats(model: Model) -> bool:
    """Whether anything of it is stored or fed in float32."""
    kinds = {tensor.data_type for tensor in model.initializers.values()}
    return TensorProto.FLOAT in kinds | {model.elem_type(name) for name in model.inputs}


def half_model(model: Model, path: Path, *, keep_io: bool = False) -> onnx.ModelProto:
    """The network of a file in float16; every node has the name it has in ``model``.

    Inputs and outputs are float16 too, or stay what they are behind casts where ``keep_io``.
    All weights are in memory then. Raises `ModelError` where the converter gives nothing that can be used.
    """
    proto = onnx.load(str(path))
    for node, name in zip(proto.graph.node, [*unique_node_names(proto.graph.node)], strict=True):
        node.name = name
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        logging.getLogger(_CONVERTER).setLevel(logging.ERROR)  # it warns of every value that float16 rounds
        converted: onnx.ModelProto = convert_float_to_float16(
            proto, keep_io_types=keep_io, disable_shape_infer=bool(model.external_files())
        )
    except Exception as error:  # noqa: BLE001 - a converter for all models fails in many ways
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"it cannot be converted to float16: {reason}", where=path) from None
    ordered = _in_order(converted.graph)
    del converted.graph.node[:]
    converted.graph.node.extend(ordered)
    return converted


def _in_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes behind what they read, else as they were: the converter puts the casts it adds at the end."""
    producer = {out: index for index, node in enumerate(graph.node) for out in node.output if out}
    placed: dict[int, None] = {}
    for start in range(len(graph.node)):
        waiting = [start]
        while waiting:
            index = waiting[-1]
            before = [i for i in _makers(graph.node[index].input, producer) if i not in placed and i != index]
            if before and index not in placed:
                waiting.extend(before)
            else:
                placed[waiting.pop()] = None
    return [graph.node[index] for index in placed]


def _makers(names: Iterable[str], producer: dict[str, int]) -> Iterable[int]:
    return (producer[name] for name in names if name in producer)
