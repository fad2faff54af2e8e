"""The input model: the user's model, or a changed copy of it, such as one with its local functions inlined.

Inputs can be fixed to values: constants are folded, and an If on a constant becomes its taken branch.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text
from qdqspec.errors import SpecError
from qdqspec.graph.declared import allows, contradictions, redeclared, shape_text
from qdqspec.graph.flat import bodies_of, free_name, unique_node_names
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.ops import is_default
from qdqspec.graph.opset import IR_WITH_FREE_INITIALIZERS, free_initializers
from qdqspec.graph.protos import (
    all_graphs,
    copy_model,
    graphs_inside,
    is_external,
    refill,
    values_of_constants,
)
from qdqspec.graph.save import save_model
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
    """The user's model with local functions inlined, weights that are also inputs made constant, these inputs fixed.

    Raises `SpecError` for a value that is not valid for its input. The hash is over the user's model and the values.
    """
    loaded = _separate_dimensions(_fix_weights(_inline_calls(load_model(path))))
    if not values:
        return loaded
    fixed = fixed_arrays(loaded, values)
    digest = hashlib.sha256(loaded.sha256.encode())
    for name, value in sorted(fixed.items()):
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return OwnCopy(loaded, fix_inputs(loaded, fixed), sha256=digest.hexdigest(), fixed=fixed)


def _inline_calls(model: Model) -> Model:
    proto = inlined(model.proto)
    if proto is model.proto:
        return model
    count = len(model.proto.functions) - len(proto.functions)
    inlined_text = f"{count_text(count, 'local function')} {'is' if count == 1 else 'are'} inlined"
    notes = [f"{inlined_text} in a copy of the model"]
    return OwnCopy(model, proto, sha256=model.sha256, notes=notes)


def _fix_weights(model: Model) -> Model:
    """The model, or a copy if all initializers are inputs too, as old exporters write them: see `free_initializers`.

    If only some initializers are inputs, these are default values, and stay.
    """
    weights = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    listed = [port for port in model.proto.graph.input if port.name in weights]
    has_matrix = any(len(tensor.dims) > 1 for tensor in weights.values())
    if model.proto.ir_version < IR_WITH_FREE_INITIALIZERS or len(listed) < len(weights) or not has_matrix:
        return model
    proto = copy_model(model.proto)
    refill(proto.graph.input, [port for port in proto.graph.input if port.name not in weights])
    note = (
        "the weights are graph inputs too, which a runtime does not optimize; they are constants in a copy of the "
        "model, which is the reference, and the model as given may be slower"
    )
    return OwnCopy(model, proto, sha256=model.sha256, notes=[note])


def _separate_dimensions(model: Model) -> Model:
    """The model, or a copy if several dimensions of its inputs have the name ``?``, as some exporters write them.

    Equal names state equal sizes. Compilers refuse to build such a model for other sizes.
    """
    ports = [*model.proto.graph.input, *model.proto.graph.output, *model.proto.graph.value_info]
    places = [
        (number, index)
        for number, port in enumerate(ports)
        for index, dim in enumerate(port.type.tensor_type.shape.dim)
        if dim.dim_param == "?"
    ]
    if sum(number < len(model.proto.graph.input) for number, _ in places) < 2:
        return model
    proto = copy_model(model.proto)
    ports = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    for number, index in places:
        ports[number].type.tensor_type.shape.dim[index].ClearField("dim_param")
    note = "several dimensions have the name '?', which would make them equal; they have no name in a copy of the model"
    return OwnCopy(model, proto, sha256=model.sha256, notes=[note])


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


# Domains whose operators a runtime has kernels for: their functions are definitions for other runtimes.
_RUNTIMES = ("ai.onnx.", "com.microsoft.", "trt.")
_TOKEN = re.compile(r"^<(\d+)>")
_Key: TypeAlias = tuple[str, str, str]  # domain, name and overload of a function


def inlined(proto: onnx.ModelProto, *, kept: tuple[str, ...] = _RUNTIMES) -> onnx.ModelProto:
    """A copy with local functions inlined; the model itself if it has none.

    Functions whose domain begins with one of ``kept`` stay calls, by default those in the domain of a runtime, as do
    those of operator sets in another version than the model's. A node of a function is named ``<call>/<node>``.
    """
    imports = {(o.domain or "ai.onnx", o.version) for o in proto.opset_import}
    called = [
        function
        for function in proto.functions
        if function.domain
        and not f"{function.domain}.".startswith(kept)
        and all((o.domain or "ai.onnx", o.version) in imports for o in function.opset_import)
    ]
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
        """Replace the function of a call by a copy; other nodes are unchanged."""
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


# ---- fixed inputs ------------------------------------------------------------------------------

_TAKEN = {True: "then_branch", False: "else_branch"}


def fixed_arrays(model: Model, values: Mapping[str, FixedValue]) -> dict[str, Array]:
    """The values as arrays for the inputs of the model. Raises `SpecError` for a value that is not valid."""
    return {name: _convert_value(model, name, value) for name, value in values.items()}


def fix_inputs(model: Model, values: Mapping[str, Array]) -> onnx.ModelProto:
    """The model without these inputs, specialized to their values; Q and DQ are never folded.

    Tensors of a taken branch keep their names if the surrounding graph has no such names. If the value
    decides nothing, the input is a constant and the rest of the model is unchanged.
    """
    proto = copy_model(model.proto)
    free_initializers(proto)
    refill(proto.graph.input, [i for i in proto.graph.input if i.name not in values])
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    while True:
        proto = copy_model(fold_constants(Model(proto, path=model.path)).model.proto)
        if not _inline_constant_ifs(proto.graph, {}):
            return proto


def _convert_value(model: Model, name: str, value: FixedValue) -> Array:
    if name not in model.inputs:
        raise SpecError(
            f"`inputs.values` names '{name}', which is no input of the model{did_you_mean(name, model.inputs)}",
            where=model.where,
            cure=f"its inputs: {', '.join(model.inputs)}",
        )
    elem_type, shape = model.elem_type(name), model.shape(name)
    given = np.asarray(value)
    if not elem_type or elem_type == TensorProto.STRING:
        raise SpecError(f"input '{name}' holds no numbers, so no value can be given to it", where=model.where)
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    with np.errstate(all="ignore"):
        cast = given.astype(dtype)
    if (given.dtype == np.bool_) != (dtype == np.bool_) or not is_faithful(given, cast):
        raise SpecError(
            f"the value of input '{name}' is {value!r:.60}, and the model takes {dtype}",
            where=model.where,
            cure=f"give `inputs.values` a value that {dtype} holds",
        )
    if shape is not None and not allows(shape, cast.shape):
        raise SpecError(
            f"the value of input '{name}' has shape {list(cast.shape)}, and the model takes {shape_text(shape)}",
            where=model.where,
            cure="write a scalar as 16000, an input of one element as [16000]",
        )
    return cast


def is_faithful(given: Array, cast: Array) -> bool:
    """Whether the cast is valid: floats may be rounded and be infinite, not overflow; others keep their value."""
    if np.issubdtype(cast.dtype, np.integer) or cast.dtype == np.bool_:
        return bool((given == cast).all())
    return bool((np.isfinite(cast) | np.isinf(given)).all())


# ---- branches ------------------------------------------------------------------------------------


def _inline_constant_ifs(graph: onnx.GraphProto, around: Mapping[str, TensorProto]) -> bool:
    """Replace each If of a graph and its bodies whose condition is constant; return whether there was one."""
    constants = {**around, **_find_constants(graph)}
    found = False
    while (taken := _find_constant_if(graph, constants)) is not None:
        number, attribute = taken
        owner = graph.node[number]
        path = f"{list(unique_node_names(graph.node))[number]}/{attribute}"
        branch = next(body for key, body in bodies_of(owner) if key == attribute)
        inlined = _inline_branch(graph, owner, branch, path)
        refill(graph.node, [*graph.node[:number], *inlined, *graph.node[number + 1 :]])
        constants |= _find_constants(graph)
        found = True
    for node in graph.node:
        for _, body in bodies_of(node):
            found |= _inline_constant_ifs(body, constants)
    return found


def _find_constant_if(graph: onnx.GraphProto, constants: Mapping[str, TensorProto]) -> tuple[int, str] | None:
    """The index of the first If on a constant, and the branch that it takes."""
    for number, node in enumerate(graph.node):
        is_if = node.op_type == "If" and is_default(node)
        tensor = constants.get(node.input[0]) if is_if else None
        if tensor is not None and not is_external(tensor):
            value = numpy_helper.to_array(tensor)
            if value.size == 1:
                return number, _TAKEN[bool(value.reshape(-1)[0])]
    return None


def _find_constants(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    replaced = {value.name for value in graph.input}  # by the caller's feed
    found = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in replaced}
    return found | dict(values_of_constants(graph.node))


def _inline_branch(
    graph: onnx.GraphProto, owner: onnx.NodeProto, given: onnx.GraphProto, path: str
) -> list[onnx.NodeProto]:
    """The nodes of a branch as nodes of the graph; its weights become the graph's."""
    branch = copy.deepcopy(given)
    now, alike = _choose_names(graph, owner, branch, path)
    taken = {node.name for node in graph.node if node is not owner}
    for part in all_graphs(branch):
        _rename(part, now)
    for node in branch.node:
        if node.name and node.name in taken:
            node.name = f"{path}/{node.name}"
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    graph.value_info.extend(v for v in branch.value_info if v.name not in owner.output)
    copies = [helper.make_node("Identity", [source], [name], name=f"{path}/{name}") for name, source in alike]
    return [*branch.node, *copies]


def _choose_names(
    graph: onnx.GraphProto, owner: onnx.NodeProto, branch: onnx.GraphProto, path: str
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Names in the graph for tensors of a branch, and outputs of the If that are copies of another tensor."""
    made = [name for node in branch.node for name in node.output if name]
    own = [*made, *(t.name for t in branch.initializer), *(t.values.name for t in branch.sparse_initializer)]
    given = [output.name for output in branch.output]
    now: dict[str, str] = {}
    alike: list[tuple[str, str]] = []
    for name, source in zip(owner.output, given, strict=False):
        if name and source in made and source not in now:
            now[source] = name
        elif name:
            alike.append((name, source))
    taken = set(_list_names(graph, but=owner)) | set(owner.output)
    for name in own:
        if name not in now:
            now[name] = free_name(f"{path}/{name}" if name in taken else name, taken)
    return now, [(name, now.get(source, source)) for name, source in alike]


def _list_names(graph: onnx.GraphProto, *, but: onnx.NodeProto) -> Iterator[str]:
    """All names that a graph and the bodies in it define or read, except inside one node."""
    yield from _list_given(graph)
    for node in graph.node:
        yield from (*node.input, *node.output)
        if node is not but:
            for _, body in bodies_of(node):
                for part in all_graphs(body):
                    yield from _list_given(part)
                    yield from (name for inner in part.node for name in (*inner.input, *inner.output))


def _list_given(graph: onnx.GraphProto) -> Iterable[str]:
    return [value.name for value in (*graph.input, *graph.output, *graph.initializer)]


def _rename(graph: onnx.GraphProto, now: Mapping[str, str]) -> None:
    for node in graph.node:
        refill(node.input, [now.get(name, name) for name in node.input])
        refill(node.output, [now.get(name, name) for name in node.output])
    for named in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        named.name = now.get(named.name, named.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = now.get(sparse.values.name, sparse.values.name)
