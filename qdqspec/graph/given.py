"""The input model: the user's model, or a changed copy of it, such as one with its local functions inlined."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx
from onnx import inliner

from qdqspec.arrays import Array
from qdqspec.graph.declared import contradictions, redeclared
from qdqspec.graph.fixed import fix_inputs, fixed_arrays
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import all_graphs, copy_model, graphs_inside, refill
from qdqspec.graph.save import save_model
from qdqspec.graph.scopes import unique_node_names
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import FixedValue


class OwnCopy(Model):
    """A changed copy of a user's model; its file exists as long as the copy. Messages name the user's file."""

    def __init__(
        self,
        origin: Model,
        proto: onnx.ModelProto,
        *,
        sha256: str,
        fixed: Mapping[str, Array] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.origin = origin
        self.fixed = dict(fixed or {})
        self._notes = tuple(notes)
        self._folder = TemporaryFolder()
        path = self._folder.path / (origin.path.name if origin.path else "model.onnx")
        save_model(proto, path, base=None if origin.path is None else origin.path.parent)
        super().__init__(load_model(path).proto, path=path, sha256=sha256)

    @property
    def where(self) -> str:
        """The name of the model in error messages: the user's file."""
        return self.origin.where

    @property
    def notes(self) -> tuple[str, ...]:
        """The changes that were made."""
        return (*self.origin.notes, *self._notes)

    @property
    def user_files(self) -> tuple[Path, ...]:
        """The files of the user's model, and the copy."""
        return (*self.origin.user_files, *super().user_files)


def given_model(path: Path, values: Mapping[str, FixedValue]) -> Model:
    """The user's model with local functions inlined and these inputs fixed.

    Raises `SpecError` for a value that is not valid for its input.

    The hash of a model with fixed inputs is over the user's model and the values.
    """
    loaded = _without_calls(load_model(path))
    if not values:
        return loaded
    fixed = fixed_arrays(loaded, values)
    return OwnCopy(loaded, fix_inputs(loaded, fixed), sha256=_digest(loaded, fixed), fixed=fixed)


def _without_calls(model: Model) -> Model:
    proto = inlined(model.proto)
    if proto is model.proto:
        return model
    gone = len(model.proto.functions) - len(proto.functions)
    notes = [f"{gone} local functions are inlined in a copy of the model"]
    return OwnCopy(model, proto, sha256=model.sha256, notes=notes)


def with_true_outputs(model: Model, outputs: Mapping[str, Array]) -> Model:
    """The model, or a copy if the declared shape of an output differs from that of a run."""
    shapes = {name: value.shape for name, value in outputs.items() if hasattr(value, "shape")}
    wrong = contradictions(model, shapes)
    if not wrong:
        return model
    return OwnCopy(
        model,
        redeclared(model.proto, {name: shapes[name] for name in wrong}),
        sha256=model.sha256,
        fixed=fixed_in(model),
        notes=[f"output '{name}': {why}; corrected in a copy of the model" for name, why in wrong.items()],
    )


def fixed_in(model: Model) -> Mapping[str, Array]:
    """The inputs that a copy has fixed; none for the user's own model."""
    return model.fixed if isinstance(model, OwnCopy) else {}


def _digest(origin: Model, fixed: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(origin.sha256.encode())
    for name in sorted(fixed):
        value = fixed[name]
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return digest.hexdigest()


# Domains whose operators a runtime has kernels for: their functions are definitions for other runtimes.
_RUNTIMES = ("ai.onnx", "com.microsoft")
_TOKEN = re.compile(r"^<(\d+)>")
_Key: TypeAlias = tuple[str, str, str]  # domain, name and overload of a function


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with local functions inlined; the model itself if it has none.

    Functions in the domain of a runtime (``trt``, ``com.microsoft``) stay calls, as do those of operator sets in
    another version than the model's. A node of a function is named ``<call>/<node>``.
    """
    imports = {(o.domain or "ai.onnx", o.version) for o in proto.opset_import}
    called = [f for f in proto.functions if _is_inlined(f, imports)]
    if not called:
        return proto
    light = copy_model(proto, but={"initializer"})
    refill(light.functions, ())
    naming = _Naming(light, called)
    copied = copy_model(inliner.inline_local_functions(light))
    naming.restore(copied)
    copied.functions.extend(f for f in proto.functions if f not in called)
    refill(copied.graph.initializer, proto.graph.initializer)
    return copied


def _is_inlined(function: onnx.FunctionProto, imports: set[tuple[str, int]]) -> bool:
    domain = function.domain
    if not domain or domain.split(".")[0] == "trt" or domain.startswith(_RUNTIMES):
        return False
    return all((o.domain or "ai.onnx", o.version) in imports for o in function.opset_import)


class _Naming:
    """Gives each call its own copy of the function, with nodes named by a number: ``<17>``.

    The inliner appends to names; `restore` replaces the leading number by the full name.
    """

    def __init__(self, proto: onnx.ModelProto, functions: Iterable[onnx.FunctionProto]) -> None:
        self._names: list[str] = []
        self._functions = {(f.domain, f.name, f.overload): f for f in functions}
        self._copies: list[onnx.FunctionProto] = []
        for graph in all_graphs(proto.graph):
            for node, name in zip(graph.node, unique_node_names(graph.node), strict=True):
                self._call(node, name, ())
        proto.functions.extend(self._copies)

    def restore(self, proto: onnx.ModelProto) -> None:
        """Restore the names of the nodes of a model."""
        for graph in all_graphs(proto.graph):
            for node in graph.node:
                if found := _TOKEN.match(node.name):
                    node.name = self._names[int(found[1])]

    def _call(self, node: onnx.NodeProto, path: str, within: tuple[_Key, ...]) -> None:
        """If a node is a call, make it call a copy of the function."""
        called = (node.domain, node.op_type, node.overload)
        if called not in self._functions or called in within:
            return
        clone = copy.deepcopy(self._functions[called])
        node.op_type = clone.name = f"{clone.name}#{len(self._copies)}"
        node.overload = clone.overload = ""
        self._copies.append(clone)
        for inner, name in zip(clone.node, unique_node_names(clone.node), strict=True):
            self._call(inner, f"{path}/{name}", (*within, called))
            self._name(inner, f"{path}/{name}")
            for body in graphs_inside(inner):
                for graph in all_graphs(body):
                    for below, own in zip(graph.node, unique_node_names(graph.node), strict=True):
                        self._call(below, own, (*within, called))
                        self._name(below, own)

    def _name(self, node: onnx.NodeProto, name: str) -> None:
        node.name = f"<{len(self._names)}>"
        self._names.append(name)
