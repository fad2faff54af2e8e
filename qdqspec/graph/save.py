"""Writes models atomically, and never over the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from qdqspec._core.files import explained, partial_folder, write_whole
from qdqspec.errors import OutputError
from qdqspec.graph.protos import is_external, map_tensors, tensors
from qdqspec.graph.weights import WeightStore, external_length, with_own_bytes

INLINE_LIMIT = 1_900_000_000  # bytes of a model: protobuf is limited to 2 GiB


def save_model(
    model: onnx.ModelProto,
    path: Path,
    *,
    inputs: Sequence[Path] = (),
    base: Path | None = None,
    limit_bytes: int = INLINE_LIMIT,
) -> None:
    """Write a model atomically.

    ``inputs`` are files of the user that must not be overwritten. With ``base``, external data is read from
    that folder and included; without it, references are kept. A model of ``limit_bytes`` or more
    keeps its weights in ``<name>.data`` beside it. Raises `OutputError` if it cannot be written.
    """
    path = Path(path).absolute()
    data = path.with_name(path.name + ".data")
    refuse_overwriting(path, inputs)
    inner = [external_length(t) for t in tensors(model) if base is not None and is_external(t)]
    # tensor by tensor: protobuf computes no size above 2 GiB
    is_large = sum(inner) + sum(tensor.ByteSize() for tensor in tensors(model)) >= limit_bytes
    if is_large:
        refuse_overwriting(data, (*inputs, *_external_files(model, base)))
    _require_space(path)
    with explained("the file", path), partial_folder(path.parent) as folder:
        if is_large:
            store = WeightStore(folder, base=base, file_name=data.name)
            model = map_tensors(
                model, lambda t: t if base is None and is_external(t) else store.externalize(t)
            )
        elif inner:
            model = map_tensors(model, lambda t: with_own_bytes(t, base))
        with (folder / path.name).open("wb") as file:
            file.write(model.SerializeToString(deterministic=True))
        if (folder / data.name).exists():
            # An old model must never be read with new weights: for a moment no model exists.
            path.unlink(missing_ok=True)
            (folder / data.name).replace(data)
        (folder / path.name).replace(path)


def write_text(path: Path, text: str, *, inputs: Sequence[Path] = ()) -> None:
    """Write a text file atomically. Raises `OutputError` as `save_model` does."""
    path = Path(path).absolute()
    refuse_overwriting(path, inputs)
    _require_space(path)
    write_whole(path, text)


def refuse_overwriting(path: Path, inputs: Sequence[Path]) -> None:
    """Raise `OutputError` if ``path`` is one of ``inputs``, by any name or link."""
    for given in inputs:
        same = path.resolve() == given.resolve()
        if same or (path.exists() and given.exists() and path.samefile(given)):
            raise OutputError(
                f"the output would overwrite the input {given}",
                where=path,
                cure="choose another name with -o",
            )


def _external_files(proto: onnx.ModelProto, base: Path | None) -> list[Path]:
    if base is None:
        return []
    entries = [entry for t in tensors(proto) if is_external(t) for entry in t.external_data]
    return [base / name for name in sorted({e.value for e in entries if e.key == "location"})]


def _require_space(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError("there is no such folder to write to", where=path.parent, cure="make it first")
    if path.is_dir():
        raise OutputError("this is a folder, not a file to write", where=path, cure="name a file in it")
