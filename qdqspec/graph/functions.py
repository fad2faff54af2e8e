"""Local functions of a model in place of their calls."""

from __future__ import annotations

import onnx
from onnx import inliner

from qdqspec.graph.protos import copy_model, refill

# Domains whose operators a runtime has kernels for: a function of theirs is a definition for other runtimes.
_RUNTIMES = ("ai.onnx", "com.microsoft")


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with local functions inlined; the model itself where it has none.

    Functions in the domain of a runtime (TensorRT's Q/DQ, ONNX Runtime's contributed operators) stay calls, as do
    those of an operator set that the model does not import. Nodes of a function are named ``<node>__<number>``, where
    the number counts the calls.
    """
    keep = [(f.domain, f.name) for f in proto.functions if _is_of_runtime(f.domain)]
    if len(keep) == len(proto.functions):
        return proto
    light = copy_model(proto, but={"initializer"})
    copied = copy_model(inliner.inline_selected_functions(light, keep, exclude=True))
    refill(copied.graph.initializer, proto.graph.initializer)
    return copied


def _is_of_runtime(domain: str) -> bool:
    return not domain or domain.split(".")[0] == "trt" or domain.startswith(_RUNTIMES)
