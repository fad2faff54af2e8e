"""Builds of the tuned model by another backend, for the check `builds`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from qdqspec.app.preparation.prepare import Prepared
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError
from qdqspec.graph.model import load_model
from qdqspec.graph.ops import HEAVY
from qdqspec.types import BuildEvidence, LayerTime
from qdqspec.types.requests import BuildRequest


def build_for(prepared: Prepared, tuned: Path, request: BuildRequest) -> BuildEvidence:
    """Build a model in a process of its own, and count the kernels of its heavy operators.

    Raises `ConfigError` if the backend does not accept the target.
    """
    blank = BuildEvidence(backend=request.backend, target=request.target)
    target = {f"{request.backend}.for": request.target} if request.target else {}
    options = replace(prepared.options, extra={**prepared.options.extra, **target}, state=None)
    with ExitStack() as opened:
        own = not request.backend
        backend = prepared.backend if own else opened.enter_context(closing(Isolated(request.backend)))
        backend.options.read(options.extra)
        found = backend.probe(options)
        if not found.usable:
            return replace(blank, missing=found.why, cure=found.install)
        prepared.resources.report_step(f"building with {request.key or backend.name}")
        try:
            with closing(backend.build(tuned, options)) as engine:
                engine.bind(prepared.loads[0].feeds)
                layers = engine.layers(1)
        except BackendError as error:
            return replace(blank, refused=error.what, cure=error.cure or "")
    ops = {node.name: node.op_type for node in load_model(tuned).nodes}
    narrow, heavy = heavy_kernels(layers, {name for name, op in ops.items() if op in HEAVY})
    return replace(blank, kernels=len(layers), narrow=narrow, heavy=heavy, layers=layers, ops=ops)


def heavy_kernels(layers: Sequence[LayerTime], heavy: set[str]) -> tuple[int, int]:
    """The number of kernels of these nodes that compute in 8 bits or fewer, and the number of all of them.

    A node belongs to the first kernel that computes it in integers, else to its first one: other kernels of a node only
    scale its result.
    """
    owners: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for node in heavy.intersection(layer.nodes):
            if node not in owners or (layer.integer and not layers[owners[node]].integer):
                owners[node] = index
    kernels = set(owners.values())
    return sum(layers[index].integer for index in kernels), len(kernels)
