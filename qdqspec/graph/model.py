"""A read-only view of an ONNX model: unique node names, producers, consumers, types, hash.

The nodes of bodies of If, Loop and Scan are nodes of the model like those of the main graph. The view is
independent of quantization, backends and specs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import onnx
from onnx import TensorProto, shape_inference

from qdqspec._core.arrays import Array
from qdqspec.errors import ModelError
from qdqspec.graph.check import check_model, external_files, first_line, sort_nodes, type_problem
from qdqspec.graph.flat import (
    LEAVE,
    MARKERS,
    Scope,
    closed,
    find_scopes,
    flat_form,
    is_flat,
    scopes_of,
    unique_node_names,
)
from qdqspec.graph.ops import RANDOM, is_constant_node, is_default
from qdqspec.graph.protos import (
    IR_WITH_FREE_INITIALIZERS,
    map_tensors,
    metadata,
    names_read_inside,
    opset_of,
    values_of_constants,
    without_weights,
)
from qdqspec.graph.storage import LARGE, LARGEST, array_of, read_light, with_own_bytes
from qdqspec.graph.trt import meanings
from qdqspec.graph.unify import unified
from qdqspec.types import Consumer

__all__ = ["Model", "Node", "TensorType", "load_model"]


CONVERTED_FROM = "qdqspec.converted_from"  # model metadata
_TRAINS = 2  # index of Dropout's input `training_mode`
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the main graph or of a body; a tensor of a body has its unique name.

    ``name`` is unique: unnamed and repeated ones are ``OpType#number``, and those of a body begin with its
    path, which is the ``scope``. ``proto`` is the node in the flat form of the model: see
    `qdqspec.graph.flat`.
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    proto: onnx.NodeProto
    scope: str = ""

    @property
    def is_marker(self) -> bool:
        """Whether the node is not an operator, but makes the inputs of a body or reads its outputs."""
        return self.domain == MARKERS

    @property
    def attributes(self) -> dict[str, object]:
        """Attribute values by name, as Python values."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.proto.attribute}

    def number(self, name: str, default: NumberT) -> NumberT:
        """The value of an attribute that is a number, in the type of its default."""
        return type(default)(cast("float", self.attributes.get(name, default)))

    def input_at(self, index: int) -> str:
        """The tensor read at an input; empty if that is omitted."""
        return self.inputs[index] if index < len(self.inputs) else ""

    @property
    def body_reads(self) -> frozenset[str]:
        """Names read by its bodies whose nodes are not nodes of the model, including those made inside."""
        return frozenset(names_read_inside(self.proto))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (a ``onnx.TensorProto`` number) and shape; unknown or symbolic dimensions are ``None``."""

    elem_type: int
    shape: tuple[int | None, ...] | None


class Model:
    """A loaded model. ``proto`` is never changed; changed copies are built instead.

    ``sha256`` is over the file's bytes and its external data, so a copy elsewhere is the same model.
    ``Constant`` nodes count as initializers: see `constants`. ``flat`` is the form that changed copies are
    made of, in which the nodes of bodies are in one graph with the others; a model without bodies is its own
    flat form. A model can be made of either. ``is_reordered`` is whether the file has its nodes in another order.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        *,
        path: Path | None = None,
        sha256: str | None = None,
        is_reordered: bool = False,
    ) -> None:
        self.path = path
        self.is_reordered = is_reordered
        self._given = proto
        self._sha256 = sha256
        self.fixed: Mapping[str, Array] = {}  # inputs that a copy of the user's model has fixed
        self.flat = flat_form(proto)
        self.has_bodies = is_flat(self.flat)
        self.nodes: tuple[Node, ...] = tuple(_make_nodes(self.flat.graph.node))

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model in ONNX's form, each body in its node."""
        return closed(self._given) if is_flat(self._given) else self._given

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """All graphs of the model in ONNX's form, each before its bodies."""
        return find_scopes(self.proto)

    def close_bodies(
        self, flat: onnx.ModelProto, replaced: Mapping[str, str] | None = None
    ) -> onnx.ModelProto:
        """A changed copy of the flat form in ONNX's form; itself if the model has no bodies.

        ``replaced`` has the initializers in whose place new ones are: see `qdqspec.graph.flat`.
        """
        return closed(flat, replaced) if self.has_bodies else flat

    @property
    def where(self) -> str:
        """The name of this model in error messages."""
        return str(self.path) if self.path else "the model"

    @property
    def sha256(self) -> str:
        """Hash of the model with its weights."""
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.proto.SerializeToString(deterministic=True)).hexdigest()
        return self._sha256

    @cached_property
    def opset(self) -> int:
        """Version of the default operator set."""
        return opset_of(self.proto)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by their unique name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that makes a tensor; graph inputs and initializers have none."""
        return {out: node for node in self.nodes for out in node.outputs if out}

    @cached_property
    def consumers(self) -> dict[str, tuple[Consumer, ...]]:
        """The inputs of nodes that read a tensor, in graph order."""
        found: dict[str, list[Consumer]] = {}
        for node in self.nodes:
            for index, tensor in enumerate(node.inputs):
                if tensor:
                    found.setdefault(tensor, []).append(Consumer(node.name, index))
        return {tensor: tuple(ends) for tensor, ends in found.items()}

    def readers(self, tensor: str) -> tuple[Node, ...]:
        """The nodes that read a tensor, each as often as it reads it."""
        return tuple(self.by_name[end.node] for end in self.consumers.get(tensor, ()))

    @cached_property
    def bodies(self) -> dict[str, tuple[Node, ...]]:
        """For each node with bodies, the markers at the end of each body, which read the outputs of the body."""
        if not self.has_bodies:
            return {}
        ends = {node.outputs[0]: node for node in self.nodes if node.is_marker and node.op_type == LEAVE}
        owners = [node for node in self.nodes if not ends.keys().isdisjoint(node.proto.input)]
        return {node.name: tuple(ends[t] for t in node.proto.input if t in ends) for node in owners}

    @cached_property
    def nodes_inside(self) -> dict[str, tuple[Node, ...]]:
        """The nodes of the bodies of a node, including markers and those of inner bodies, by its name."""
        if not self.has_bodies:
            return {}
        by_scope: dict[str, list[Node]] = {}
        for node in self.nodes:
            by_scope.setdefault(node.scope, []).append(node)
        found: dict[str, tuple[Node, ...]] = {}
        for owner, ends in self.bodies.items():  # inner bodies come first
            own = [node for end in ends for node in by_scope[end.scope]]
            found[owner] = (*own, *(inner for node in own for inner in found.get(node.name, ())))
        return found

    @cached_property
    def output_ends(self) -> dict[str, Consumer]:
        """Graph outputs as consumers of their tensors; for a tensor that is several outputs, the first."""
        return {name: Consumer("", index) for index, name in reversed([*enumerate(self.outputs)])}

    def ends(self, tensor: str) -> tuple[Consumer, ...]:
        """All readers of a tensor: the graph output, if it is one, and its `consumers`."""
        readers = self.consumers.get(tensor, ())
        return (self.output_ends[tensor], *readers) if tensor in self.output_ends else readers

    @cached_property
    def subgraph_reads(self) -> frozenset[str]:
        """Tensors read by bodies whose nodes are not nodes of the model (those of SequenceMap)."""
        return frozenset(name for node in self.nodes for name in names_read_inside(node.proto))

    @cached_property
    def captured(self) -> frozenset[str]:
        """Tensors that another graph than their own reads, without constants; with those of `subgraph_reads`."""
        if not self.has_bodies:
            return self.subgraph_reads
        makers = {out: node.scope for node in self.nodes for out in node.outputs}
        read = {
            (name, node.scope) for node in self.nodes for name in node.inputs if name not in self.constants
        }
        return self.subgraph_reads | {name for name, scope in read if makers.get(name, "") != scope}

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """Initializers of all graphs by name."""
        return {t.name: t for t in self.flat.graph.initializer}

    @cached_property
    def constants(self) -> dict[str, onnx.TensorProto]:
        """Initializers and the values of ``Constant`` nodes, by tensor name."""
        return self.initializers | dict(values_of_constants(node.proto for node in self.nodes))

    def array(self, tensor: str) -> np.ndarray:
        """The value of a constant tensor. The array is shared and must not be changed."""
        return array_of(self.constants[tensor], self.folder)

    @property
    def folder(self) -> Path | None:
        """The folder that locations of external data are relative to."""
        return None if self.path is None else self.path.parent

    @cached_property
    def fixed_constants(self) -> frozenset[str]:
        """The constants that no caller can replace: from IR version 4 on, an input may override its initializer."""
        fed = self.flat.graph.input if self.flat.ir_version >= IR_WITH_FREE_INITIALIZERS else ()
        return frozenset(self.constants) - {port.name for port in fed}

    @property
    def is_large(self) -> bool:
        """Whether the weights stay in the model's file, which is large."""
        return self.path is not None and self.path.stat().st_size >= LARGE

    def with_own_weights(self) -> onnx.ModelProto:
        """A copy that includes external data."""
        return map_tensors(self.proto, lambda tensor: with_own_bytes(tensor, self.folder))

    def external_files(self) -> tuple[Path, ...]:
        """The files beside the model that hold weights."""
        return tuple(external_files(self.proto, self.path)) if self.path else ()

    @property
    def converted_from(self) -> str:
        """The float type before a conversion to float32, if the model was converted or derives from one that was."""
        return metadata(self.proto, CONVERTED_FROM) or ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on changes of the model; empty for a model as read."""
        return ()

    @property
    def user_files(self) -> tuple[Path, ...]:
        """The user's files that the model comes from, which must not be overwritten."""
        return (*(() if self.path is None else (self.path,)), *self.external_files())

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Graph inputs that a caller must feed: those without an initializer."""
        return tuple(i.name for i in self.flat.graph.input if i.name not in self.initializers)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Graph outputs."""
        return tuple(o.name for o in self.flat.graph.output)

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Inferred element types and shapes of the tensors, also by `unified`; unknown tensors are missing."""
        found: dict[str, TensorType] = {}
        one = cache(TensorType)  # a model has thousands of tensors and few types
        light = without_weights(self.proto)  # which saves memory and avoids the 2 GB limit
        light.functions.extend(meanings(light))
        with suppress(Exception):  # inference is best effort: unknown tensors are not offered
            light = shape_inference.infer_shapes(light, data_prop=True)
        for scope in find_scopes(light) if self.has_bodies else (None,):
            graph = light.graph if scope is None else scope.graph
            unique = str if scope is None else scope.unique
            weights = {unique(t.name): t for t in graph.initializer}
            found |= {name: one(t.data_type, tuple(t.dims)) for name, t in weights.items()}
            for info in (*graph.input, *graph.output, *graph.value_info):
                kind = info.type.tensor_type
                if info.type.HasField("tensor_type"):
                    dims = (d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
                    shape = tuple(dims) if kind.HasField("shape") else None
                    found.setdefault(unique(info.name), one(kind.elem_type, shape))
        for name, tensor in self.constants.items():
            found.setdefault(name, one(tensor.data_type, tuple(tensor.dims)))
        known = {name: type_.elem_type for name, type_ in found.items() if type_.elem_type}
        if any(out not in known for node in self.nodes for out in node.outputs if out):
            elem_types = unified([node.proto for node in self.nodes], self.opset, known)
            shapes = {name: found[name].shape if name in found else None for name in elem_types}
            found |= {name: one(elem_type, shapes[name]) for name, elem_type in elem_types.items()}
        return found

    def elem_type(self, tensor: str) -> int | None:
        """Element type of a tensor, or ``None`` if unknown."""
        known = self.types.get(tensor)
        return known.elem_type if known else None

    @cached_property
    def float16_nodes(self) -> tuple[Node, ...]:
        """The operators other than Cast that read or make a float16 tensor: with any, the model computes in float16."""
        operators = (n for n in self.nodes if not (n.is_marker or is_constant_node(n)))
        able = (n for n in operators if n.op_type != "Cast" or not is_default(n))
        half = TensorProto.FLOAT16
        return tuple(n for n in able if any(self.elem_type(t) == half for t in (*n.inputs, *n.outputs) if t))

    @cached_property
    def random_nodes(self) -> tuple[str, ...]:
        """The names of nodes that draw random numbers in each run."""
        found = []
        for node in filter(is_default, self.nodes):
            # an input decides on Dropout since opset 12, and a computed one may change
            mode = node.input_at(_TRAINS) if node.op_type == "Dropout" else ""
            trains = mode and (mode not in self.constants or self.array(mode).any())
            if trains or node.op_type in RANDOM:
                found.append(node.name)
        return tuple(found)

    def type_problem(self) -> str:
        """The first problem in types and shapes that ONNX's checker finds; empty if there is none."""
        return type_problem(self.proto)

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Shape of a tensor (unknown dimensions ``None``), or ``None`` if the rank is unknown."""
        known = self.types.get(tensor)
        return known.shape if known else None

    def named_dims(self, name: str) -> tuple[int | str | None, ...]:
        """The dimensions of an input: sizes, names of dynamic ones, or ``None``."""
        port = next(value for value in self.proto.graph.input if value.name == name)
        dims = port.type.tensor_type.shape.dim
        return tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or None
            for dim in dims
        )


def load_model(path: Path | str) -> Model:
    """Read and validate a model.

    Raises `ModelError` naming the file if it is missing, not ONNX, invalid, or lacks external data: see
    `qdqspec.graph.check`. External data stays on disk: tensors keep their references. So do the weights of a
    file of 64 MiB and more, which then refer to the file itself: see `qdqspec.graph.storage`.
    """
    path = Path(path).absolute()
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            raise ModelError(
                "this is a folder, not a model file", where=path, cure="name the .onnx file in it"
            )
        if not path.exists():
            raise ModelError("there is no such model file", where=path, cure="check the path")
        if not path.is_file():
            raise ModelError("this is a device or a pipe, not a model file", where=path, cure="name a file")
        if (size := path.stat().st_size) >= LARGEST:
            raise ModelError(
                f"the file has {size:,} bytes, and a message of protobuf has less than 2 GiB",
                where=path,
                cure="save its weights beside it: onnx.save_model(model, path, save_as_external_data=True)",
            )
        proto = read_light(path) if size >= LARGE else onnx.load(str(path), load_external_data=False)
        with path.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"the model cannot be read: {error.strerror}", where=path) from None
    except Exception as error:  # noqa: BLE001 - protobuf raises its own, version-dependent classes
        raise ModelError(
            f"this is not a readable ONNX file ({first_line(error)})",
            where=path,
            cure="export the model again" if path.suffix == ".onnx" else "name an ONNX model",
        ) from None
    is_reordered = sort_nodes(proto, path)
    check_model(proto, path)
    for file in external_files(proto, path):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, lambda: digest)
    return Model(proto, path=path, sha256=digest.hexdigest(), is_reordered=is_reordered)


def _make_nodes(protos: Sequence[onnx.NodeProto]) -> Iterator[Node]:
    bodies: set[str] = set()  # the tensors that represent them
    named = zip(unique_node_names(protos), protos, scopes_of(protos), strict=True)
    for index, (name, proto, scope) in enumerate(named):
        inputs, outputs = tuple(proto.input[:]), tuple(proto.output[:])
        if bodies and not bodies.isdisjoint(inputs):
            inputs = tuple(tensor for tensor in inputs if tensor not in bodies)
        if proto.domain == MARKERS and proto.op_type == LEAVE:
            bodies.update(outputs)
        yield Node(index, name, proto.op_type, proto.domain, inputs, outputs, proto, scope)


def require_path(model: Model) -> Path:
    """The model's file; raises `ModelError` for a model in memory, which must be saved before it can be built."""
    if model.path is None:
        raise ModelError("the model has no file", cure="save it and load it with load_model")
    return model.path
