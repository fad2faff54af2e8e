"""The optimized graph that ONNX Runtime runs, read back from disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper

__all__ = ["graph_hash", "read_graph"]


def read_graph(path: Path) -> onnx.GraphProto:
    """Read an optimized model's graph; large weights stay in their external file."""
    return onnx.load(str(path), load_external_data=False).graph


def graph_hash(graph: onnx.GraphProto, folder: Path) -> str:
    """Hash the computation of a graph: operators, attributes, constants and connections, without names.

    Node and tensor names inside are excluded, because ONNX Runtime numbers generated names anew in
    every build; names of graph inputs and outputs count. Independent of node order: every tensor
    has the hash of the node that makes it (a Merkle tree), and the graph's hash covers all nodes and outputs.
    """
    weights = _ExternalWeights(folder)
    try:
        return _hash_graph(graph, {}, weights)
    finally:
        weights.close()


def _hash_graph(graph: onnx.GraphProto, outer: Mapping[str, str], weights: _ExternalWeights) -> str:
    known = dict(outer)
    known.update((i.name, _digest("input", i.name)) for i in graph.input)
    known.update((t.name, _hash_tensor(t, weights)) for t in graph.initializer)
    nodes = []
    for node in graph.node:  # ONNX requires topological order, so every input is known by now
        inner = known if any(a.HasField("g") for a in node.attribute) else {}
        attributes = sorted(_hash_attribute(a, inner, weights) for a in node.attribute)
        inputs = (known.get(name, "") for name in node.input)
        digest = _digest(node.domain, node.op_type, len(node.output), *attributes, "|", *inputs)
        nodes.append(digest)
        known.update((name, _digest(digest, index)) for index, name in enumerate(node.output) if name)
    outputs = (f"{o.name}={known.get(o.name, '')}" for o in graph.output)
    return _digest(*sorted(nodes), "|", *outputs)


def _hash_attribute(
    attribute: onnx.AttributeProto, outer: Mapping[str, str], weights: _ExternalWeights
) -> str:
    if attribute.HasField("g"):
        return _digest(attribute.name, _hash_graph(attribute.g, outer, weights))
    return _digest(attribute.name, attribute.SerializeToString(deterministic=True).hex())


def _hash_tensor(tensor: onnx.TensorProto, weights: _ExternalWeights) -> str:
    digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)} ".encode())
    if external_data_helper.uses_external_data(tensor):
        digest.update(weights.of(tensor))
    elif tensor.HasField("raw_data"):
        digest.update(tensor.raw_data)
    else:
        digest.update(onnx.numpy_helper.to_array(tensor).tobytes())
    return digest.hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


class _ExternalWeights:
    """Weight files mapped into memory, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    def of(self, tensor: onnx.TensorProto) -> memoryview:
        """The bytes of one tensor."""
        info = external_data_helper.ExternalDataInfo(tensor)
        if info.location not in self._files:
            self._files[info.location] = np.memmap(self._folder / info.location, dtype=np.uint8, mode="r")
        start = info.offset or 0
        return self._files[info.location][start : start + (info.length or 0)].data

    def close(self) -> None:
        """Close the files, so that their folder can be removed."""
        self._files.clear()
