"""TensorRT's layer information and profile as layer times in ONNX names.

Both JSON schemas are read: up to 10 (``Bindings``, ``Format/Datatype``) and 11 (``I/O Tensors``,
``Datatype`` and ``Format``), engines with layer names only, and mixed Cask and Myelin layers. Sums of layer times
exceed the end-to-end time, by 18 to 35 % in recorded runs: they locate time and never decide a comparison.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.backends.tensorrt.layer_json import Json, read_graph, read_profile
from qdqspec.backends.tensorrt.names import EngineNames, plain_name
from qdqspec.graph.model import Model
from qdqspec.types import LayerTime

# TensorRT's names of types, found as words in texts such as "Channel major FP16 format where channel % 8 == 0".
_TYPES = {
    "float": "fp32", "fp32": "fp32", "half": "fp16", "fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "tf32": "fp32",
    "int8": "int8", "uint8": "uint8", "fp8": "fp8", "int4": "int4", "fp4": "fp4", "e8m0": "e8m0",
    "int32": "int32", "int64": "int64", "uint64": "uint64", "bool": "bool",
}  # fmt: skip
_TYPE = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(_TYPES)})(?![A-Za-z0-9])", re.IGNORECASE)
_NARROW = frozenset({"int8", "fp8", "fp4"})  # compute types; int4 is for weights only
# In names of tactics: i8i8_i8i32, int8x4, imma; e4m3; e2m1.
_TACTICS = (
    ("int8", re.compile(r"(?<![a-z0-9])i8(?=i8|f16|f32|bf16|i32|_|$)|int8|imma(?![a-z])")),
    ("fp8", re.compile(r"e4m3|e5m2|fp8")),
    ("fp4", re.compile(r"e2m1|fp4")),
)
_CONVERTING = frozenset({"Reformat", "MyelinReformat", "NoOp"})
_COPY_NODE = "Reformatting CopyNode for "
_ONE_LINE = re.compile(r"Name: (?P<Name>.*?), LayerType: (?P<LayerType>[^,]*), ")
_ONE_LINE_METADATA = re.compile(r", Metadata: (?P<Metadata>.*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a layer: its name and its element type in qdqspec's names, empty if not reported."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an engine. Engines built without detailed verbosity report only the name."""

    name: str
    layer_type: str = ""
    origin: str = ""  # of a Reformat: "QDQ" for an unfused pair, "REFORMAT" for a change of layout
    metadata: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    weights: str = ""
    tactic: str = ""

    @property
    def computes(self) -> str:
        """The type it computes in. Input and output types are not sufficient: some layers read int8 and write fp16."""
        for dtype, tactic in _TACTICS:
            if tactic.search(self.tactic):
                return dtype
        first = self.inputs[0].dtype if self.inputs else ""
        if self.weights in _NARROW and first in ("", self.weights):
            return self.weights
        return first

    @property
    def precision(self) -> str:
        """The computed type and, if different, the output type: ``int8 > fp16``. A conversion: both types."""
        made = self.outputs[0].dtype if self.outputs else ""
        taken = self.inputs[0].dtype if self.converts and self.inputs else self.computes
        return f"{taken} > {made}" if taken and made and made != taken else taken or made

    @property
    def converts(self) -> bool:
        """Whether it only changes type or layout."""
        return self.layer_type in _CONVERTING or self.name.startswith(_COPY_NODE)


def parse_layers(
    graph_json: str | Json, profile: str | Sequence[Json] | None = None, *, model: Model | None = None
) -> tuple[LayerTime, ...]:
    """Layers in execution order with the mean time of each, zero without a profile.

    ``graph_json`` is the output of the engine inspector or ``--exportLayerInfo``, ``profile`` that of
    ``--exportProfile`` or a list of ``{"name", "averageMs"}``. ``model`` is the ONNX model the engine was
    built from, pairs included: with it every name is a name of the model, without it names are split by their syntax.
    Pairs that were not fused are boundaries with ``op_type`` ``QuantizeLinear`` or ``DequantizeLinear``.
    Raises `BackendError` if a text cannot be read.
    """
    graph = read_graph(graph_json)
    names = EngineNames(model)
    ends = names.tensors(_io_names(graph))[:1]
    timed = _times(read_layers(graph), read_profile(profile), profiled=profile is not None)
    return tuple(_layer_time(layer, milliseconds, names, ends) for layer, milliseconds in timed)


def read_layers(graph_json: str | Json) -> tuple[Layer, ...]:
    """The layers as reported by TensorRT, in execution order."""
    found = read_graph(graph_json).get("Layers", [])
    return tuple(_layer(entry) for entry in found if isinstance(entry, str | Mapping))


def _layer(entry: str | Json) -> Layer:
    if isinstance(entry, str):
        entry = _one_line(entry)
    return Layer(
        name=str(entry.get("Name", "")),
        layer_type=str(entry.get("LayerType", "")),
        origin=str(entry.get("Origin", "")),
        metadata=str(entry.get("Metadata", "")),
        inputs=_tensors(entry.get("Inputs")),
        outputs=_tensors(entry.get("Outputs")),
        weights=_weight_type(entry),
        tactic=str(entry.get("TacticName", "")),
    )


def _one_line(text: str) -> Json:
    """A layer given as text: JSON of its own, ``Name: a, LayerType: b, ...``, or only its name."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, Mapping):
            return found
    head, tail = _ONE_LINE.match(text), _ONE_LINE_METADATA.search(text)
    if head is None:
        return {"Name": text}
    return head.groupdict() | (tail.groupdict() if tail else {})


def _tensors(entries: object) -> tuple[Tensor, ...]:
    if not isinstance(entries, list):
        return ()
    return tuple(
        Tensor(str(entry.get("Name", "")), _dtype(entry)) for entry in entries if isinstance(entry, Mapping)
    )


def _dtype(entry: Json) -> str:
    """The type's name, from the key that this version writes; formats are sentences that contain it."""
    for key in ("Datatype", "DataType", "Format/Datatype", "Type"):
        if found := _TYPE.search(str(entry.get(key, ""))):
            return _TYPES[found[1].lower()]
    return ""


def _weight_type(entry: Json) -> str:
    """The type of the weights: a separate field, or up to 11 and in Myelin a constant among others."""
    for key in ("Weights", "ConvWeights"):
        if isinstance(entry.get(key), Mapping) and (dtype := _dtype(entry[key])):
            return dtype
    constants = [tensor.dtype for tensor in _tensors(entry.get("Constants"))]
    return next((dtype for dtype in constants if dtype in _NARROW or dtype == "int4"), "")


def _io_names(graph: Json) -> Iterator[str]:
    for entry in (*_listed(graph, "Bindings"), *_listed(graph, "I/O Tensors")):
        yield str(entry.get("Name", "")) if isinstance(entry, Mapping) else str(entry)


def _listed(graph: Json, key: str) -> list[object]:
    found = graph.get(key)
    return found if isinstance(found, list) else []


def _times(
    layers: Iterable[Layer], profile: Sequence[tuple[str, float]], *, profiled: bool
) -> Iterator[tuple[Layer, float]]:
    """Each layer with its time. Names may repeat, so equal ones are matched in order of execution.

    An engine with several optimization profiles lists every layer once for each; only executed ones are kept.
    """
    waiting: dict[str, deque[float]] = {}
    for name, milliseconds in profile:
        waiting.setdefault(name, deque()).append(milliseconds)
    ran = {name.removeprefix(plain_name(name)) for name, _ in profile} or {""}
    for layer in layers:
        own = waiting.get(layer.name) or waiting.get(plain_name(layer.name))
        if own:
            yield layer, own.popleft()
        elif not profiled or layer.name.removeprefix(plain_name(layer.name)) in ran:
            yield layer, 0.0
    for name, left in waiting.items():  # it ran, but is missing in the layer information
        for milliseconds in left:
            yield Layer(name), milliseconds


def _layer_time(layer: Layer, milliseconds: float, names: EngineNames, ends: tuple[str, ...]) -> LayerTime:
    named = names.of_layer(layer.name, layer.metadata)
    nodes = tuple(node for node in named if not names.is_pair(node))
    lonely = layer.origin == "QDQ" or bool(named and not nodes)
    boundary = layer.converts or lonely or not nodes
    tensors = names.tensors(tensor.name for tensor in (*layer.inputs, *layer.outputs))
    return LayerTime(
        name=layer.name,
        op_type=_pair_type(layer, named) if lonely else layer.layer_type,
        milliseconds=milliseconds,
        nodes=() if boundary else nodes,
        tensors=(tensors or ends) if boundary else (),
        boundary=boundary,
        integer=not boundary and layer.computes in _NARROW,
        precision=layer.precision,
    )


def _pair_type(layer: Layer, named: tuple[str, ...]) -> str:
    """Which half of a pair was not fused: determined by its output type, else by its name."""
    made = layer.outputs[0].dtype if layer.outputs else ""
    if made:
        return "QuantizeLinear" if made in _NARROW or made == "int4" else "DequantizeLinear"
    text = " ".join((*named, layer.name)).lower()
    return "DequantizeLinear" if "dequant" in text else "QuantizeLinear"
