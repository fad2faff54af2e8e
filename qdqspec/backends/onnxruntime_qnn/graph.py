"""The compiled graph that QNN writes as JSON: its operators, and the types that they compute in.

That an operator runs on the NPU does not mean that it runs in integers: only the types in this graph tell. Source of
their numbers: QnnTypes.h of the SDK, as the plugin's documents list them; measured with QAIRT 2.51.0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_TYPES = {  # the number of a type of QNN, as qdqspec names it; fixed-point types are quantized
    0x0008: "int8", 0x0016: "int16", 0x0032: "int32", 0x0064: "int64", 0x0108: "uint8", 0x0116: "uint16",
    0x0132: "uint32", 0x0216: "float16", 0x0232: "float32", 0x0308: "int8", 0x0316: "int16", 0x0332: "int32",
    0x0408: "uint8", 0x0416: "uint16", 0x0432: "uint32", 0x0508: "bool", 0x0304: "int4", 0x0404: "uint4",
}  # fmt: skip
_FIXED = range(0x0300, 0x0500)
_CONVERTS = frozenset({"Cast", "Convert", "Dequantize", "Quantize", "Transpose"})
_SUFFIX = re.compile(r"(?:_token_\d+|/duplicated|_(?:nhwc|transpose)\w*)+$")


class Kernel(NamedTuple):
    """An operator of a compiled graph; ``part`` counts the graphs, into which nodes on the CPU divide a model."""

    name: str
    op_type: str
    part: int
    reads: tuple[str, ...]  # types of its inputs and of its outputs
    gives: tuple[str, ...]
    is_integer: bool
    data: str  # the tensor that it reads
    made: str  # the tensor that it makes
    constants: str  # digest of its quantization parameters

    @property
    def node(self) -> str:
        """The name of the ONNX node, without what ONNX Runtime added."""
        return _SUFFIX.sub("", self.name)

    @property
    def converts(self) -> bool:
        """Whether it only converts values, or their layout."""
        return self.op_type in _CONVERTS

    @property
    def precision(self) -> str:
        """The types of its data and of its results: ``uint8``, ``float32 > uint8``."""
        data, results = self.reads[:1], self.gives[:1]
        return " > ".join(dict.fromkeys((*data, *results)))


def read_kernels(folder: Path) -> tuple[Kernel, ...]:
    """The operators of all graphs that one build wrote."""
    files = sorted(file for file in folder.glob("*.json") if not file.stem.endswith("_tensor_log"))
    graphs = [json.loads(file.read_text(encoding="utf-8"))["graph"] for file in files]
    return tuple(
        _kernel(name, node, graph, part)
        for part, graph in enumerate(graphs)
        for name, node in graph["nodes"].items()
    )


def _kernel(name: str, node: dict[str, Any], graph: dict[str, Any], part: int) -> Kernel:
    sides = node["input_names"], node["output_names"]
    read, given = ([graph["tensors"].get(tensor, {}) for tensor in side] for side in sides)
    data = [int(tensor.get("data_type", 0)) for tensor in (*read[:1], *given)]
    parameters = [[tensor.get("dims"), tensor.get("quant_params")] for tensor in (*read, *given)]
    return Kernel(
        name=name,
        op_type=node["type"],
        part=part,
        reads=_names(read),
        gives=_names(given),
        is_integer=bool(data) and all(number in _FIXED for number in data),
        data=_SUFFIX.sub("", next(iter(node["input_names"]), "")),
        made=_SUFFIX.sub("", next(iter(node["output_names"]), "")),
        constants=hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:16],
    )


def _names(tensors: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(_TYPES.get(number := int(tensor.get("data_type", 0)), hex(number)) for tensor in tensors)


def hash_of(kernels: Iterable[Kernel]) -> str:
    """A digest of the compiled graph, the same in each build: contexts that QNN saves differ from build to build."""
    rows = sorted(repr(tuple(kernel)) for kernel in kernels)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
