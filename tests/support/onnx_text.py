"""Models written as ONNX text, and their outputs in ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from qdqspec.graph.model import Model

DOMAIN = re.compile(r"([a-z]\w*(?:\.[a-z]\w*)*)\.[A-Za-z]\w*\s*[<(]")


def parsed(text: str, opset: int = 17, *, ir: int = 8, named: bool = False, **constants: object) -> Model:
    """The model of ``g (...) => (...) { ... }`` with these initializers: values, or shapes of random ones.

    With ``named``, each node has the name of its first output.
    """
    domains = "".join(f', "{domain}": 1' for domain in sorted({*DOMAIN.findall(text)}))
    proto = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}{domains}]> {text}')
    random = np.random.default_rng(0)
    for name, value in constants.items():
        drawn = random.normal(size=value).astype(np.float32) if isinstance(value, tuple) else value
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(drawn), name))
    for node in proto.graph.node if named else ():
        node.name = node.output[0]
    return Model(proto)


def outputs_of(
    model: Model | onnx.ModelProto | Path, feeds: Mapping[str, object], level: str = "DISABLE_ALL"
) -> list[np.ndarray]:
    """What ONNX Runtime computes at a level of optimization."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    proto = model.proto if isinstance(model, Model) else model
    source = str(proto) if isinstance(proto, Path) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: np.asarray(value) for name, value in feeds.items()}))
