"""Models whose opset was raised, as number formats of inserted pairs need it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import onnx

from qdqspec.errors import PlacementError
from qdqspec.graph.conversion import raise_opset
from qdqspec.graph.model import Model
from qdqspec.graph.protos import opset_of
from qdqspec.types import Consumer

RAISED_FROM = "qdqspec.raised_from"  # model metadata: original opset and IR version


def raised(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model at that opset, with the original opset in its metadata. `insert_qdq` does this when necessary."""
    higher = raise_opset(proto, opset)
    higher.metadata_props.add(key=RAISED_FROM, value=version_text(proto))
    return higher


def version_text(proto: onnx.ModelProto) -> str:
    """Opset and IR version of a model, for readers."""
    return f"opset {opset_of(proto)}, IR version {proto.ir_version}"


class RaisedInputs:
    """The consumers of a model after the opset was raised, which may replace and add nodes.

    ``producer`` gives the index of the node that makes a tensor.
    """

    def __init__(self, model: Model, nodes: Sequence[onnx.NodeProto], *, is_raised: bool) -> None:
        self._model = model
        self._nodes = nodes
        self._is_raised = is_raised
        self.producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}

    def of(
        self, tensor: str, end: Consumer, consumers: Iterable[Consumer], what: str, cure: str
    ) -> list[tuple[int, int]]:
        """The inputs (node, input) at which a consumer reads a tensor.

        If its node was replaced, they are those of the added nodes. The origin of these is unknown, so all possible
        origins must be among the ``consumers``; else `PlacementError` states ``what`` the tensor cannot be.
        """
        kept = self._unchanged_reader(tensor, end)
        if kept is not None:
            return [(kept, end.input)]
        found = self._added.get(tensor)
        if found and {*consumers}.issuperset(self.replaced(tensor)):
            return found
        raise PlacementError(
            f"tensor '{tensor}' cannot be {what}: raising the opset changed node '{end.node}'",
            where=self._model.where,
            cure=cure,
        )

    def replaced(self, tensor: str) -> tuple[Consumer, ...]:
        """The consumers of a tensor whose nodes were replaced."""
        nodes = (end for end in self._model.consumers.get(tensor, ()) if not end.is_output)
        return tuple(end for end in nodes if self._unchanged_reader(tensor, end) is None)

    def _unchanged_reader(self, tensor: str, end: Consumer) -> int | None:
        """The index of the consumer's node, if it reads the tensor there as before."""
        node = self._model.by_name[end.node]
        index = node.index
        if self._is_raised:
            index = next((self.producer[o] for o in node.outputs if o in self.producer), -1)
        reads = index >= 0 and self._nodes[index].input[end.input : end.input + 1] == [tensor]
        return index if reads else None

    @cached_property
    def _added(self) -> Mapping[str, list[tuple[int, int]]]:
        """The inputs of the nodes that raising the opset added, by tensor."""
        known = {(node.op_type, node.outputs[:1]) for node in self._model.nodes}
        found: dict[str, list[tuple[int, int]]] = {}
        for index, node in enumerate(self._nodes):
            if (node.op_type, tuple(node.output[:1])) not in known:
                for number, name in enumerate(node.input):
                    found.setdefault(name, []).append((index, number))
        return found
