"""The input model: the user's model, or a changed copy of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from qdqspec.arrays import Array
from qdqspec.graph.declared import contradictions, redeclared
from qdqspec.graph.fixed import fix_inputs, fixed_arrays
from qdqspec.graph.functions import inlined
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.save import save_model
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import FixedValue


class OwnCopy(Model):
    """A changed copy of a user's model; its file exists as long as the copy. Messages name the user's file."""

    def __init__(
        self,
        origin: Model,
        proto: onnx.ModelProto,
        *,
        sha256: str,
        fixed: Mapping[str, Array] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.origin = origin
        self.fixed = dict(fixed or {})
        self._notes = tuple(notes)
        self._folder = TemporaryFolder()
        path = self._folder.path / (origin.path.name if origin.path else "model.onnx")
        save_model(proto, path, base=None if origin.path is None else origin.path.parent)
        super().__init__(load_model(path).proto, path=path, sha256=sha256)

    @property
    def where(self) -> str:
        """The name of the model in error messages: the user's file."""
        return self.origin.where

    @property
    def notes(self) -> tuple[str, ...]:
        """The changes that were made."""
        return (*self.origin.notes, *self._notes)

    @property
    def user_files(self) -> tuple[Path, ...]:
        """The files of the user's model, and the copy."""
        return (*self.origin.user_files, *super().user_files)


def given_model(path: Path, values: Mapping[str, FixedValue]) -> Model:
    """The user's model with local functions inlined and these inputs fixed.

    Raises `SpecError` for a value that is not valid for its input.

    The hash of a model with fixed inputs is over the user's model and the values.
    """
    loaded = _without_calls(load_model(path))
    if not values:
        return loaded
    fixed = fixed_arrays(loaded, values)
    return OwnCopy(loaded, fix_inputs(loaded, fixed), sha256=_digest(loaded, fixed), fixed=fixed)


def _without_calls(model: Model) -> Model:
    proto = inlined(model.proto)
    if proto is model.proto:
        return model
    gone = len(model.proto.functions) - len(proto.functions)
    notes = [f"{gone} local functions are inlined in a copy of the model"]
    return OwnCopy(model, proto, sha256=model.sha256, notes=notes)


def with_true_outputs(model: Model, outputs: Mapping[str, Array]) -> Model:
    """The model, or a copy if the declared shape of an output differs from that of a run."""
    shapes = {name: value.shape for name, value in outputs.items() if hasattr(value, "shape")}
    wrong = contradictions(model, shapes)
    if not wrong:
        return model
    return OwnCopy(
        model,
        redeclared(model.proto, {name: shapes[name] for name in wrong}),
        sha256=model.sha256,
        fixed=fixed_in(model),
        notes=[f"output '{name}': {why}; corrected in a copy of the model" for name, why in wrong.items()],
    )


def fixed_in(model: Model) -> Mapping[str, Array]:
    """The inputs that a copy has fixed; none for the user's own model."""
    return model.fixed if isinstance(model, OwnCopy) else {}


def _digest(origin: Model, fixed: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(origin.sha256.encode())
    for name in sorted(fixed):
        value = fixed[name]
        digest.update(f" {name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    return digest.hexdigest()
