"""Builds that list the kernels of a model: for regions that follow fusions, and for the check `builds`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from qdqspec._core import hooks
from qdqspec._core.arrays import Feed
from qdqspec._core.files import TemporaryFolder
from qdqspec.app.preparation.candidates import write_half
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.graph.model import Model, load_model, require_path
from qdqspec.graph.ops import HEAVY, has_floats
from qdqspec.graph.regions.search import groups_of
from qdqspec.types import BuildEvidence, LayerTime
from qdqspec.types.requests import BuildRequest

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def fused_groups(prepared: Prepared) -> Groups:
    """The nodes of each kernel of the float model, from a file or a build; none if the backend reports no kernels.

    It is a build of the model in float16 if kernels of pairs fuse like those of float16.
    """
    model, backend, options = prepared.given, prepared.backend, prepared.options
    if (file := prepared.case.regions.graph) is not None:
        return groups_of_file(file, model)

    def groups(path: Path, feed: Feed) -> Groups:
        with closing(backend.build(path, options)) as engine:
            engine.bind(feed)
            return groups_of(engine.layers())

    found, feed = None, prepared.sample
    if prepared.capabilities.fuses_in_half and has_floats(model):
        halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feed.items()}
        try:
            with TemporaryFolder() as folder:
                found = groups(write_half(model, folder / "half.onnx", backend.name), halves)
        except (ModelError, BackendError) as error:
            prepared.note_once(
                f"fusions were read from a build of the given model, not of its float16 form: {error.what}"
            )
    found = groups(require_path(model), feed) if found is None else found
    if not found:
        prepared.note_once(f"{backend.name} reports no kernels: regions follow structure instead")
    return found


def groups_of_file(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a file of a runtime's tool; raises `StateError` if it has none of the model."""
    refusal, advice = None, ""
    for read in hooks.readers("exported"):
        try:
            found = read([path], model)
        except BackendError as error:
            refusal = refusal or error
            continue
        advice = advice or found.advice
        groups = groups_of(found.layers)
        if known := tuple(group for group in groups if not model.by_name.keys().isdisjoint(group)):
            return known
    if refusal is not None and not advice:
        raise StateError(refusal.what, where=path, cure=refusal.cure)
    raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=advice or None)


def build_for(prepared: Prepared, tuned: Path, request: BuildRequest) -> BuildEvidence:
    """Build a model in a process of its own, and count the kernels of its heavy operators."""
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
    """The number of kernels of these nodes that compute in 8 bits or fewer, and of all of them.

    A node belongs to the first kernel that computes it in integers, else to its first one.
    """
    owners: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for node in heavy.intersection(layer.nodes):
            if node not in owners or (layer.integer and not layers[owners[node]].integer):
                owners[node] = index
    kernels = set(owners.values())
    return sum(layers[index].integer for index in kernels), len(kernels)
