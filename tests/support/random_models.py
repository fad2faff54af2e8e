"""Hypothesis strategies for random valid ONNX models, and placements on them.

For property tests of code that reads or changes models. The models are small and unusual on purpose:
branches, residuals, shared initializers, `Constant` nodes, parts in other types, computed shapes, names that are
missing, repeated or similar to those of inserted Q/DQ, bodies of If, Loop and Scan, some of which read
outer tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of

from qdqspec._core.arrays import Shape
from qdqspec.graph.model import Model
from qdqspec.graph.ops import reads_data
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site

MODES = st.sampled_from(("integer", "float"))  # of inserting weights


@st.composite
def onnx_models(
    draw: st.DrawFn,
    *,
    max_nodes: int = 8,
    opsets: Sequence[int] = tuple(range(13, 22)),
    bodies: bool = True,
    repeated_names: bool = False,
) -> onnx.ModelProto:
    """A valid model with one or two float32 inputs, ``max_nodes`` groups of one or a few operators, and static shapes.

    It passes ``onnx.checker`` with shape inference and runs in ONNX Runtime, except that ``repeated_names``
    gives nodes the same name, which ONNX allows and ONNX Runtime rejects. ``bodies=False`` omits If, Loop and
    Scan.
    """
    names = ("twice", "") if repeated_names else ("",)
    build = ModelDraft(draw, opset=draw(st.sampled_from(list(opsets))), odd_names=names)
    build.add_input((1, 4, 6, 6))
    if draw(st.booleans()):
        build.add_input((3, 8))
    for _ in range(draw(st.integers(1, max_nodes))):
        build.add_node(bodies)
    return build.model()


@st.composite
def placements(
    draw: st.DrawFn,
    model: Model,
    *,
    activations: Sequence[str] = ("uint8", "int8"),
    weights: Sequence[str] = ("int8",),
) -> Placement:
    """A placement that fits the model: sites on float activations and on constants that operators read as data.

    Consumers of a tensor may be omitted, or split over several sites of different formats; those of a site
    are in one graph of the model. Graph outputs that a node computes are consumers as well. Constants without
    an axis stay float if a format is blocked.
    """
    sites: list[Site] = []
    for tensor in dict.fromkeys((*model.consumers, *model.outputs)):
        weight = tensor in model.constants
        rank = len(model.shape(tensor) or ())
        computed = tensor in model.producer and not weight
        ends = model.ends(tensor) if computed else model.consumers.get(tensor, ())
        read = ends if not weight else tuple(end for end in ends if reads_data(model, end))
        formats = [f for f in (weights if weight else activations) if rank > 1 or not number_format(f).block]
        if model.elem_type(tensor) != TensorProto.FLOAT or not read or not formats:
            continue
        for group in (part for some in draw(_groups(read)) for part in by_graph(model, some)):
            fmt = draw(st.sampled_from(formats))
            whole = [] if number_format(fmt).block else [None]
            axis = draw(st.sampled_from([*whole, *range(rank)])) if weight else None
            sites.append(Site(tensor=tensor, consumers=group, format=fmt, axis=axis, weight=weight))
    return Placement(sites=frozenset(sites))


@st.composite
def placed_models(draw: st.DrawFn, *, odd: bool = True, **kinds: Sequence[str]) -> tuple[Model, Placement]:
    """A model and a placement that fits it. Odd models have repeated node names, which ONNX Runtime rejects."""
    model = Model(draw(onnx_models(repeated_names=odd)))
    return model, draw(placements(model, **kinds))


def ranges_for(model: Model) -> dict[str, TensorRange]:
    """A plausible range for each float tensor, like calibrated ones; deterministic for a model."""
    names = sorted(name for name in model.types if model.elem_type(name) == TensorProto.FLOAT)
    return {name: TensorRange(-1.0 - index % 3, 2.0 + index % 5) for index, name in enumerate(names)}


def random_inputs(model: Model, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """One input per name for a model with static float32 inputs."""
    random = np.random.default_rng(seed)
    shapes = {name: [d or 1 for d in model.shape(name) or ()] for name in model.inputs}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def runs(model: Model) -> bool:
    """Whether ONNX Runtime runs a model with static float32 inputs, with its optimizations."""
    try:
        outputs_of(model, random_inputs(model), "ENABLE_ALL")
    except Exception:  # noqa: BLE001 - its errors have no common class
        return False
    return True


def bytes_of(proto: onnx.ModelProto) -> bytes:
    """The model as bytes that are the same for equal models."""
    return proto.SerializeToString(deterministic=True)


def floating(sites: Iterable[Site], mode: str) -> frozenset[Site]:
    """The sites whose weights stay float in ``mode``: all for ``float``, none for ``integer``."""
    return frozenset(sites if mode == "float" else ())


def quantized_model(model: Model, placement: Placement, mode: str = "integer") -> Model:
    """The model with the pairs of a placement, its weights stored as integers or left ``float``."""
    numbers, floats = Quantizer(model, ranges_for(model)), floating(placement.sites, mode)
    return Model(insert_qdq(model, placement, numbers, floating=floats).proto)


def by_graph(model: Model, ends: tuple[Consumer, ...]) -> list[tuple[Consumer, ...]]:
    """Consumers of a tensor for each graph whose nodes they are."""
    found: dict[str, list[Consumer]] = {}
    for end in ends:
        found.setdefault("" if end.is_output else model.by_name[end.node].scope, []).append(end)
    return [tuple(some) for some in found.values()]


@st.composite
def _groups(draw: st.DrawFn, ends: tuple[Consumer, ...]) -> list[tuple[Consumer, ...]]:
    """Disjoint groups of consumers; those of group 0 stay float."""
    if draw(st.booleans()):
        return [ends]
    choice = draw(st.lists(st.integers(0, 2), min_size=len(ends), max_size=len(ends)))
    split = [tuple(e for e, c in zip(ends, choice, strict=True) if c == group) for group in (1, 2)]
    return [group for group in split if group]


# ---- the state of a model while it is drawn ------------------------------------------------------

# Suffixes that Q/DQ tools append to names: a tensor of the model may have such a name.
_ENDINGS = ("", "", "", "", "_quantized", "_dequantized", "_scale", "_zero_point", ".0", "~1", ":0")
_OTHER_TYPES = (TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT32)


@dataclass(slots=True)
class ModelDraft:
    """A model under construction: its float32 tensors with their shapes, and its nodes."""

    draw: st.DrawFn
    opset: int
    odd_names: tuple[str, ...]
    shapes: dict[str, Shape] = field(default_factory=dict)
    weights: dict[str, Shape] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    count: int = 0

    def add_input(self, shape: Shape) -> None:
        name = f"input{len(self.inputs)}"
        self.inputs.append(name)
        self.shapes[name] = shape

    def add_node(self, bodies: bool) -> None:
        tensor = self.draw(st.sampled_from(list(self.shapes)))
        offers: list[Callable[[str], None]] = [self.relu, self.clip, self.add, self.concat, self.transpose]
        offers.append(self.mul)
        offers += (
            [self.reshape, self.conv, self.pool]
            if len(self.shapes[tensor]) == 4
            else [self.gemm, self.matmul]
        )
        offers += [self.retyped, self.reshaped_alike]
        if bodies:
            offers += [self.branch, self.repeated, self.scanned]
        self.draw(st.sampled_from(offers))(tensor)

    def relu(self, tensor: str) -> None:
        self.emit("Relu", [tensor], self.shapes[tensor])

    def clip(self, tensor: str) -> None:
        bounds = [self.constant(np.array(bound, np.float32)) for bound in (-1.5, 2.5)]
        self.emit("Clip", [tensor, *bounds], self.shapes[tensor])

    def add(self, tensor: str) -> None:
        shape = self.shapes[tensor]
        others = [name for name, known in self.shapes.items() if known == shape]
        self.emit("Add", [tensor, self.draw(st.sampled_from(others))], shape)

    def mul(self, tensor: str) -> None:
        """Multiply by a constant of no, one or several elements along the last axis."""
        shape = self.shapes[tensor]
        constant = self.weight(self.draw(st.sampled_from(((), (1,), shape[-1:]))))
        self.emit("Mul", self.draw(st.permutations([tensor, constant])), shape)

    def concat(self, tensor: str) -> None:
        shape = self.shapes[tensor]
        others = [
            n
            for n, s in self.shapes.items()
            if len(s) == len(shape) and s[:1] + s[2:] == shape[:1] + shape[2:]
        ]
        other = self.draw(st.sampled_from(others))
        joined = (shape[0], shape[1] + self.shapes[other][1], *shape[2:])
        if joined[1] <= 64:
            self.emit("Concat", [tensor, other], joined, axis=1)

    def transpose(self, tensor: str) -> None:
        shape = self.shapes[tensor]
        order = (0, 1, 3, 2) if len(shape) == 4 else (1, 0)
        self.emit("Transpose", [tensor], tuple(shape[i] for i in order), perm=list(order))

    def reshape(self, tensor: str) -> None:
        shape = self.shapes[tensor]
        flat = (shape[0], int(np.prod(shape[1:])))
        self.emit("Reshape", [tensor, self.constant(np.array([shape[0], -1], np.int64))], flat)

    def reshaped_alike(self, tensor: str) -> None:
        """Reshape to the computed shape of a tensor with as many elements."""
        shape = self.shapes[tensor]
        others = [name for name, known in self.shapes.items() if np.prod(known) == np.prod(shape)]
        other = self.draw(st.sampled_from(others))
        self.emit("Reshape", [tensor, self.inner("Shape", other)], self.shapes[other])

    def retyped(self, tensor: str) -> None:
        """A sequence of operators in another type; small values fit all types."""
        elem_type = self.draw(st.sampled_from(_OTHER_TYPES))
        there = self.inner("Cast", self.inner("Tanh", tensor), to=elem_type)
        self.emit("Cast", [self.inner("Abs", there)], self.shapes[tensor], to=TensorProto.FLOAT)

    def conv(self, tensor: str) -> None:
        batch, channels, height, width = self.shapes[tensor]
        kernel, filters = self.draw(st.sampled_from((1, 3))), self.draw(st.sampled_from((2, 4)))
        operands = [tensor, self.weight((filters, channels, kernel, kernel))]
        if self.draw(st.booleans()):
            operands.append(self.weight((filters,)))
        pads = [kernel // 2] * 4
        self.emit("Conv", operands, (batch, filters, height, width), pads=pads, kernel_shape=[kernel] * 2)

    def pool(self, tensor: str) -> None:
        batch, channels, height, width = self.shapes[tensor]
        shape = (batch, channels, height - 1, width - 1)
        if min(shape) > 0:
            self.emit("MaxPool", [tensor], shape, kernel_shape=[2, 2])

    def gemm(self, tensor: str) -> None:
        rows, columns = self.shapes[tensor]
        turned = self.draw(st.booleans())
        operands = [tensor, self.weight((3, columns) if turned else (columns, 3))]
        if self.draw(st.booleans()):
            operands.append(self.weight((3,)))
        self.emit("Gemm", operands, (rows, 3), transB=int(turned))

    def matmul(self, tensor: str) -> None:
        rows, columns = self.shapes[tensor]
        self.emit("MatMul", [tensor, self.weight((columns, 4))], (rows, 4))

    def branch(self, tensor: str) -> None:
        """An If whose bodies read an outer tensor, and perhaps an outer weight."""
        shape = self.shapes[tensor]
        condition = self.constant(np.array(self.draw(st.booleans())))
        operands = [tensor, *(name for name, known in self.weights.items() if known == shape)]
        second = self.draw(st.sampled_from(operands))
        made = self.name("body")
        bodies = [
            _body([helper.make_node(op, read, [f"{made}_{op}"])], [], [_float(f"{made}_{op}", shape)])
            for op, read in (("Add", [tensor, second]), ("Neg", [tensor]))
        ]
        self.emit("If", [condition], shape, then_branch=bodies[0], else_branch=bodies[1])

    def repeated(self, tensor: str) -> None:
        """A Loop that adds an outer tensor to its loop-carried value."""
        shape = self.shapes[tensor]
        outer = self.draw(st.sampled_from([name for name, known in self.shapes.items() if known == shape]))
        made = self.name("loop")
        turn, goes_on, carried, still, result = (f"{made}_{part}" for part in "icvst")
        nodes = [
            helper.make_node("Identity", [goes_on], [still]),
            helper.make_node("Add", [carried, outer], [result]),
        ]
        index = helper.make_tensor_value_info(turn, TensorProto.INT64, [])
        before, after = (helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in (goes_on, still))
        body = _body(nodes, [index, before, _float(carried, shape)], [after, _float(result, shape)])
        times = self.constant(np.array(self.draw(st.integers(1, 2)), np.int64))
        self.emit("Loop", [times, "", tensor], shape, body=body)

    def scanned(self, tensor: str) -> None:
        """A Scan over the first axis."""
        shape, made = self.shapes[tensor], self.name("scan")
        ends = [_float(f"{made}_{part}", shape[1:]) for part in "xy"]
        body = _body([helper.make_node("Relu", [ends[0].name], [ends[1].name])], ends[:1], ends[1:])
        self.emit("Scan", [tensor], shape, body=body, num_scan_inputs=1)

    def weight(self, shape: Shape) -> str:
        """A weight of that shape: a new one, or one that is already in use."""
        known = [name for name, other in self.weights.items() if other == shape]
        shared: str | None = self.draw(st.none() | st.sampled_from(known)) if known else None
        if shared is not None:
            return shared
        random = np.random.default_rng(self.draw(st.integers(0, 2**16)))
        name = self.constant(np.asarray(random.normal(size=shape), np.float32))
        self.weights[name] = shape
        return name

    def constant(self, values: npt.NDArray[np.generic]) -> str:
        """An initializer or a Constant node, its elements as raw bytes or as numbers."""
        name = self.name("w")
        tensor = numpy_helper.from_array(np.asarray(values), name)
        if self.draw(st.booleans()):
            tensor = helper.make_tensor(name, tensor.data_type, values.shape, values.ravel().tolist())
        if self.draw(st.integers(0, 3)):
            self.initializers.append(tensor)
        else:
            tensor.name = self.draw(st.sampled_from(("", "value", name)))
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def inner(self, op_type: str, tensor: str, **attributes: Any) -> str:
        """A tensor for the next operator only."""
        self.emit(op_type, [tensor], (), **attributes)
        output, _ = self.shapes.popitem()
        return output

    def emit(self, op_type: str, inputs: list[str], shape: Shape, **attributes: Any) -> None:
        output = self.name(self.draw(st.sampled_from(["t", inputs[0]])))
        node = helper.make_node(op_type, inputs, [output], **attributes)
        node.name = self.draw(st.sampled_from((f"/{op_type}_{self.count}", *self.odd_names)))
        if self.draw(st.booleans()):
            node.metadata_props.add(key="pkg.scope", value=f"block.{self.count}")
        self.nodes.append(node)
        self.shapes[output] = shape

    def name(self, stem: str) -> str:
        self.count += 1
        plain = stem.split("#")[0] + self.draw(st.sampled_from(_ENDINGS))
        taken = {*self.shapes, *self.weights, *(t.name for t in self.initializers)}
        taken |= {output for node in self.nodes for output in node.output}
        return f"{stem.split('#')[0]}#{self.count}" if plain in taken or plain == stem else plain

    def model(self) -> onnx.ModelProto:
        read = {name for node in self.nodes for name in node.input}
        made = [name for name in self.shapes if name not in self.inputs]
        seen = [name for name in made if name not in read or not self.draw(st.integers(0, 3))]
        if not seen:
            self.relu(self.inputs[0])
            seen = [list(self.shapes)[-1]]
        graph = helper.make_graph(
            self.nodes, "drawn", self.infos(self.inputs), self.infos(seen), self.initializers
        )
        if self.draw(st.booleans()):
            graph.value_info.extend(self.infos([name for name in made if name not in seen]))
        opset = helper.make_opsetid("", self.opset)
        model = helper.make_model(graph, opset_imports=[opset], producer_name="qdqspec.testing")
        model.ir_version = helper.find_min_ir_version_for([opset])
        return model

    def infos(self, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [_float(name, self.shapes[name]) for name in names]


def _float(name: str, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _body(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs)
