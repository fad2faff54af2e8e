"""The kernel fusions of a runtime, determined before a search: read from a file, or from one build.

Files are read by the backend whose runtime's tool exported them; the result of a build is kept for later runs.
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
from pydantic import BaseModel

from qdqspec.backends.base import Array, Backend, BuildOptions
from qdqspec.config import hooks
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.files import write_whole
from qdqspec.graph.model import Model
from qdqspec.graph.ops import has_floats
from qdqspec.plain_json import read_json
from qdqspec.regions.fusion import groups_of
from qdqspec.session.runtimes import half_model
from qdqspec.temporary import TemporaryFolder

FILE = "fusion.json"
_MOST_BYTES = 256 << 20

Groups: TypeAlias = tuple[tuple[str, ...], ...]
Feeds: TypeAlias = Mapping[str, Array]


class _Kept(BaseModel):
    of: dict[str, object]
    groups: tuple[tuple[str, ...], ...]


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
                onnx.save(
                    half_model(self.model, self.path, backend=self.backend.name),
                    path,
                    save_as_external_data=True,
                )
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
            kept = _Kept.model_validate(read_json(self._file, most_bytes=_MOST_BYTES))
        except (OSError, ValueError):
            return None  # damaged: it is determined again
        return kept.groups if kept.of == self._of else None

    def _keep(self, groups: Groups) -> None:
        if self._file is None or not groups:
            return
        text = json.dumps({"of": self._of, "groups": groups}, indent=1)
        write_whole(self._file, text, what="what fuses", make_folder=True)


def groups_of_file(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a file of the user that a runtime's tool exported.

    Raises `StateError` if it cannot be read or belongs to another model.
    """
    refusal, advice = None, ""
    for read in hooks.readers():
        try:
            found = read([path], model)
        except BackendError as error:
            refusal = refusal or error
            continue
        advice = advice or found.advice
        if known := tuple(
            group for group in groups_of(found.layers) if any(node in model.by_name for node in group)
        ):
            return known
    if refusal is not None and not advice:
        raise StateError(refusal.what, where=path, cure=refusal.cure)
    raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=advice or None)
