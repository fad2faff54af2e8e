"""Equalization: channels of inner tensors are multiplied by powers of two, and their weights divided by these.

A product with a power of two is exact, so that all outputs stay the same, bit for bit, and the original constants can
be computed again. `qdqspec.qdq.chains` finds the channels that can be scaled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec.errors import PlacementError
from qdqspec.graph import Model
from qdqspec.graph.protos import constants_of, copied, metadata, refill, replace_values
from qdqspec.qdq.chains import (
    EQUALIZED,
    Branch,
    Equalization,
    ScaledConstant,
    branched,
    find_chains,
    held_equalizations,
)
from qdqspec.types import Placement


def scaled(values: Array, constant: ScaledConstant, exponents: Iterable[int], sign: int = 1) -> Array:
    """A constant multiplied by its factors, or divided by them with ``sign`` -1."""
    along = np.repeat(sign * constant.sign * np.array(tuple(exponents), np.int32), constant.repeat)
    shape = [-1 if index == constant.axis else 1 for index in range(values.ndim)]
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(values, along.reshape(shape)), values.dtype)


@dataclass(slots=True)
class ScaledValues:
    """The constants of a model with the factors of some changes."""

    model: Model
    values: dict[str, Array] = field(default_factory=dict)

    def of(self, tensor: str) -> Array:
        """The value of a constant."""
        return self.values[tensor] if tensor in self.values else self.model.array(tensor)

    def add(self, change: Equalization) -> bool:
        """Apply a change; ``False``, and nothing is changed, if it could not be undone bit for bit.

        It could not if a value became infinite, or too small to be exact.
        """
        found: dict[str, Array] = {}
        if change.branch is not None and change.branch.factors not in self.model.constants:
            self.values.setdefault(change.branch.factors, np.ones(len(change.exponents), np.float32))
        for constant in change.constants:
            before = self.of(constant.tensor)
            after = found[constant.tensor] = scaled(before, constant, change.exponents)
            again = scaled(after, constant, change.exponents, -1)
            if not np.isfinite(after).all() or again.tobytes() != before.tobytes():
                return False
        self.values |= found
        return True


def equalized(model: Model, changes: Collection[Equalization]) -> Model:
    """The model with these factors, which its metadata holds. They have to fit, as `misfit_of` states."""
    if not changes:
        return model
    scaling = ScaledValues(model)
    if not all(map(scaling.add, changes)):
        raise PlacementError("channels cannot be scaled exactly", where=model.where)
    proto = _replace_constants(model.flat, scaling.values)
    branches = [change.branch for change in changes if change.branch is not None]
    # the product of each branch comes before its first reader
    of_reader = {(branch.tensor, name): branch for branch in branches for name in branch.readers}
    names = {node.outputs[0]: node.name for node in model.nodes if node.outputs and not node.scope}
    nodes, made = list[onnx.NodeProto](), set[Branch]()
    for node in proto.graph.node:
        name = names.get(node.output[0], "") if node.output else ""
        branch = of_reader.get((node.input[0], name)) if node.input else None
        if branch is not None:
            if branch not in made:
                inputs, factors = [branch.tensor, branch.factors], scaling.of(branch.factors)
                nodes.append(helper.make_node("Mul", inputs, [branch.product], name=branch.product))
                proto.graph.initializer.append(numpy_helper.from_array(factors, branch.factors))
                made.add(branch)
            node.input[0] = branch.product
        nodes.append(node)
    if made:
        refill(proto.graph.node, nodes)
    records = [change.record for change in (*held_equalizations(model.flat), *changes)]
    refill(proto.metadata_props, [prop for prop in proto.metadata_props if prop.key != EQUALIZED])
    proto.metadata_props.add(key=EQUALIZED, value=json.dumps(records))
    return Model(proto, path=model.path)


def branches_of(model: Model) -> dict[str, Equalization]:
    """The changes of a model whose factors are in inserted products, by the names of the products."""
    held = held_equalizations(model.flat)
    return {change.branch.product: change for change in held if change.branch is not None}


def restored(proto: onnx.ModelProto, kept: Collection[str] = (), path: Path | None = None) -> onnx.ModelProto:
    """A model in the flat form without the factors that its metadata holds; constants in ``kept`` stay as they are.

    External data is beside the file ``path``.
    """
    if metadata(proto, EQUALIZED) is None:
        return proto
    model = Model(proto, path=path)
    new: dict[str, Array] = {}
    changes = equalizations_of(proto, model.constants)
    for change in reversed(changes):
        for constant in change.constants:
            name = constant.tensor
            if name not in kept:
                present = new[name] if name in new else model.array(name)
                new[name] = scaled(present, constant, change.exponents, -1)
    before = _replace_constants(proto, new)
    refill(before.metadata_props, [prop for prop in before.metadata_props if prop.key != EQUALIZED])
    branches = [change.branch for change in changes if change.branch is not None]
    tensors = {branch.product: branch.tensor for branch in branches}  # which their readers read again
    factors = {branch.factors for branch in branches}
    graph = before.graph
    nodes = [node for node in graph.node if not (node.output and node.output[0] in tensors)]
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = tensors.get(name, name)
    refill(graph.node, nodes)
    refill(graph.initializer, [one for one in graph.initializer if one.name not in factors])
    refill(graph.value_info, [one for one in graph.value_info if one.name not in tensors])
    return before


def equalizations_of(
    proto: onnx.ModelProto, constants: Mapping[str, TensorProto]
) -> tuple[Equalization, ...]:
    """The factors that the metadata of a model holds, of the ``constants`` of its float form.

    Damaged metadata holds none, and a change is omitted if not all its constants are there in its shapes. The factors
    of a product are in the model itself.
    """
    own = {tensor.name: tensor for tensor in proto.graph.initializer}

    def fits(change: Equalization, one: ScaledConstant) -> bool:
        is_factor = change.branch is not None and one.tensor == change.branch.factors
        tensor = (own if is_factor else constants).get(one.tensor)
        if tensor is None:
            return False
        size = list(tensor.dims)[one.axis : one.axis + 1]
        return tensor.data_type == TensorProto.FLOAT and size == [len(change.exponents) * one.repeat]

    return tuple(
        change
        for change in held_equalizations(proto)
        if all(fits(change, constant) for constant in change.constants)
    )


def misfit_of(model: Model, changes: Collection[Equalization]) -> str | None:
    """The reason why these factors would change a model's outputs; ``None`` if it can."""
    inserted = [change for change in changes if change.branch is not None]
    others = [change for change in changes if change.branch is None]
    if (why := _find_misfit(model, inserted, branched(model) if inserted else [])) is not None:
        return why
    model = equalized(model, inserted)
    chains = find_chains(model) if others else []
    return _find_misfit(model, others, [chain.by((0,) * chain.channels) for chain in chains])


def _find_misfit(
    model: Model, changes: Iterable[Equalization], possible: Collection[Equalization]
) -> str | None:
    """The reason why changes cannot be made, of those that are ``possible`` with other exponents."""
    known = {one.constants: replace(one, exponents=()) for one in possible}
    channels = {one.constants: len(one.exponents) for one in possible}
    scaling = ScaledValues(model)
    for change in changes:
        first = change.constants[0].tensor if change.constants else ""
        is_known = known.get(change.constants) == replace(change, exponents=())
        if not is_known or channels[change.constants] != len(change.exponents):
            return f"the channels that '{first}' makes cannot be scaled in it"
        if not scaling.add(change):
            return f"values of '{first}', or of a weight behind it, are too large or too small to be scaled exactly"
    return None


def touched(
    model: Model, changes: Collection[Equalization], placement: Placement
) -> tuple[Equalization, ...]:
    """The changes of tensors or constants that a placement quantizes."""
    sites = {site.tensor for site in placement.sites}
    chains = {tuple(chain.constants): chain for chain in find_chains(model)} if changes else {}
    return tuple(
        change
        for change in changes
        if sites & {*chains[change.constants].tensors, *(one.tensor for one in change.constants)}
    )


def scaled_tensors(model: Model, changes: Iterable[Equalization]) -> set[str]:
    """The tensors whose channels these changes of a model scale."""
    names = {constant.tensor for change in changes for constant in change.constants}
    own = (chain for chain in find_chains(model) if names.issuperset(one.tensor for one in chain.constants))
    return {tensor for chain in own for tensor in chain.tensors}


def _replace_constants(flat: onnx.ModelProto, new: Mapping[str, Array]) -> onnx.ModelProto:
    """A copy of a model in the flat form with other values of these constants."""
    proto = copied(flat)
    before = constants_of(flat.graph)
    replace_values(
        proto.graph, {name: _store_values(before[name], new[name]) for name in new if name in before}
    )
    return proto


def _store_values(before: TensorProto, values: Array) -> TensorProto:
    """A tensor with other values, in the same field; external data is included."""
    made = copied(before)
    for name in ("raw_data", "float_data", "external_data", "data_location"):
        made.ClearField(name)
    if before.float_data:
        made.float_data.extend(values.reshape(-1).tolist())
    else:
        made.raw_data = np.ascontiguousarray(values).astype("<f4", copy=False).tobytes()
    return made
