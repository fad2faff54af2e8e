"""Writes the model that ONNX Runtime produces at a given optimization level, and a network converted to float16.

The float16 network is for inspection of kernels only: ranges are not checked, so its outputs may be wrong.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import onnx

from qdqspec.backends._engine import one_line
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import open_session
from qdqspec.errors import ModelError
from qdqspec.graph.flat import unique_node_names
from qdqspec.graph.model import Model


def optimize(model: Path, folder: Path, *, level: str) -> Path:
    """Write the optimized model of the CPU provider into ``folder``, and return the file.

    Raises `BackendError` with ONNX Runtime's reason, `BackendUnavailableError` if it is not installed.
    """
    out = folder / f"{level}.onnx"
    options = BuildOptions(extra={"onnxruntime.optimization": level})
    open_session(model, options, optimized=out, failure="ONNX Runtime could not optimize the model")
    return out


basic = partial(optimize, level="basic")
extended = partial(optimize, level="extended")
everything = partial(optimize, level="all")


_CONVERTER = "onnxruntime.transformers.float16"


def half_model(model: Model, path: Path, *, keep_io: bool = False) -> onnx.ModelProto:
    """The network of a file in float16; every node has its name in ``model``.

    Inputs and outputs are float16 too, or keep their types, with casts, if ``keep_io`` is set.
    All weights are loaded into memory. Raises `ModelError` if the converter's result cannot be used.
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
        why = one_line(error, 200)
        raise ModelError(f"it cannot be converted to float16: {why}", where=path) from None
    ordered = _in_order(converted.graph)
    del converted.graph.node[:]
    converted.graph.node.extend(ordered)
    return converted


def _in_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes in topological order, otherwise unchanged: the converter appends the casts it adds."""
    producer = {out: index for index, node in enumerate(graph.node) for out in node.output if out}
    placed: dict[int, None] = {}
    for start in range(len(graph.node)):
        waiting = [start]
        while waiting:
            index = waiting[-1]
            makers = (producer.get(name, index) for name in graph.node[index].input)
            before = [i for i in makers if i not in placed and i != index]
            if before and index not in placed:
                waiting.extend(before)
            else:
                placed[waiting.pop()] = None
    return [graph.node[index] for index in placed]
