"""Models written as ONNX text, as objects and as files, and their outputs in ONNX Runtime."""

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


def saved(path: Path, text: str, *, opset: int = 19, ir_version: int = 9, **weights: np.ndarray) -> Path:
    """The file of a model from a graph in ONNX's textual form."""
    onnx.save(parsed(text, opset, ir=ir_version, **weights).proto, path)
    return path


def kernels(count: int, *shape: int) -> dict[str, np.ndarray]:
    """Random weights ``w0``, ``w1``, ... of a shape."""
    random = np.random.default_rng(0)
    return {f"w{i}": random.normal(0, 0.2, shape).astype(np.float32) for i in range(count)}


def model_of(text: str, **weights: tuple[int, ...]) -> Model:
    """A checked model from a graph in ONNX's textual form, ``(float[1, 8] x) => (float[1, 8] y) { ... }``.

    ``weights`` become initializers of these shapes. Every node is named after its first output.
    """
    model = parsed("g " + text, named=True, **weights)
    onnx.checker.check_model(model.proto, full_check=True)
    return model


def linear(
    op_type: str,
    values: np.ndarray,
    weight: np.ndarray,
    *,
    transposed: bool = False,
    opset: int = 21,
    bias: bool = False,
) -> Model:
    """A model of one linear operator, of these values as ``x`` with a weight and a bias of ones."""
    kind = {"float32": "float", "float64": "double"}.get(str(values.dtype), str(values.dtype))
    ends = [",".join(map(str, (*values.shape[:-1], size))) for size in (values.shape[-1], weight.shape[1])]
    turned, third = "<transB = 1>" if transposed else "", ", b" if bias else ""
    constants = {"w": weight.T.copy() if transposed else weight} | (
        {"b": np.ones(weight.shape[1])} if bias else {}
    )
    text = (
        f"g ({kind}[{ends[0]}] x) => ({kind}[{ends[1]}] y) {{ [linear] y = {op_type}{turned}(x, w{third}) }}"
    )
    return parsed(text, opset, ir=10, **{n: value.astype(values.dtype) for n, value in constants.items()})


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


def kernels_of(model: Model | onnx.ModelProto, folder: Path) -> list[str]:
    """The operators of the nodes that ONNX Runtime runs after all its optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    proto = model.proto if isinstance(model, Model) else model
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in Model(onnx.load(folder / "optimized.onnx")).nodes]
