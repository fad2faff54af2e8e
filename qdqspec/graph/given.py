"""The user's model: corrected copies of it, cautions about it, and digests of its nodes.

A copy is made where runtimes would refuse the model, compute it slowly, or misjudge it: local functions are inlined,
weights that are inputs become constants, nodes are sorted, wrong declarations of shapes are corrected, inputs are fixed
to values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.node_digests import NodeDigest, pack
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text, list_text
from qdqspec.errors import SpecError
from qdqspec.graph.inlining import fix_inputs, inlined
from qdqspec.graph.model import QDQ_OPS, Model, allows, load_model, shape_text
from qdqspec.graph.ops import RANDOM, is_constant_node, is_default, is_fused_attention
from qdqspec.graph.protos import IR_WITH_FREE_INITIALIZERS, copy_model, refill, without_weights
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
        self.fixed = dict(fixed or {})
        self._notes = tuple(notes)
        self._folder = TemporaryFolder()
        path = self._folder.path / (origin.path.name if origin.path else "model.onnx")
        save_model(proto, path, base=origin.folder)
        super().__init__(load_model(path).proto, path=path, sha256=sha256 or origin.sha256)

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
    if model.is_reordered:
        note = (
            "some nodes come before those whose results they read; they are in order in a copy of the model"
        )
        model = OwnCopy(model, model.proto, notes=[note])
    proto = inlined(model.proto)
    if proto is not model.proto:
        count = len(model.proto.functions) - len(proto.functions)
        are = f"{count_text(count, 'local function')} {'is' if count == 1 else 'are'}"
        model = OwnCopy(model, proto, notes=[f"{are} inlined in a copy of the model"])
    # Old exporters write all initializers as inputs too: see `free_initializers`. If only some are, these are default
    # values, and stay.
    weights = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    ports = [port for port in model.proto.graph.input if port.name not in weights]
    has_all = len(model.proto.graph.input) - len(ports) >= len(weights)
    has_matrix = any(len(tensor.dims) > 1 for tensor in weights.values())
    if model.proto.ir_version >= IR_WITH_FREE_INITIALIZERS and has_all and has_matrix:
        proto = copy_model(model.proto)
        refill(proto.graph.input, ports)
        note = (
            "the weights are graph inputs too, which a runtime does not optimize; they are constants in a copy of the "
            "model, which is the reference, and the model as given may be slower"
        )
        model = OwnCopy(model, proto, notes=[note])
    model = _separate_dimensions(model)
    if not values:
        return model
    fixed = fixed_arrays(model, values)
    digest = hashlib.sha256(model.sha256.encode())
    for name, value in sorted(fixed.items()):
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return OwnCopy(model, fix_inputs(model, fixed), sha256=digest.hexdigest(), fixed=fixed)


def _separate_dimensions(model: Model) -> Model:
    """The model, or a copy if several dimensions of its inputs have the name ``?``, as some exporters write them.

    Equal names state equal sizes. Compilers refuse to build such a model for other sizes.
    """
    named = [d for port in model.proto.graph.input for d in port.type.tensor_type.shape.dim]
    if sum(dim.dim_param == "?" for dim in named) < 2:
        return model
    proto = copy_model(model.proto)
    for port in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in port.type.tensor_type.shape.dim:
            if dim.dim_param == "?":
                dim.ClearField("dim_param")
    note = "several dimensions have the name '?', which would make them equal; they have no name in a copy of the model"
    return OwnCopy(model, proto, notes=[note])


def fixed_in(model: Model) -> Mapping[str, Array]:
    """The inputs that a copy has fixed; none for the user's own model."""
    return model.fixed if isinstance(model, OwnCopy) else {}


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


def is_faithful(given: Array, cast: Array) -> bool:
    """Whether the cast is valid: floats may be rounded and be infinite, not overflow; others keep their value."""
    if np.issubdtype(cast.dtype, np.integer) or cast.dtype == np.bool_:
        return bool((given == cast).all())
    return bool((np.isfinite(cast) | np.isinf(given)).all())


# ---- declared shapes of outputs ------------------------------------------------------------------


def unconfirmed_outputs(model: Model) -> tuple[str, ...]:
    """Outputs whose declared shape does not follow from the model and may be wrong.

    A runtime may accept a model with a wrong shape and only warn in its log; a run with preallocated outputs, as for
    timing, then fails.
    """
    light = without_weights(model.proto)
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    known = Model(light)
    return tuple(
        output.name
        for output in model.proto.graph.output
        if (declared := _read_declared(output)) is not None
        and ((shape := known.shape(output.name)) is None or not allows(declared, shape))
    )


def with_true_outputs(model: Model, outputs: Mapping[str, Array]) -> Model:
    """The model, or a copy if the declared shape of an output differs from that of a run.

    Such an output is declared with the rank of the run's; a dimension with another declared size is unknown.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    notes: list[str] = []
    for output in model.proto.graph.output:
        declared, shape = _read_declared(output), getattr(outputs.get(output.name), "shape", None)
        if declared is not None and shape is not None and not allows(declared, shape):
            shapes[output.name] = shape
            why = f"{shape_text(declared)} is declared, {list(shape)} is computed"
            notes.append(f"output '{output.name}': {why}; corrected in a copy of the model")
    if not shapes:
        return model
    proto = copy_model(model.proto)
    for output in (output for output in proto.graph.output if output.name in shapes):
        shape, dims = shapes[output.name], output.type.tensor_type.shape.dim
        if len(dims) != len(shape):
            refill(dims, [onnx.TensorShapeProto.Dimension() for _ in shape])
        for dim, size in zip(dims, shape, strict=True):
            if dim.dim_value not in (0, size):
                dim.Clear()
    return OwnCopy(model, proto, fixed=fixed_in(model), notes=notes)


def _read_declared(output: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = output.type.tensor_type
    if not output.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim)


# ---- cautions ------------------------------------------------------------------------------------

_INTEGER = frozenset({"ConvInteger", "MatMulInteger"})
# of domain com.microsoft
_DYNAMIC = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})
_TRAINS = 2  # index of Dropout's input `training_mode`


def cautions(model: Model) -> Iterator[str]:
    """Properties that make measurements unreliable, each a sentence with advice; none for an ordinary model."""
    if random := random_nodes(model):
        yield (
            f"its outputs are random ({_listed(random)}): comparing them proves little; export it for inference, or "
            "if an input scales the random numbers, give data where it is 0"
        )
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
    kinds = {output.name: output.type for output in model.proto.graph.output}
    unseen = [
        name
        for name, kind in kinds.items()
        if kind.HasField("value")
        and (not kind.HasField("tensor_type") or kind.tensor_type.elem_type == TensorProto.STRING)
    ]
    if unseen:
        yield f"outputs that are no tensors of numbers are not compared: {_listed(unseen)}"


def random_nodes(model: Model) -> list[str]:
    """The names of nodes that draw random numbers in each run."""
    found = []
    for node in filter(is_default, model.nodes):
        # an input decides on Dropout since opset 12, and a computed one may change
        mode = node.input_at(_TRAINS) if node.op_type == "Dropout" else ""
        trains = mode and (mode not in model.constants or model.array(mode).any())
        if trains or node.op_type in RANDOM:
            found.append(node.name)
    return found


def _listed(names: list[str]) -> str:
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
