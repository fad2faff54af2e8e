"""ONNX models: loading, names of nodes and tensors, changes of graphs, regions and patterns.

- `Model`: a loaded model. `Node`: one of its nodes. `load_model` reads a file, `save_model` writes one.
- `find_regions`: the hierarchy of regions of a model.
"""

from __future__ import annotations

from qdqspec.graph.model import Model, Node, load_model
from qdqspec.graph.regions.search import find_regions
from qdqspec.graph.storage import save_model

__all__ = ["Model", "Node", "find_regions", "load_model", "save_model"]
