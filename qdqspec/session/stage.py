"""Atomic publication of results: all files of a result appear together, never mixed with those of an earlier one.

They are written to a hidden folder and moved out when the last one is complete. ``result.json``, which reports write
after everything else, is removed before the first one moves: if it exists, the files beside it belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqspec.errors import OutputError
from qdqspec.files import RESULT, explained, partial_folder
from qdqspec.graph.model import Model
from qdqspec.graph.save import refuse_overwriting
from qdqspec.session.cached import FRONT, FRONT_TABLE

_CURE = "choose another output folder"
_DATA = ".data"  # suffix of the file that holds a model's weights
_FRONT_MODEL = re.compile(r"[0-9]+\.onnx")


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results to; they are moved to ``folder`` at the end, unless an error occurs.

    Raises `OutputError` if they cannot be written, or would overwrite the model ``given``.
    """
    with _named_as_meant(folder), explained("the results", folder, _CURE), partial_folder(folder) as stage:
        yield stage
        _move_out(stage, folder, given)


def refuse_own(folder: Path, names: Iterable[Path | str], given: Model) -> None:
    """Raise `OutputError` if files of these names in ``folder`` would overwrite the given model or its weights."""
    own = given.user_files
    for name in names:
        refuse_overwriting(folder / name, own)
        refuse_overwriting(_weights_of(folder / name), own)


def _move_out(stage: Path, folder: Path, given: Model) -> None:
    files = [path.relative_to(stage) for path in sorted(stage.rglob("*")) if path.is_file()]
    refuse_own(folder, files, given)
    (folder / RESULT).unlink(missing_ok=True)
    _forget_front(folder, given)
    for name in files:
        _forget_weights(folder / name)
    for name in sorted(files, key=lambda name: name.suffix != _DATA):
        (folder / name.parent).mkdir(exist_ok=True)
        (stage / name).replace(folder / name)


def _forget_front(folder: Path, given: Model) -> None:
    """Remove the front of an earlier search, which may be longer than the new one. Its table lists its files."""
    table = folder / FRONT / FRONT_TABLE
    if not table.is_file():
        return
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.partition(",")[0] for line in lines}
    models = [table.with_name(name) for name in names if _FRONT_MODEL.fullmatch(name)]
    own = {path.resolve() for path in given.user_files}
    for file in (*models, *map(_weights_of, models), table):
        if file.resolve() not in own:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # the folder also holds files of the user
        table.parent.rmdir()


def _forget_weights(model: Path) -> None:
    """Remove a model with its old weights, so that a model is never read with the weights of another one."""
    if _weights_of(model).exists():
        model.unlink(missing_ok=True)
        _weights_of(model).unlink()


def _weights_of(model: Path) -> Path:
    return model.with_name(model.name + _DATA)


@contextmanager
def _named_as_meant(folder: Path) -> Iterator[None]:
    """Errors name the final file, not the hidden one that was written first."""
    try:
        yield
    except OutputError as error:
        hidden = Path(error.where or folder)
        where = folder / hidden.name if folder in hidden.parents else hidden
        raise OutputError(error.what, where=where, cure=error.cure) from None
