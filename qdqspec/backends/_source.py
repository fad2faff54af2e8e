"""The model that a runtime was given, as its kernels are mapped back to it. Shared by backends of ONNX models."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from qdqspec.backends._engine import one_line, require_file
from qdqspec.errors import BackendError
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import OF_PAIRS

_STATIC = frozenset({"Constant", "Shape", "Size"})


def read_source(path: Path) -> Model:
    """The model in a file that the runtime has read without an error. External weights are not loaded."""
    return Model(onnx.load(str(path), load_external_data=False), path=path)


def read_given(path: Path) -> Model:
    """The model in a file that no runtime has read yet. Raises `BackendError` if it is no ONNX model."""
    require_file(path)
    try:
        return read_source(path)
    except Exception as error:  # noqa: BLE001 - protobuf raises various exceptions
        what = f"the file is no ONNX model: {one_line(error)}"
        raise BackendError(what, where=path, cure="check the path") from None


@dataclass(frozen=True, slots=True)
class Origin:
    """The nodes that a kernel computes, of the model without pairs; and the tensors that it makes or converts."""

    nodes: tuple[str, ...]
    tensors: tuple[str, ...]


class Source:
    """The model given to the optimizer, with its Q/DQ pairs skipped."""

    def __init__(self, model: Model) -> None:
        operators = [node for node in model.nodes if not node.is_marker]
        self.nodes = {node.name: node for node in operators if node.op_type not in OF_PAIRS}
        self.tensors = {t for n in operators for t in (*n.inputs, *n.outputs) if t}
        self.constants = model.constants
        self._base: dict[str, str] = {}
        self.producer: dict[str, Node] = {}
        self.readers: dict[str, list[Node]] = {}
        self.quantized: set[str] = set()
        self.static: set[str] = set()
        for node in operators:  # topological order: a base is known before it is used
            if node.op_type in OF_PAIRS:
                self._base.update(dict.fromkeys(node.outputs, self.base(node.inputs[0])))
                if node.op_type == "QuantizeLinear":
                    self.quantized.add(self.base(node.inputs[0]))
                continue
            bases = [self.base(t) for t in node.inputs if t]
            for tensor in bases:
                self.readers.setdefault(tensor, []).append(node)
            self.producer.update((t, node) for t in node.outputs if t)
            body = node.name in model.bodies  # it may read anything outside
            folded = bool(bases) and not body and all(t in self.constants or t in self.static for t in bases)
            if node.op_type in _STATIC or folded:
                self.static.update(t for t in node.outputs if t)

    def base(self, tensor: str) -> str:
        """The tensor before its Q/DQ pairs."""
        return self._base.get(tensor, tensor)

    def chain_end(self, node: Node) -> str:
        """The tensor at which an integer kernel that begins at ``node`` is quantized again."""
        tensor = node.outputs[0]
        while tensor not in self.quantized and len(self.readers.get(tensor, ())) == 1:
            follower = self.readers[tensor][0]
            if follower.inputs[0] != tensor or len(follower.outputs) != 1:
                break
            tensor = follower.outputs[0]
        return tensor if tensor in self.quantized else node.outputs[0]

    def fused_end(self, tensor: str, kernel: onnx.NodeProto) -> str:
        """The output tensor of a blocked convolution, after a fused Add and activation function."""
        wanted = ["Add"] if len(kernel.input) > 3 and kernel.input[3] else []
        wanted += [a.s.decode() for a in kernel.attribute if a.name == "activation"]
        for op_type in wanted:
            followers = [n for n in self.readers.get(tensor, ()) if n.op_type == op_type]
            if len(followers) == 1:
                tensor = followers[0].outputs[0]
        return tensor

    def fused_start(self, node: Node | None, tensor: str, wanted: Collection[str]) -> Node | None:
        """The first node, of an operator ``wanted``, of a kernel that has ``node`` or computes ``tensor``.

        From there the chain of only inputs that are no constants is followed backwards, as from the Add of a bias
        to its convolution.
        """
        node = node or self.producer.get(self.base(tensor))
        while node is not None and node.op_type not in wanted:
            bases = [self.base(t) for t in node.inputs if t]
            before = [t for t in bases if t not in self.constants and t not in self.static]
            node = self.producer.get(before[0]) if len(before) == 1 else None
        return node

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """The nodes in the order of the model."""
        return tuple(sorted(names, key=lambda name: self.nodes[name].index))

    def slice(self, ends: Iterable[str], stops: set[str]) -> tuple[str, ...]:
        """The nodes that compute ``ends``, back to tensors of other kernels, in the order of the traversal."""
        found: dict[str, None] = {}
        todo = list(ends)
        while todo:
            node = self.producer.get(todo.pop())
            if node is None or node.name in found:
                continue
            found[node.name] = None
            bases = (self.base(t) for t in node.inputs if t)
            todo.extend(t for t in bases if t not in stops and t not in self.static)
        return tuple(found)
