"""TensorRT's layer information and profile as layer times in ONNX names.

Both JSON schemas are read, up to 10 (``Bindings``, ``Format/Datatype``) and 11 (``I/O Tensors``, ``Datatype`` and
``Format``), and engines with layer names only. Sums of layer times exceed the end-to-end time, by 18 to 35 % in
recorded runs: they locate time and never decide a comparison.

From 10 on a layer's metadata lists the ONNX nodes it was built from; before that only its name does. Names are joined,
wrapped and numbered (`a + b`, `a || b`, `PWN(PWN(a), b)`, `{ForeignNode[a...b]}`, `a_clone_1`, `a_myl4_0`), so they are
looked up in the model if there is one; of a foreign node only its ends are named.

A build with detailed verbosity also logs the kernels, as one message that begins with ``Layers:``, one line for each,
without times; TensorRT for RTX writes it on machines without a GPU. The inspector's text contains control characters,
which strict JSON parsers reject.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from qdqspec.backends._source import Source
from qdqspec.errors import BackendError
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import HEAVY, QDQ_OPS
from qdqspec.types import LayerTime

Json: TypeAlias = Mapping[str, Any]

# TensorRT's names of types, found as words in texts such as "Channel major FP16 format where channel % 8 == 0".
_TYPES = {
    "float": "fp32", "fp32": "fp32", "half": "fp16", "fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "tf32": "fp32",
    "int8": "int8", "uint8": "uint8", "fp8": "fp8", "int4": "int4", "fp4": "fp4", "fp4e2m1": "fp4",
    "e8m0": "e8m0", "fp8ue8m0": "e8m0",
    "int32": "int32", "int64": "int64", "uint64": "uint64", "bool": "bool",
}  # fmt: skip
_TYPE = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(_TYPES)})(?![A-Za-z0-9])", re.IGNORECASE)
_NARROW = frozenset({"int8", "fp8", "fp4"})  # compute types; int4 is for weights only
_FLOATS = frozenset({"fp32", "fp16", "bf16"})
_CONVERTING = frozenset({"Reformat", "MyelinReformat", "NoOp"})
# Myelin's layer types: kernels generated from code, kernels of one product, and what is between kernels:
# synchronization of streams, jumps of If and Loop and their counters, sizes of dynamic shapes.
_GENERATED = "kgen"
_PRODUCTS = frozenset({"correlation", "deconv", "gemm", "runtime_fusion"})
_CONTROL = frozenset({"TrainStation", "cjmp", "jmp", "memset", "shape_call", "signal", "wait"})
# A generated kernel whose name has a convolution or product before the first conversion: it multiplies what it reads.
_MULTIPLIES = re.compile(r"__myl_(?:(?!Cast)[A-Z][a-z]*?)*?(?:Corr|Fc)(?=[A-Z_])")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a layer: its name, and its element type in qdqspec's names, empty if it is not reported."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an engine. Engines built without detailed verbosity report only the name."""

    name: str
    layer_type: str = ""
    metadata: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    constants: tuple[Tensor, ...] = ()

    @property
    def computes(self) -> str:
        """The type it computes in, which is that of its inputs: some layers read int8 and write fp16."""
        read = [tensor.dtype for tensor in self.inputs]
        data = next((dtype for dtype in read if dtype in _NARROW | _FLOATS), read[0] if read else "")
        if data in _NARROW:
            operands = [tensor.dtype for tensor in (*self.inputs, *self.constants)]
            narrow = sum(dtype in _NARROW for dtype in operands)
            # Generated kernels have their operations in their names. A product of narrow data and a float operand is
            # one of floats: a weight without pairs beside quantized data, for example.
            widens = (self.layer_type in _PRODUCTS or self.multiplies) and narrow < 2 <= len(operands)
            if "Cast" in self.name if self.generated and not self.multiplies else widens:
                every = (*operands, *(tensor.dtype for tensor in self.outputs))
                return next((dtype for dtype in every if dtype in _FLOATS), "fp32")
        return data

    @property
    def generated(self) -> bool:
        """Whether it is a kernel of generated code: pointwise operators, reductions, copies, or attention."""
        return self.layer_type == _GENERATED

    @property
    def multiplies(self) -> bool:
        """Whether it is generated code that begins with a convolution or product of its inputs as they are."""
        return self.generated and _MULTIPLIES.match(self.name) is not None

    @property
    def may_multiply(self) -> bool:
        """Whether it can be the kernel of a heavy operator, rather than one that prepares its inputs."""
        return not self.generated or self.multiplies

    @property
    def precision(self) -> str:
        """The computed type and, if different, the output type: ``int8 > fp16``. A conversion: both types."""
        made = self.outputs[0].dtype if self.outputs else ""
        taken = self.inputs[0].dtype if self.converts and self.inputs else self.computes
        return f"{taken} > {made}" if taken and made and made != taken else taken or made

    @property
    def converts(self) -> bool:
        """Whether it only changes type or layout."""
        return self.layer_type in _CONVERTING


def parse_layers(
    graph_json: str | Json, profile: str | Sequence[Json] | None = None, *, model: Model | None = None
) -> tuple[LayerTime, ...]:
    """Layers in execution order with the mean time of each, zero without a profile.

    ``graph_json`` is the output of the engine inspector or ``--exportLayerInfo``, or a log with the message
    ``Layers:`` of a build. ``profile`` is the output of ``--exportProfile`` or a list of ``{"name", "averageMs"}``.
    ``model`` is the ONNX model the engine was built from, pairs included: with it every name is a name of the model,
    without it names are split by their syntax. Pairs that were not fused are boundaries with ``op_type``
    ``QuantizeLinear`` or ``DequantizeLinear``. Without times, those of the optimization profile with the fewest integer
    kernels are given: so many are in each. Entries that are no kernels, such as synchronization and jumps, are left out
    if they took no time. Raises `BackendError` if a text cannot be read.
    """
    graph = read_graph(graph_json)
    names = EngineNames(model)
    lists = (graph.get(key) for key in ("Bindings", "I/O Tensors"))
    io = (entry for each in lists if isinstance(each, list) for entry in each)
    ends = names.tensors(str(e.get("Name", "")) if isinstance(e, Mapping) else str(e) for e in io)[:1]
    timed = tuple(_times(read_layers(graph), read_profile(profile), profiled=profile is not None))
    profiles = [timed] if profile is not None else _by_profile(timed)
    return min(
        (_layer_times(part, names, ends) for part in profiles),
        key=lambda found: sum(one.integer for one in found),
    )


_Timed: TypeAlias = Sequence[tuple[Layer, float]]


def _by_profile(timed: _Timed) -> list[_Timed]:
    """The layers of each optimization profile: its number is in names of a layer, or of its graph in Myelin."""
    graphs = [(_MYELIN_GRAPH.search(layer.name) or (layer.name,))[0] for layer, _ in timed]
    profiles: dict[str, str] = {}
    for graph, (layer, _) in zip(graphs, timed, strict=True):
        tensors = (*layer.inputs, *layer.outputs)
        for found in filter(None, map(_LATER.search, (layer.name, *(tensor.name for tensor in tensors)))):
            profiles[graph] = found[0]
    parts: dict[str, list[tuple[Layer, float]]] = {}
    for graph, each in zip(graphs, timed, strict=True):
        parts.setdefault(profiles.get(graph, ""), []).append(each)
    return list(parts.values()) or [()]


def _layer_times(timed: _Timed, names: EngineNames, ends: tuple[str, ...]) -> tuple[LayerTime, ...]:
    """The layers of one optimization profile in names of the model."""
    named = [names.of_layer(layer.name, layer.metadata) for layer, _ in timed]
    # The kernel of each heavy operator of the model. Generated kernels before and after it list the operator too, since
    # they quantize its inputs or scale its result. An operator that only such kernels list is in the first.
    kernels: dict[str, int] = {}
    for index, (layer, _) in enumerate(timed):
        for node in () if layer.converts else named[index]:
            known = kernels.get(node, index)
            prepares = not timed[known][0].may_multiply
            if names.is_heavy(node) and (known == index or (prepares and layer.may_multiply)):
                kernels[node] = index
    found = []
    for index, (layer, milliseconds) in enumerate(timed):
        if (
            milliseconds or layer.layer_type not in _CONTROL
        ):  # without heavy nodes whose inputs it only prepares
            nodes = tuple(node for node in named[index] if kernels.get(node, index) <= index)
            found.append(_layer_time(layer, milliseconds, nodes, names, ends))
    return tuple(found)


def kernel_list_hash(text: str) -> str:
    """A hash of the kernels that a build logged; equal for two builds of one model.

    The numbers of tensors that the compiler inserts, and the hashes of generated code, are left out: they depend on the
    compute capability and on the values of scales.
    """
    rows = "\n".join(_listed_rows(text))
    return hashlib.sha256(_COUNTED_BY_COMPILER.sub("", rows).encode(errors="replace")).hexdigest()


def read_layers(graph_json: str | Json) -> tuple[Layer, ...]:
    """The layers as reported by TensorRT, in execution order."""
    found = read_graph(graph_json).get("Layers", [])
    entries = (_one_line(entry) if isinstance(entry, str) else entry for entry in found)
    return tuple(
        Layer(
            name=str(entry.get("Name", "")),
            layer_type=str(entry.get("LayerType", "")),
            metadata=str(entry.get("Metadata", "")),
            inputs=_tensors(entry.get("Inputs")),
            outputs=_tensors(entry.get("Outputs")),
            constants=_tensors(entry.get("Constants")),
        )
        for entry in entries
        if isinstance(entry, Mapping)
    )


_HEAD = re.compile(r"Name: (?P<Name>.*?), LayerType: (?P<LayerType>[^,]*)(?=, )", re.DOTALL)
_TENSORS = re.compile(r"\]?, (Inputs|Constants|Outputs): \[")
_TENSOR = re.compile(
    r",? ?\{ Name: (?P<Name>(?:(?!, Dimensions: ).)*?)(?:, Location: \w+)?, Dimensions: \[[-\d,]*\]"
    r"(?:, \w+: \[[-\d,]*\])*, (?:Format/)?Datatype: (?P<Datatype>[^{}]*)\}",
    re.DOTALL,
)
_TAIL = re.compile(r", Metadata: ?(?P<Metadata>.*)$", re.DOTALL)


def _one_line(text: str) -> Json:
    """A layer given as text: ``Name: a, LayerType: b, ...``, or only its name."""
    head = _HEAD.match(text)
    if head is None:
        return {"Name": text}
    entry: dict[str, Any] = head.groupdict()
    position = head.end()
    while tensors := _TENSORS.match(text, position):
        position, entry[tensors[1]] = tensors.end(), []
        while tensor := _TENSOR.match(text, position):
            entry[tensors[1]].append(tensor.groupdict())
            position = tensor.end()
    if field := _TAIL.search(text, position):
        entry |= field.groupdict()
    return entry


def _tensors(entries: object) -> tuple[Tensor, ...]:
    known = [each for each in entries if isinstance(each, Mapping)] if isinstance(entries, list) else []
    return tuple(Tensor(str(entry.get("Name", "")), _dtype(entry)) for entry in known)


def _dtype(entry: Json) -> str:
    """The type's name, from the key that this version writes; formats are sentences that contain it."""
    for key in ("Datatype", "DataType", "Format/Datatype", "Type"):
        if found := _TYPE.search(str(entry.get(key, ""))):
            return _TYPES[found[1].lower()]
    return ""


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


def _layer_time(
    layer: Layer, milliseconds: float, named: tuple[str, ...], names: EngineNames, ends: tuple[str, ...]
) -> LayerTime:
    nodes = tuple(node for node in named if not names.is_pair(node))
    unfused = bool(named and not nodes)
    boundary = layer.converts or unfused or not nodes
    op_type, made = layer.layer_type, layer.outputs[0].dtype if layer.outputs else ""
    if (
        unfused and made
    ):  # which half of a pair was not fused: determined by its output type, else by its name
        op_type = "QuantizeLinear" if made in _NARROW or made == "int4" else "DequantizeLinear"
    elif unfused:
        text = " ".join((*named, layer.name)).lower()
        op_type = "DequantizeLinear" if "dequant" in text else "QuantizeLinear"
    tensors = names.tensors(tensor.name for tensor in (*layer.inputs, *layer.outputs))
    if unfused and not tensors:  # Myelin has names of its own for tensors
        tensors = names.quantized(named)
    elif not tensors:
        tensors = ends
    return LayerTime(
        name=layer.name,
        op_type=op_type,
        milliseconds=milliseconds,
        nodes=() if boundary else nodes,
        tensors=tensors if boundary else (),
        boundary=boundary,
        integer=not boundary and layer.computes in _NARROW,
        precision=layer.precision,
    )


# ---- names --------------------------------------------------------------------------------------

_PREFIX = "[ONNX Layer: "
# Between layers fused by Cask and inside Myelin; if a terminal removed both, entries are adjacent.
_SEPARATORS = re.compile(r"[\x1e\x1f]|(?<=\])(?=\[ONNX Layer: )")
_JOINTS = re.compile(r" \+ | \|\| |, |\.\.\.|\{ForeignNode\[|\]\}")
_PROFILE = re.compile(r" \[profile \d+\]$")
_LATER = re.compile(r" \[profile [1-9]\d*\]")
_CLONE = re.compile(r"_clone_\d+$")
_MYELIN = re.compile(r"_myl\d+_\d+$")
_MYELIN_GRAPH = re.compile(r"_myl\d+(?=_\d+$)")
_INSERTED = re.compile(
    r"^(?:\(Unnamed Layer\*|__my|Reformatting CopyNode |copied_|(?:un)?squeeze_|reshape_(?:before|after)_|ONNXTRT_)"
)
_PAIR = re.compile(r"(de)?quant(?:ize)?_?linear", re.IGNORECASE)
_POINTWISE = "PWN("
# Behind the name of a node in a branch: | NAME OF THE BODY (then_branch) | NAME OF THE IF (If)
_BRANCH = re.compile(r" \| [^|]* \((then_branch|else_branch)\) \| (.*?) \(If\)(?= \| |$)")
_INNER_TENSOR = re.compile(r"^Reformatted (?:In|Out)put Tensor |^__my|_myl\d+$|^\(Unnamed Layer\*|^l2_cache_")


def plain_name(name: str) -> str:
    """A layer's name without the optimization profile it was built for."""
    return _PROFILE.sub("", name)


def metadata_names(metadata: str) -> tuple[str, ...]:
    """The node names in a layer's metadata, pairs included, each once. A name may contain a bracket."""
    entries = _SEPARATORS.split(metadata)
    names = (entry[len(_PREFIX) :].removesuffix("]") for entry in entries if entry.startswith(_PREFIX))
    return tuple(dict.fromkeys(name for name in names if name))


def _own_names(node: Node) -> tuple[str, ...]:
    """A node's name in its graph; without one the parser names it after its first output."""
    body = f"{node.scope}/" if node.scope else ""
    own, *made = (name.removeprefix(body) for name in (node.name, *node.outputs[:1]))
    return (f"node_of_{made[0]}", made[0]) if own.startswith(f"{node.op_type}#") and made else (own,)


class EngineNames:
    """Finds nodes and tensors, in a model if there is one, else by the syntax of names."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = model
        self._source = None if model is None else Source(model)
        self._nodes = {} if model is None else model.by_name
        self._called = {name: name for name in self._nodes}  # TensorRT's name of a node: the model's
        for node in self._nodes.values():
            for called in self._engine_names(node):
                self._called.setdefault(called, node.name)

    def _engine_names(self, node: Node) -> Iterator[str]:
        """The parser's names of a node: its own, and behind it the branches of If around it; Loop and Scan add none."""
        around, inner = "", node
        while (owner := self._nodes.get(inner.scope.rpartition("/")[0])) is not None:
            if owner.op_type == "If":
                around += f"|{inner.scope.rpartition('/')[2]}|{_own_names(owner)[0]}"
            inner = owner
        return (own + around for own in _own_names(node))

    def of_layer(self, name: str, metadata: str) -> tuple[str, ...]:
        """Every node of a layer, pairs included, but no If around them: from its metadata, else from its own name."""
        if in_metadata := metadata_names(metadata):
            known = (self._called.get(_BRANCH.sub(r"|\1|\2", entry)) for entry in in_metadata)
            nodes = [node for node in known if node]
            scopes = [self._nodes[node].scope for node in nodes]
            inner = (node for node in nodes if not any(scope.startswith(f"{node}/") for scope in scopes))
            return tuple(inner) if self._model else in_metadata
        return tuple(dict.fromkeys(self._from_name(name)))

    def is_pair(self, node: str) -> bool:
        """Whether a node quantizes or dequantizes."""
        known = self._nodes.get(node)
        return bool(_PAIR.search(node)) if known is None else known.op_type in QDQ_OPS

    def is_heavy(self, node: str) -> bool:
        """Whether a node of the model is a convolution, a matrix product, attention or a recurrent operator."""
        return node in self._nodes and self._nodes[node].op_type in HEAVY

    def quantized(self, pairs: Iterable[str]) -> tuple[str, ...]:
        """The tensors that pairs of the model quantize, before these pairs."""
        found = (self._nodes[pair] for pair in pairs if pair in self._nodes)
        return self.tensors(node.inputs[0] for node in found if node.op_type in QDQ_OPS)

    def tensors(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of a layer's tensors that the model contains, before their pairs."""
        if (source := self._source) is None:
            found = (name for name in names if name and not _INNER_TENSOR.search(name))
        else:
            found = (source.base(name) for name in names if name in source.tensors)
        return tuple(dict.fromkeys(found))

    def _from_name(self, name: str) -> Iterator[str]:
        """The nodes in a layer's own name; without a model a part before a Q is the weight that it quantizes."""
        text = _CLONE.sub("", plain_name(name))
        if text in self._called:
            yield self._called[text]
            return
        parts = [part for part in _JOINTS.split(text) if part]
        if _POINTWISE in text:
            parts = [part.replace(_POINTWISE, "").rstrip(")") for part in parts]
        for part, following in zip(parts, [*parts[1:], ""], strict=False):
            bare = _MYELIN.sub("", _CLONE.sub("", part))
            if self._model is not None:
                yield from [self._called[known] for known in (part, bare) if known in self._called][:1]
                continue
            is_weight = part.endswith((".weight", ".bias")) or (
                _PAIR.search(following) and not _PAIR.search(part)
            )
            if not is_weight and not _INSERTED.search(part):
                yield bare


# ---- files --------------------------------------------------------------------------------------

_LAYER_INFORMATION, _LAYER_PROFILE = "layer information", "layer profile"

_LIST = "Layers:\n"  # before the kernels that a build logs
_LIST_END = re.compile(r"\n\n(?:I/O Tensors|Bindings):")
_ROW = re.compile(r"\n(?=Name: )")  # a name may contain a line break
_IO_NAME = re.compile(r"^ *Name: (.*?), IOMode: ", re.MULTILINE)
_COUNTED_BY_COMPILER = re.compile(r"(?<=__mye)\d+|_0x[0-9a-f]{16,}(?=, StreamId: )")


def read_graph(text: str | Json) -> Json:
    """The top object of the layer information, made from the list of a log; `BackendError` if there is none."""
    if isinstance(text, str) and _LIST in text and not text.lstrip().startswith("{"):
        ends = _IO_NAME.findall(text, text.index(_LIST))
        return {"Layers": _listed_rows(text), "I/O Tensors": ends}
    found = text if isinstance(text, Mapping) else _loaded(text, _LAYER_INFORMATION)
    if not isinstance(found, Mapping) or not isinstance(found.get("Layers", []), list):
        raise _unusable(_LAYER_INFORMATION, "it holds no list of layers")
    return found


def _listed_rows(text: str) -> list[str]:
    """The rows of the kernels that a build logged, one for each."""
    rows = _LIST_END.split(text.partition(_LIST)[2], maxsplit=1)[0]
    return [row.rstrip("\n") for row in _ROW.split(f"\n{rows}") if row.startswith("Name: ")]


def read_profile(profile: str | Sequence[Json] | None) -> tuple[tuple[str, float], ...]:
    """Name and mean milliseconds of every layer execution, in order; names may repeat.

    The first entry that trtexec writes counts runs and has no name.
    """
    if profile is None:
        return ()
    entries = _loaded(profile, _LAYER_PROFILE) if isinstance(profile, str) else profile
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise _unusable(_LAYER_PROFILE, "it is not a list of layers")
    named = (entry for entry in entries if "name" in entry)
    return tuple((str(entry["name"]), _milliseconds(entry, "averageMs")) for entry in named)


def read_times(text: str) -> tuple[float, ...]:
    """GPU compute milliseconds of every query that ``--exportTimes`` wrote."""
    found = _loaded(text, "list of times")
    if not isinstance(found, list) or not all(isinstance(query, Mapping) for query in found):
        raise _unusable("list of times", "it is not a list of queries")
    return tuple(_milliseconds(query, "computeMs") for query in found)


def _loaded(text: str, what: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise _unusable(what, f"it is not JSON: {error}") from None


def _milliseconds(entry: Json, key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _unusable("timing", f"{key} is {value!r:.40}, which is no time")
    return float(value)


def _unusable(what: str, why: str) -> BackendError:
    return BackendError(
        f"TensorRT's {what} cannot be used: {why}",
        cure="write it anew with --exportLayerInfo, --exportProfile and --exportTimes",
    )
