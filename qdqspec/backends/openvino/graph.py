"""The runtime graph of a compiled model: its kernels, their types and connections."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

_INPUT, _CONSTANT, _OUTPUT = "Input", "Const", "Output"
_NARROW = frozenset({"u8", "i8", "u4", "i4"})
# OpenVINO's names of element types, in the names that reports use
_TYPES = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "u8": "uint8", "i8": "int8", "i32": "int32", "i64": "int64",
    "boolean": "bool", "u4": "uint4", "i4": "int4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A node of the runtime graph.

    ``sources`` is OpenVINO's comma-separated list of the operators that it computes. ``inputs`` are indexes of other
    kernels in the order of execution. ``static`` kernels depend on constants only and run once, when the model is
    compiled.
    """

    name: str
    layer_type: str
    primitive: str
    sources: str
    takes: str  # element type of the first input
    makes: str  # element types of the outputs, comma-separated
    details: str  # layouts and shapes
    inputs: tuple[int, ...]
    static: bool

    @property
    def is_computed(self) -> bool:
        """Whether it may run in an inference."""
        return not self.static and self.layer_type not in (_INPUT, _OUTPUT)

    @property
    def integer(self) -> bool:
        """Whether it reads 8-bit integers."""
        return self.takes in _NARROW

    @property
    def quantizes(self) -> bool:
        """Whether it reads floats and writes 8-bit integers."""
        return not self.integer and self.made in _NARROW

    @property
    def made(self) -> str:
        """The element type of the first output."""
        return self.makes.split(",")[0]

    @property
    def precision(self) -> str:
        """The input type and, if different, the output type: ``uint8 > fp32``."""
        taken, made = (_TYPES.get(name, name) for name in (self.takes, self.made))
        return taken if taken == made else f"{taken} > {made}"


def read_kernels(runtime_model: Any) -> tuple[Kernel, ...]:
    """The kernels in order of execution."""
    nodes = list(runtime_model.get_ordered_ops())
    index = {node.get_friendly_name(): i for i, node in enumerate(nodes)}
    kernels: list[Kernel] = []
    for node in nodes:
        ports = [value.get_node().get_friendly_name() for value in node.input_values()]
        inputs = tuple(index[name] for name in ports)
        kernels.append(_kernel(node, inputs, kernels))
    return tuple(kernels)


def _kernel(node: Any, inputs: tuple[int, ...], before: list[Kernel]) -> Kernel:
    facts = {name: _text(value) for name, value in node.get_rt_info().items()}
    made = facts.get("outputPrecisions", "")
    layer_type = facts.get("layerType", "")
    constant = all(before[i].static for i in inputs) if inputs else layer_type == _CONSTANT
    shapes = " ".join(str(output.get_partial_shape()) for output in node.outputs())
    return Kernel(
        name=node.get_friendly_name(),
        layer_type=layer_type,
        primitive=facts.get("primitiveType", ""),
        sources=facts.get("originalLayersNames", ""),
        takes=before[inputs[0]].made if inputs else made,
        makes=made,
        details=f"{facts.get('outputLayouts', '')} {shapes}",
        inputs=inputs,
        static=constant,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value.astype(str))


def graph_hash(kernels: tuple[Kernel, ...], computed: tuple[tuple[str, ...], ...]) -> str:
    """Hash the kernels with their types, layouts, shapes, connections and the ONNX nodes that each computes.

    ``computed`` are these nodes, kernel by kernel. Names that OpenVINO numbers anew in every build are excluded. So are
    values of weights and scales, which the runtime graph does not contain: engines with equal hashes run the same
    kernels and take the same time.
    """
    known: list[str] = []
    for kernel, nodes in zip(kernels, computed, strict=True):
        ends = (kernel.name,) if kernel.layer_type in (_INPUT, _OUTPUT) else ()
        parts = (kernel.layer_type, kernel.primitive, kernel.makes, kernel.details, *ends, "|", *nodes, "|")
        known.append(_digest(*parts, *(known[i] for i in kernel.inputs)))
    return _digest(*sorted(known))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
