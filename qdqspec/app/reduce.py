"""Reduces a model that a backend refuses, or that crashes it, to a few nodes with random weights.

The algorithm is delta debugging (ddmin of Zeller and Hildebrandt, 2002, with complements only): chunks of nodes are
removed while the rest still fails in the same way; tensors that no remaining node makes become inputs. A node with
bodies (If, Loop, Scan) is removed or kept with them. Each attempt is built in a process of its own. Polygraphy's
``debug reduce`` is not used: see docs/decisions/0011.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core import hooks
from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder, write_text
from qdqspec.accuracy import CaseData
from qdqspec.backends import Backend, BuildOptions
from qdqspec.errors import BackendError, StateError
from qdqspec.graph import Model, save_model
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.graph.protos import (
    all_graphs,
    constants_of,
    copied,
    copy_model,
    map_tensors,
    names_read_inside,
    tensors,
)
from qdqspec.types import Inputs, InputShape, ShapeProfile

MODEL, PROGRAM = "reduced.onnx", "reproduce.py"
_STORED = ("int8", "uint8", "int4", "uint4")

T = TypeVar("T")
Signature: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A reduced model: its file, a program that shows the fault, and how it was found. Nodes of bodies are counted.

    ``failure`` is the message of the reduced model. ``kept`` are constants whose values the fault needs; all others are
    random. ``complete`` is false if the time ended before nothing more could be removed.
    """

    model: Path
    program: Path
    failure: str
    nodes_before: int
    nodes: int
    kept: tuple[str, ...]
    attempts: int
    seconds: float
    complete: bool


def reduce_model(
    model: Model, backend: Backend, options: BuildOptions, folder: Path, *, seconds: float, seed: int = 0
) -> Reduced:
    """Reduce a failing model for at most ``seconds``, and write it to ``folder`` with a program that shows the fault.

    Raises `StateError` if the model does not fail.
    """
    with TemporaryFolder() as scratch:
        attempts = _Attempts(
            backend=backend,
            options=options,
            path=scratch / MODEL,
            names=frozenset({*_list_names(model.proto.graph), *model.inputs, *model.outputs}),
            seconds=seconds,
        )
        cutter = _Cutter(model)
        everything = list(range(len(cutter.nodes)))
        whole = cutter.cut(everything)
        first = None if whole is None else attempts.failure(whole)
        if whole is None or first is None:
            raise StateError(
                f"the model builds and runs on {backend.name}: there is nothing to reduce", where=model.where
            )
        attempts.wanted = attempts.signature(first)
        nodes = smallest(everything, lambda kept: attempts.fails(cutter.cut(kept)))
        cut = cutter.cut(nodes)
        assert cut is not None  # it was built
        weights = [*dict.fromkeys(tensor.name for tensor in tensors(cut) if _may_vary(tensor))]
        kept = smallest(weights, lambda some: attempts.fails(randomized(cut, some, seed)))
        reduced = randomized(cut, kept, seed)
        failure = attempts.failure(reduced)
    if failure is None or attempts.signature(failure) != attempts.wanted:
        raise StateError(f"the failure is not reproducible: {first}", where=model.where)
    save_model(reduced, folder / MODEL, inputs=model.user_files)
    write_text(folder / PROGRAM, program(reduced, backend.name, options, failure))
    before, after = (sum(len(graph.node) for graph in all_graphs(proto.graph)) for proto in (whole, cut))
    return Reduced(
        model=folder / MODEL,
        program=folder / PROGRAM,
        failure=failure,
        nodes_before=before,
        nodes=after,
        kept=tuple(kept),
        attempts=attempts.count,
        seconds=attempts.elapsed,
        complete=not attempts.over,
    )


def _list_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of nodes and tensors, also in bodies."""
    for each in all_graphs(graph):
        for node in each.node:
            yield from (node.name, *node.input, *node.output)


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of the items that still fails, and no longer does without any single one of them.

    All items together are taken to fail.
    """
    kept, size = list(items), len(items)
    while size:
        start, shrunk = 0, False
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, shrunk = rest, True
            else:
                start += size
        if not (shrunk and size == 1):  # single items are tried again until nothing changes
            size //= 2
    return kept


def with_shapes(model: Model, shapes: Mapping[str, Sequence[int]]) -> Model:
    """The model with these shapes of inputs. Raises `SpecError` for other names and ranks."""
    known = {name: InputShape.of(tuple(shape)) for name, shape in shapes.items()}
    found = CaseData(model, Inputs(profiles=(ShapeProfile(shapes=known),))).shapes
    proto = copy_model(model.proto)
    for given in proto.graph.input:
        if given.name in found:
            elem_type = given.type.tensor_type.elem_type
            given.CopyFrom(helper.make_tensor_value_info(given.name, elem_type, found[given.name]))
    return Model(proto, path=model.path)


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """Builds and runs models in the file ``path``, until the time is over. ``names`` are those of the whole model."""

    backend: Backend
    options: BuildOptions
    path: Path
    names: frozenset[str]
    seconds: float
    started: float = field(default_factory=time.monotonic)
    wanted: Signature = ()
    count: int = 0
    over: bool = False

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.started

    def fails(self, proto: onnx.ModelProto | None) -> bool:
        """Whether a model fails in the wanted way; false once the time is over."""
        self.over = self.over or self.elapsed > self.seconds
        if proto is None or self.over:
            return False
        found = self.failure(proto)
        return found is not None and self.signature(found) == self.wanted

    def failure(self, proto: onnx.ModelProto) -> str | None:
        """The message if the model cannot be built or run once, else ``None``."""
        self.count += 1
        save_model(proto, self.path)
        try:
            with closing(self.backend.build(self.path, self.options)) as engine:
                engine.run(feeds_of(proto))
        except BackendError as error:
            return error.what
        return None

    def signature(self, text: str) -> Signature:
        """The words of a message without names, numbers and paths; of a crash without the last output."""
        words = re.split(r"[^\w./:-]+", text.partition("; the end of its log:")[0])
        return tuple(word for word in words if word not in self.names and not re.search(r"[\d/]", word))


class _Cutter:
    """Cuts nodes out of the main graph of a model, each with its bodies; outputs of Constant nodes are initializers."""

    def __init__(self, model: Model) -> None:
        self._types, self._outputs = model.types, {*model.outputs}
        self._proto = model.with_own_weights()
        graph = self._proto.graph
        self._constants = constants_of(graph)
        self.nodes = [node for node in graph.node if node.output[0] not in self._constants]
        made = (name for node in graph.node for name in node.output)
        self._outer = {*model.inputs, *self._constants, *made}

    def cut(self, kept: Sequence[int]) -> onnx.ModelProto | None:
        """The model of some nodes; ``None`` without nodes, or if the type of an input is unknown."""
        nodes = [self.nodes[index] for index in kept]
        made = {name: None for node in nodes for name in node.output if name}
        inside = ((*node.input, *sorted(names_read_inside(node) & self._outer)) for node in nodes)
        used = dict.fromkeys(name for names in inside for name in names if name)
        read = [name for name in used if name not in made]
        inputs = [name for name in read if name not in self._constants]
        unread = [name for name in made if name not in used or name in self._outputs]
        if not kept or any(name not in self._types for name in inputs):
            return None
        proto = copy_model(self._proto, but={"node", "initializer", "input", "output", "value_info"})
        del proto.metadata_props[:], proto.graph.quantization_annotation[:]
        proto.graph.node.extend(nodes)
        proto.graph.input.extend(map(self._info, inputs))
        proto.graph.output.extend(map(self._info, unread))
        for name in read:
            if name in self._constants:
                tensor = copied(self._constants[name])
                tensor.name = name
                proto.graph.initializer.append(tensor)
        return proto

    def _info(self, name: str) -> onnx.ValueInfoProto:
        known = self._types.get(name)
        if known is None:
            return onnx.ValueInfoProto(name=name)
        return helper.make_tensor_value_info(name, known.elem_type, known.shape)


def feeds_of(proto: onnx.ModelProto) -> dict[str, Array]:
    """Random inputs. Dimensions that are not known are 1; integers are 0, a valid index."""
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for given in proto.graph.input:
        kind = given.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [max(dim.dim_value, 1) for dim in kind.shape.dim]
        floating = np.issubdtype(dtype, np.floating)
        feeds[given.name] = (random.standard_normal(shape) if floating else np.zeros(shape)).astype(dtype)
    return feeds


def _may_vary(tensor: TensorProto) -> bool:
    """Whether the values of a constant are weights, and not shapes, axes or the scale or zero point of a tensor."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return int(np.prod(tensor.dims)) > 1 and (np.issubdtype(dtype, np.floating) or dtype.name in _STORED)


def randomized(proto: onnx.ModelProto, kept: Iterable[str], seed: int) -> onnx.ModelProto:
    """A copy with random values in place of all weights, also in bodies, except the constants ``kept``."""
    random, same = np.random.default_rng(seed), frozenset(kept)
    nodes = (node for graph in all_graphs(proto.graph) for node in graph.node)
    positive = {name for node in nodes if node.op_type in QDQ_OPS for name in node.input[1:2]}

    def change(tensor: TensorProto) -> TensorProto:
        if tensor.name in same or not _may_vary(tensor):
            return tensor
        dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
        if tensor.name in positive:
            values: Array = random.uniform(0.01, 0.02, shape)
        elif np.issubdtype(dtype, np.floating):
            values = random.standard_normal(shape) * 0.1
        else:
            values = random.integers(0, 8, shape)  # which each of these types can hold
        return numpy_helper.from_array(values.astype(dtype), tensor.name)

    return map_tensors(proto, change)


_PROGRAM = '''"""Shows a fault on backend {backend}: {failure}"""

from pathlib import Path

import numpy as np

MODEL = str(Path(__file__).with_name("{model}"))
RANDOM = np.random.default_rng(0)
FEEDS = {{
{feeds}}}

'''
_ANY = """from qdqspec.backends.base import BuildOptions, backend_named

backend_named("{backend}").build(Path(MODEL), BuildOptions(extra={extra!r})).run(FEEDS)
"""


def program(proto: onnx.ModelProto, backend: str, options: BuildOptions, failure: str) -> str:
    """A program that builds and runs the model beside it, with the runtime alone where the backend declares how."""
    lines = []
    for name, value in feeds_of(proto).items():
        shape, dtype = tuple(value.shape), value.dtype.name
        floating = np.issubdtype(value.dtype, np.floating)
        made = f"RANDOM.standard_normal({shape})" if floating else f"np.zeros({shape})"
        lines.append(f"    {name!r}: {made}.astype({dtype!r}),\n")
    headline = " ".join(failure.split()).replace("\\", "/").replace('"', "'")
    head = _PROGRAM.format(backend=backend, failure=headline, model=MODEL, feeds="".join(lines))
    hook = hooks.declaration_of(backend).program
    rest = hooks.load(hook)(options) if hook else _ANY.format(backend=backend, extra=dict(options.extra))
    return head + str(rest)
