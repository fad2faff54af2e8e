"""The user's model: corrected copies of it, cautions about it, and digests of its nodes.

A copy is made where runtimes would refuse the model, compute it slowly, or misjudge it: local functions are inlined,
weights that are inputs become constants, nodes are sorted, wrong declarations of shapes are corrected, inputs are fixed
to values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from qdqspec._core.arrays import Array, allows, is_faithful, shape_text
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.node_digests import NodeDigest, pack
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text, list_text
from qdqspec.errors import SpecError
from qdqspec.graph.flat import unique_node_names
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.ops import QDQ_OPS, is_constant_node, is_default, is_fused_attention
from qdqspec.graph.protos import (
    IR_WITH_FREE_INITIALIZERS,
    all_graphs,
    copied,
    copy_model,
    free_initializers,
    graphs_inside,
    refill,
    rename_tensors,
    without_weights,
)
from qdqspec.graph.storage import save_model, tensor_bytes
from qdqspec.types import FixedValue


class OwnCopy(Model):
    """A changed copy of a user's model; its file exists as long as the copy. Messages name the user's file."""

    def __init__(
        self,
        origin: Model,
        proto: onnx.ModelProto,
        *,
        sha256: str = "",
        fixed: Mapping[str, Array] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.origin = origin
        self._notes = tuple(notes)
        self._folder = TemporaryFolder()
        path = self._folder.path / (origin.path.name if origin.path else "model.onnx")
        save_model(proto, path, base=origin.folder)
        super().__init__(load_model(path).proto, path=path, sha256=sha256 or origin.sha256)
        self.fixed = dict(fixed or {})

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
    model = load_model(path)
    notes = list[str]()
    if model.is_reordered:
        notes.append(
            "some nodes come before those whose results they read; they are in order in a copy of the model"
        )
    proto = inlined(model.proto)
    if count := len(model.proto.functions) - len(proto.functions):
        are = f"{count_text(count, 'local function')} {'is' if count == 1 else 'are'}"
        notes.append(f"{are} inlined in a copy of the model")
    # Old exporters write all initializers as inputs too: see `free_initializers`. If only some are, these are default
    # values, and stay.
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    ports = [port for port in proto.graph.input if port.name not in weights]
    has_all = len(proto.graph.input) - len(ports) >= len(weights)
    has_matrix = any(len(tensor.dims) > 1 for tensor in weights.values())
    if proto.ir_version >= IR_WITH_FREE_INITIALIZERS and has_all and has_matrix:
        proto = copy_model(proto)
        refill(proto.graph.input, ports)
        notes.append(
            "the weights are graph inputs too, which a runtime does not optimize; they are constants in a copy of the "
            "model, which is the reference, and the model as given may be slower"
        )
    # Some exporters name all dynamic dimensions ``?``. Equal names state equal sizes, and compilers refuse to build
    # such a model for other sizes.
    dims = [dim for port in proto.graph.input for dim in port.type.tensor_type.shape.dim]
    if sum(dim.dim_param == "?" for dim in dims) > 1:
        proto = copy_model(proto)
        ends = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
        for dim in (dim for port in ends for dim in port.type.tensor_type.shape.dim if dim.dim_param == "?"):
            dim.ClearField("dim_param")
        notes.append(
            "several dimensions have the name '?', which would make them equal; they have no name in a copy of the "
            "model"
        )
    if not values:
        return OwnCopy(model, proto, notes=notes) if notes else model
    changed = Model(proto, path=model.path)
    fixed = fixed_arrays(changed, values)
    digest = hashlib.sha256(model.sha256.encode())
    for name, value in sorted(fixed.items()):
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return OwnCopy(model, fix_inputs(changed, fixed), sha256=digest.hexdigest(), fixed=fixed, notes=notes)


def fixed_arrays(model: Model, values: Mapping[str, FixedValue]) -> dict[str, Array]:
    """The values as arrays for the inputs of the model. Raises `SpecError` for a value that is not valid."""
    found: dict[str, Array] = {}
    for name, value in values.items():
        if name not in model.inputs:
            raise SpecError(
                f"`inputs.values` names '{name}', which is no input of the model{did_you_mean(name, model.inputs)}",
                where=model.where,
                cure=f"its inputs: {', '.join(model.inputs)}",
            )
        elem_type, shape = model.elem_type(name), model.shape(name)
        given = np.asarray(value)
        if not elem_type or elem_type == TensorProto.STRING:
            raise SpecError(
                f"input '{name}' holds no numbers, so no value can be given to it", where=model.where
            )
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        with np.errstate(all="ignore"):
            cast = found[name] = given.astype(dtype)
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
    return found


def fix_inputs(model: Model, values: Mapping[str, Array]) -> onnx.ModelProto:
    """The model without these inputs, specialized to their values; Q and DQ are never folded.

    The branch that an If takes replaces it; its nodes and tensors keep their names if the surrounding graph has no
    such names. If the value decides nothing, the input is a constant and the rest of the model is unchanged.
    """
    proto = copy_model(model.proto)
    free_initializers(proto)
    refill(proto.graph.input, [i for i in proto.graph.input if i.name not in values])
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    changed: onnx.ModelProto | None = proto
    while changed is not None:
        folded = fold_constants(Model(changed, path=model.path)).model
        changed = _with_taken_branches(folded)
    return folded.proto


def _with_taken_branches(model: Model) -> onnx.ModelProto | None:
    """The flat form with the branch that it takes in the place of each If on a constant; ``None`` if there is none."""
    instead: dict[int, list[onnx.NodeProto]] = {}  # by the index of a node
    now: dict[str, str] = {}  # results of branches that are named as those of their If
    names = {node.name for node in model.nodes}
    sparse = list[onnx.SparseTensorProto]()
    for owner in reversed(model.nodes):  # outer ones first
        condition = owner.input_at(0)
        is_if = owner.op_type == "If" and owner.name in model.bodies and owner.index not in instead
        if not is_if or condition not in model.fixed_constants or model.array(condition).size != 1:
            continue
        name = b"then_branch" if model.array(condition).any() else b"else_branch"
        taken = next(end for end in model.bodies[owner.name] if end.attributes["attribute"] == name)
        copies = list[onnx.NodeProto]()  # for results that the branch does not make, or gives twice
        for output, source in zip(owner.outputs, taken.inputs, strict=False):
            maker = model.producer.get(source)
            if output and source not in now and maker is not None and maker.scope == taken.scope:
                now[source] = output
            elif output:
                ends = [now.get(source, source)], [output]
                copies.append(helper.make_node("Identity", *ends, name=f"{taken.scope}/{output}"))
        for tensor in onnx.GraphProto.FromString(cast("bytes", taken.attributes["body"])).sparse_initializer:
            unique = f"{taken.scope}/{tensor.values.name}"
            tensor.values.name = unique if unique in model.consumers else tensor.values.name
            sparse.append(tensor)
        path = f"{owner.scope}/" if owner.scope else ""
        for node in model.nodes_inside[owner.name]:
            instead[node.index] = []
            is_own = node.scope == taken.scope and not node.is_marker
            if is_own or node.scope.startswith(f"{taken.scope}/"):
                instead[node.index].append(copied(node.proto))
                rename_tensors(instead[node.index][0], lambda tensor: now.get(tensor, tensor))
            own = path + node.name.removeprefix(f"{taken.scope}/")
            if is_own and own not in names:
                instead[node.index][0].name = own
                names.add(own)
        instead[owner.index] = copies
    if not instead:
        return None
    flat = copy_model(model.flat, but={"node"})
    flat.graph.node.extend(n for node in model.nodes for n in instead.get(node.index, [node.proto]))
    flat.graph.sparse_initializer.extend(sparse)
    return flat


# ---- local functions -----------------------------------------------------------------------------

# Domains whose operators a runtime has kernels for: their functions are definitions for other runtimes.
_RUNTIMES = ("ai.onnx.", "com.microsoft.", "trt.")
_TOKEN = re.compile(r"^<(\d+)>")


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
    functions = {(f.domain, f.name, f.overload): f for f in called}
    copies, names = list[onnx.FunctionProto](), list[str]()

    def replace_calls(holder: onnx.GraphProto | onnx.FunctionProto, path: str | None) -> None:
        """Give each call, in bodies too, a copy of the function, with nodes named by a number: ``<17>``.

        ``path`` is that of the call around them, which gives the nodes numbers; ``None`` for the nodes of the model.
        """
        for node, name in zip(holder.node, unique_node_names(holder.node), strict=True):
            full = name if path is None else f"{path}{name}"
            key = (node.domain, node.op_type, node.overload)
            if key in functions:
                clone = copied(functions[key])
                node.op_type = clone.name = f"{clone.name}#{len(copies)}"
                node.overload = clone.overload = ""
                copies.append(clone)
                replace_calls(clone, f"{full}/")
            if path is not None:
                node.name = f"<{len(names)}>"
                names.append(full)
            for body in graphs_inside(node):
                replace_calls(body, None if path is None else "")

    light = copy_model(proto, but={"initializer"})
    refill(light.functions, ())
    replace_calls(light.graph, None)
    light.functions.extend(copies)
    flat = copy_model(inliner.inline_local_functions(light))
    for graph in all_graphs(flat.graph):
        for node in graph.node:
            if found := _TOKEN.match(node.name):  # the inliner appends to names
                node.name = names[int(found[1])]
    flat.functions.extend(f for f in proto.functions if f not in called)
    refill(flat.graph.initializer, proto.graph.initializer)
    return flat


# ---- declared shapes of outputs ------------------------------------------------------------------


def with_true_outputs(model: Model, run: Callable[[], Mapping[str, Array]]) -> Model:
    """The model, or a copy if the declared shape of an output differs from that of a ``run``, with the run's rank.

    A runtime may accept a model with a wrong shape and only warn in its log; a run with preallocated outputs, as for
    timing, then fails. The model is run only if a declared shape does not follow from the model. A dimension with
    another declared size is unknown in the copy.
    """
    light = without_weights(model.proto)
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = Model(light)
    declared = {output.name: _read_declared(output) for output in model.proto.graph.output}
    unconfirmed = {
        name: dims
        for name, dims in declared.items()
        if dims is not None and ((shape := inferred.shape(name)) is None or not allows(dims, shape))
    }
    outputs = run() if unconfirmed else {}
    wrong = {
        name: outputs[name].shape
        for name, dims in unconfirmed.items()
        if name in outputs and not allows(dims, outputs[name].shape)
    }
    if not wrong:
        return model
    notes = [
        f"output '{name}': {shape_text(unconfirmed[name])} is declared, {list(shape)} is computed; corrected in a copy "
        "of the model"
        for name, shape in wrong.items()
    ]
    proto = copy_model(model.proto)
    for output in (output for output in proto.graph.output if output.name in wrong):
        shape, dims = wrong[output.name], output.type.tensor_type.shape.dim
        if len(dims) != len(shape):
            refill(dims, [onnx.TensorShapeProto.Dimension() for _ in shape])
        for dim, size in zip(dims, shape, strict=True):
            if dim.dim_value not in (0, size):
                dim.Clear()
    return OwnCopy(model, proto, fixed=model.fixed, notes=notes)


def _read_declared(output: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = output.type.tensor_type
    if not output.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim)


# ---- cautions ------------------------------------------------------------------------------------

_INTEGER = frozenset({"ConvInteger", "MatMulInteger"})
# of domain com.microsoft
_DYNAMIC = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})


def cautions(model: Model, *, searched: bool = True) -> Iterator[str]:
    """Properties that make measurements unreliable, each a sentence with advice; none for an ordinary model.

    With ``searched`` also properties that limit a search.
    """
    if random := model.random_nodes:
        yield (
            f"its outputs are random ({_listed(random)}): comparing them proves little; export it for inference, or "
            "if an input scales the random numbers, give data where it is 0"
        )
    kinds = {output.name: output.type for output in model.proto.graph.output}
    unseen = [
        name
        for name, kind in kinds.items()
        if kind.HasField("value")
        and (not kind.HasField("tensor_type") or kind.tensor_type.elem_type == TensorProto.STRING)
    ]
    if unseen:
        yield f"outputs that are no tensors of numbers are not compared: {_listed(unseen)}"
    if not searched:
        return
    if present := [node.name for node in model.nodes if node.op_type in QDQ_OPS]:
        yield (
            f"it contains Q/DQ already ({_listed(present)}): it is part of the reference, and further pairs are "
            "tried around it; to search from the float model: qdqspec strip"
        )
    # products of integers whose ranges are found at run time, as `quantize_dynamic` writes them
    if dynamic := [n.name for n in model.nodes if n.op_type in (_INTEGER if is_default(n) else _DYNAMIC)]:
        yield (
            f"integer operators with ranges found at run time are in it already ({_listed(dynamic)}): they are part of "
            "the reference and of each candidate, and pairs are tried on other operators only; to search from the "
            "float model: qdqspec strip"
        )
    if fused := [node.name for node in model.nodes if is_fused_attention(node)]:
        yield (
            f"an optimizer has fused its attentions ({_listed(fused)}): the model before that step gives the search "
            "more choices, and may become faster"
        )


def _listed(names: Sequence[str]) -> str:
    return list_text([f"'{name}'" for name in names], 3)


# ---- digests -------------------------------------------------------------------------------------


def digests_of(model: Model) -> str:
    """Digests of operator sets, inputs, nodes in order, and outputs as one text, for messages about a changed model.

    See `qdqspec._core.node_digests`. Reads all weights.
    """
    makers: dict[str, tuple[int, int]] = {}
    rows: list[NodeDigest] = []

    @cache
    def constant(tensor: str) -> str:
        proto = model.constants[tensor]
        return (
            f"={_digest(f'{proto.data_type} {list(proto.dims)}'.encode(), tensor_bytes(proto, model.folder))}"
        )

    def source(tensor: str) -> str:
        """The constant, or the number of rows between this one and the producer, and the output if not the first."""
        if tensor in model.constants:
            return constant(tensor)
        if tensor not in makers:
            return ""
        maker, output = makers[tensor]
        return f"{len(rows) - maker}.{output}" if output else str(len(rows) - maker)

    def add(name: str, op_type: str, attributes: str, inputs: Sequence[str] = ()) -> None:
        rows.append(NodeDigest(name, op_type, attributes, tuple(map(source, inputs))))

    for opset in model.proto.opset_import:
        add(opset.domain or "ai.onnx", "operator set", str(opset.version))
    for port in model.flat.graph.input:
        if port.name not in model.initializers:
            makers[port.name] = len(rows), 0
            add(port.name, "input", _digest(port.type.SerializeToString(deterministic=True)))
    for node in model.nodes:
        if is_constant_node(node):
            continue
        attributes = sorted(each.SerializeToString(deterministic=True) for each in node.proto.attribute)
        made = {tensor: (len(rows), index) for index, tensor in enumerate(node.outputs) if tensor}
        add(node.name, node.op_type, _digest(node.domain.encode(), *attributes), node.inputs)
        makers |= made
    for port in model.flat.graph.output:
        add(port.name, "output", "", [port.name])
    return pack(rows)


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=3)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()
