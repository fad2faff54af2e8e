"""Digests of the nodes and constants of a model, for messages about a changed model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache

from qdqspec._core.node_digests import NodeDigest, pack
from qdqspec.graph.model import Model
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.weights import tensor_bytes


def digests_of(model: Model) -> str:
    """The digests as one text: see `qdqspec._core.node_digests`. Reads all weights."""
    return pack(_make_rows(model))


def _make_rows(model: Model) -> Iterator[NodeDigest]:
    """Operator sets, inputs, nodes in order, and outputs."""
    base = model.path.parent if model.path else None
    makers: dict[str, tuple[int, int]] = {}

    @cache
    def constant(tensor: str) -> str:
        proto = model.constants[tensor]
        return f"={_digest(f'{proto.data_type} {list(proto.dims)}'.encode(), tensor_bytes(proto, base))}"

    def source(number: int, tensor: str) -> str:
        if tensor in model.constants:
            return constant(tensor)
        if tensor not in makers:
            return ""
        maker, output = makers[tensor]
        return f"{number - maker}.{output}" if output else str(number - maker)

    number = 0
    for opset in model.proto.opset_import:
        yield NodeDigest(opset.domain or "ai.onnx", "operator set", str(opset.version), ())
        number += 1
    for port in model.flat.graph.input:
        if port.name not in model.initializers:
            makers[port.name] = number, 0
            yield NodeDigest(port.name, "input", _digest(port.type.SerializeToString(deterministic=True)), ())
            number += 1
    for node in model.nodes:
        if is_constant_node(node):
            continue
        attributes = sorted(each.SerializeToString(deterministic=True) for each in node.proto.attribute)
        digest = _digest(node.domain.encode(), *attributes)
        yield NodeDigest(
            node.name, node.op_type, digest, tuple(source(number, tensor) for tensor in node.inputs)
        )
        makers.update((tensor, (number, index)) for index, tensor in enumerate(node.outputs) if tensor)
        number += 1
    for port in model.flat.graph.output:
        yield NodeDigest(port.name, "output", "", (source(number, port.name),))
        number += 1


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=3)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()
