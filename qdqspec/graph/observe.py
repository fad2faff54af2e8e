"""Builds models whose outputs are inner tensors, including tensors in bodies of If, Loop and Scan.

A tensor of a body is passed out through the outputs of the node that has the body, level by level, flattened
and as float32. A tensor of the branch that an If does not take has no elements. A Loop returns the values of
all iterations, concatenated: as a scan output if the shape is known, else as a loop-carried variable that
grows. A Scan returns scan outputs, which must have one shape: tensors of a body inside a Scan's body whose size
differs from step to step are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec.graph.flat import Scope, bodies_of, defined_in, find_scopes
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.protos import IR_WITH_FREE_INITIALIZERS, copy_model, free_name, refill


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """A model whose outputs are inner tensors of another one; ``names`` are these tensors by output."""

    proto: onnx.ModelProto
    names: Mapping[str, str]

    def seen(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The values by tensor; those of a body are flattened, and empty if the body did not run."""
        return {self.names[name]: value for name, value in outputs.items() if name in self.names}


def with_outputs(model: Model, tensors: Iterable[str]) -> Observer:
    """The model with ``tensors`` as its only outputs.

    Graph inputs, constants and unknown tensors are skipped.
    """
    wanted = set(tensors)
    proto = copy_model(model.proto, but={"initializer", "output"})
    scopes = model.scopes
    graphs = find_scopes(proto)
    work = _Lifting(model, proto, graphs)
    for scope, copied in zip(scopes[:0:-1], graphs[:0:-1], strict=True):
        work.lift(copied, [name for name in _list_made(scope) if scope.tensors[name] in wanted])
    names = {name: name for name in _list_made(scopes[0]) if name in wanted}
    for name in names:  # without shapes: a wrong inferred shape of a dynamic model would only cause warnings
        proto.graph.output.add(name=name)
        if (known := model.elem_type(name)) is not None:
            proto.graph.output[-1].type.tensor_type.elem_type = known
    inner = work.lifted.get("", ())
    proto.graph.output.extend(_make_flat_value(flat.name) for flat in inner)
    names |= {flat.name: flat.tensor for flat in inner}
    proto.graph.initializer.extend((*model.proto.graph.initializer, *work.constants()))
    return Observer(proto=proto, names=names)


def _list_made(scope: Scope) -> Iterator[str]:
    """The tensors that a graph computes, by its own names: results of non-constant nodes, and a body's inputs."""
    constant = {name for node in scope.graph.node if is_constant_node(node) for name in node.output}
    constant |= {tensor.name for tensor in scope.graph.initializer}
    constant |= {tensor.values.name for tensor in scope.graph.sparse_initializer}
    given = {value.name for value in scope.graph.input} if scope.parent is None else set()
    yield from (name for name in defined_in(scope.graph) if name not in constant | given)


def _make_flat_value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """The values of a tensor as a one-dimensional float32 tensor ``name`` of an outer graph.

    ``size`` is its number of elements if that is the same in each run.
    """

    tensor: str
    name: str
    size: int | None = None


class _Lifting:
    """Passes values of bodies outwards. Inner bodies are processed before outer ones."""

    def __init__(self, model: Model, proto: onnx.ModelProto, scopes: Iterable[Scope]) -> None:
        self.lifted: dict[str, list[_Flat]] = {}  # by the path of the graph that they were passed to
        self._model = model
        self._taken = {name for scope in scopes for pair in scope.tensors.items() for name in pair}
        self._flat, self._empty = self._make_name("flat"), self._make_name("empty")
        proto.ir_version = max(proto.ir_version, IR_WITH_FREE_INITIALIZERS)

    def constants(self) -> list[TensorProto]:
        """Initializers of the main graph that the new nodes read; none if no body is observed."""
        if not any(self.lifted.values()):
            return []
        flat, empty = np.array([-1], np.int64), np.zeros(0, np.float32)
        return [numpy_helper.from_array(flat, self._flat), numpy_helper.from_array(empty, self._empty)]

    def lift(self, scope: Scope, own: list[str]) -> None:
        """Pass these tensors of a body, and those of its inner bodies, to the graph around it."""
        assert scope.parent is not None
        node = scope.parent.graph.node[scope.parent.names.index(scope.owner)]
        outer = self.lifted.setdefault(scope.parent.path, [])
        if node.op_type == "Scan" and self._model.opset < 9:  # a Scan had a batch axis and other attributes
            return
        for flat in [*(self._flatten(scope, name) for name in own), *self.lifted.get(scope.path, ())]:
            if node.op_type == "If":
                outer.append(self._pass_through_if(node, scope, flat))
            elif node.op_type == "Loop" and flat.size is None:
                outer.append(self._pass_through_loop(node, scope.graph, flat))
            elif flat.size is not None or flat.tensor in scope.tensors.values():  # one size in all steps
                outer.append(self._stack(node, scope.graph, scope.parent.graph, flat))

    def _flatten(self, scope: Scope, name: str) -> _Flat:
        tensor = scope.tensors[name]
        real, flat = self._make_name("real"), self._make_name("flat")
        scope.graph.node.append(helper.make_node("Cast", [name], [real], to=TensorProto.FLOAT))
        scope.graph.node.append(helper.make_node("Reshape", [real, self._flat], [flat]))
        shape = self._model.shape(tensor)
        known = None if shape is None or None in shape else int(np.prod([dim or 0 for dim in shape]))
        return _Flat(tensor=tensor, name=flat, size=known)

    def _pass_through_if(self, node: onnx.NodeProto, scope: Scope, flat: _Flat) -> _Flat:
        for attribute, branch in bodies_of(node):
            name = flat.name
            if attribute != scope.attribute:
                name = self._make_name("none")
                branch.node.append(helper.make_node("Identity", [self._empty], [name]))
            branch.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        node.output.append(self._make_name("of_if"))
        return _Flat(tensor=flat.tensor, name=node.output[-1])

    def _pass_through_loop(self, node: onnx.NodeProto, body: onnx.GraphProto, flat: _Flat) -> _Flat:
        """A loop-carried variable, to which each iteration appends."""
        carried = len(body.input) - 2
        before, after, given = self._make_name("before"), self._make_name("after"), self._make_name("of_loop")
        body.node.append(helper.make_node("Concat", [before, flat.name], [after], axis=0))
        body.input.append(_make_flat_value(before))
        ends = [*body.output[: 1 + carried], _make_flat_value(after), *body.output[1 + carried :]]
        refill(body.output, ends)
        node.input.append(self._empty)
        outputs = self._name_all_outputs(node, len(ends) - 2)
        refill(node.output, [*outputs[:carried], given, *outputs[carried:]])
        return _Flat(tensor=flat.tensor, name=given)

    def _stack(
        self, node: onnx.NodeProto, body: onnx.GraphProto, around: onnx.GraphProto, flat: _Flat
    ) -> _Flat:
        """A scan output: one row per iteration."""
        outputs = self._name_all_outputs(node, len(body.output) - (node.op_type == "Loop"))
        body.output.append(_make_flat_value(flat.name))
        stacked, given = self._make_name("stacked"), self._make_name("of_scan")
        refill(node.output, [*outputs, stacked])
        for attribute in node.attribute:
            if attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.append(0)
        around.node.append(helper.make_node("Reshape", [stacked, self._flat], [given]))
        return _Flat(tensor=flat.tensor, name=given)

    def _name_all_outputs(self, node: onnx.NodeProto, count: int) -> list[str]:
        """The node's outputs, with a name for each omitted one."""
        named = [name or self._make_name("unread") for name in node.output]
        return [*named, *(self._make_name("unread") for _ in range(count - len(named)))]

    def _make_name(self, what: str) -> str:
        """A name that no graph of the model uses."""
        return free_name(f"observed_{what}", self._taken)
