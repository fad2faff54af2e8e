"""The model that a case tunes: the user's, or a copy of it with inputs fixed to a value. Part of the session."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from qdqspec.backends.base import Array
from qdqspec.graph.fixed import fix_inputs, fixed_arrays
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.save import save_model
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import FixedValue


class Specialized(Model):
    """A copy of a user's model without the inputs ``fixed``; its file is there as long as the copy is.

    Messages name the user's file. The hash is over the user's model and the values.
    """

    def __init__(self, origin: Model, fixed: Mapping[str, Array]) -> None:
        self.origin = origin
        self.fixed = dict(fixed)
        self._folder = TemporaryFolder()
        path = self._folder.path / (origin.path.name if origin.path else "model.onnx")
        save_model(fix_inputs(origin, fixed), path, base=None if origin.path is None else origin.path.parent)
        copy = load_model(path)
        super().__init__(copy.proto, path=path, sha256=_digest(origin, fixed))

    @property
    def where(self) -> str:
        """What an error message calls the model: the user's file."""
        return self.origin.where

    @property
    def user_files(self) -> tuple[Path, ...]:
        """The files of the user's model."""
        return (*self.origin.user_files, *super().user_files)


def given_model(path: Path, values: Mapping[str, FixedValue]) -> Model:
    """The user's model, with these inputs fixed. Raises `SpecError` where a value is none that the input can have."""
    loaded = load_model(path)
    return Specialized(loaded, fixed_arrays(loaded, values)) if values else loaded


def _digest(origin: Model, fixed: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(origin.sha256.encode())
    for name in sorted(fixed):
        value = fixed[name]
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return digest.hexdigest()
