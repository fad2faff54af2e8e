"""ONNX models: loading, names of nodes and tensors, changes of graphs, regions and patterns.

- `Model`: a loaded model. `Node`: one of its nodes. `load_model` reads a file, `save_model` writes one.
- `qdqspec.graph.regions`: the hierarchy of regions of a model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
