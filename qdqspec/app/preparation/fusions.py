"""The nodes of each kernel of a model, which regions by fusion follow: from a file, or from a build."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec._core.arrays import Feed
from qdqspec._core.config import hooks
from qdqspec._core.temporary import TemporaryFolder
from qdqspec.app.preparation.float_types import write_half
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.ops import has_floats
from qdqspec.graph.regions.search import groups_of

Groups: TypeAlias = tuple[tuple[str, ...], ...]


def fused_groups(
    model: Model, backend: Backend, options: BuildOptions, feed: Feed, note: Callable[[str], None]
) -> Groups:
    """The nodes of each kernel in one build; of the model in float16 if kernels of pairs fuse like those of float16."""

    def groups(path: Path, feed: Feed) -> Groups:
        with closing(backend.build(path, options)) as engine:
            engine.bind(feed)
            return groups_of(engine.layers())

    if backend.capabilities(options).fuses_in_half and has_floats(model):
        halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feed.items()}
        try:
            with TemporaryFolder() as folder:
                return groups(write_half(model, folder / "half.onnx", backend.name), halves)
        except (ModelError, BackendError) as error:
            note(f"fusions were read from a build of the given model, not of its float16 form: {error.what}")
    return groups(require_path(model), feed)


def groups_of_file(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a file of the user that a runtime's tool exported.

    Raises `StateError` if it cannot be read or belongs to another model.
    """
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
