"""The kernel fusions of a runtime, determined before a search: read from a file, or from one build.

Groups of nodes are saved in TensorRT's layer information format, with node names where TensorRT writes them, so that
one parser reads both the output of ``trtexec --exportLayerInfo`` and the result of an earlier run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx

from qdqspec.backends.base import Array, Backend, BuildOptions
from qdqspec.backends.onnxruntime.half import half_model, has_floats
from qdqspec.backends.tensorrt.layers import parse_layers
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.files import write_whole
from qdqspec.graph.model import Model
from qdqspec.plain_json import parse_json
from qdqspec.regions.fusion import groups_of
from qdqspec.temporary import TemporaryFolder

FILE = "fusion.graph.json"
_MOST_BYTES = 256 << 20
_EXPORT = (
    "export it from an engine of this model: trtexec --profilingVerbosity=detailed --exportLayerInfo=FILE"
)

Groups: TypeAlias = tuple[tuple[str, ...], ...]
Feeds: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionBuild:
    """Determines kernel fusions by one build of a model; in float16 if ``half`` is set and the model is float32."""

    model: Model
    path: Path
    backend: Backend
    options: BuildOptions
    half: bool
    note: Callable[[str], None]

    def groups(self, feeds: Feeds) -> Groups:
        """The nodes of each kernel: from an earlier run of the same model and device, else from a new build."""
        known = self._known()
        if known is None:
            known = self._found(feeds)
            self._keep(known)
        return known

    def _found(self, feeds: Feeds) -> Groups:
        if not (self.half and has_floats(self.model)):
            return self._built(self.path, feeds)
        halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feeds.items()}
        try:
            with TemporaryFolder() as folder:
                path = folder / "half.onnx"
                onnx.save(half_model(self.model, self.path), path, save_as_external_data=True)
                return self._built(path, halves)
        except (ModelError, BackendError) as error:
            self.note(f"what fuses was looked up in the model as it is, not in float16: {error.what}")
            return self._built(self.path, feeds)

    def _built(self, path: Path, feeds: Feeds) -> Groups:
        with closing(self.backend.build(path, self.options)) as engine:
            engine.bind(feeds)
            return groups_of(engine.layers())

    # ---- kept ---------------------------------------------------------------------------------------

    @property
    def _file(self) -> Path | None:
        return self.options.state and self.options.state / FILE

    @property
    def _of(self) -> dict[str, object]:
        """The key of a saved result; a result with another key is ignored."""
        device = self.backend.device(self.options).key
        return {"model_sha256": self.model.sha256, "device": device, "half": self.half}

    def _known(self) -> Groups | None:
        if self._file is None or not self._file.is_file():
            return None
        try:
            told = parse_json(_text_of(self._file).encode())
            if told.get("of") != self._of:
                return None
            return groups_of(parse_layers(told, model=self.model))
        except (BackendError, StateError, ValueError, AttributeError):
            return None  # damaged: it is determined again

    def _keep(self, groups: Groups) -> None:
        if self._file is None or not groups:
            return
        layers = [
            {"Name": " + ".join(group), "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in group)}
            for group in groups
        ]
        text = json.dumps({"of": self._of, "Layers": layers}, indent=1)
        write_whole(self._file, text, what="what fuses", make_folder=True)


def told_groups(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a layer information file of the user.

    Raises `StateError` if it cannot be read or belongs to another model.
    """
    try:
        groups = groups_of(parse_layers(_text_of(path), model=model))
    except BackendError as error:
        raise StateError(error.what, where=path, cure=_EXPORT) from None
    known = tuple(group for group in groups if any(node in model.by_name for node in group))
    if not known:
        raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=_EXPORT)
    return known


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise StateError("it is no file", where=path, cure=_EXPORT)
        if path.stat().st_size > _MOST_BYTES:
            raise StateError(f"it is larger than {_MOST_BYTES >> 20} MiB", where=path, cure=_EXPORT)
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"it cannot be read: {error.strerror}", where=path, cure=_EXPORT) from None
