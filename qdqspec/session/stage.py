"""All files of a result appear together, and never mixed with those of an earlier one. Part of the session.

They are written in a hidden folder and moved out when the last one is whole. ``result.json``, which reports write
after everything else, goes before the first one moves: where it stands, the files beside it belong to it.
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
from qdqspec.session.kept import FRONT, FRONT_TABLE

_CURE = "choose another output folder"
_DATA = ".data"  # of the file that holds a model's weights beside it
_FRONT_MODEL = re.compile(r"[0-9]+\.onnx")


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results in; they are moved to ``folder`` unless something goes wrong on the way.

    Raises `OutputError` where they cannot be written, or would overwrite the model ``given``.
    """
    with _named_as_meant(folder), explained("the results", folder, _CURE), partial_folder(folder) as stage:
        yield stage
        _move_out(stage, folder, given)


def refuse_own(folder: Path, names: Iterable[Path | str], given: Model) -> None:
    """Raise `OutputError` where files of these names in ``folder`` would overwrite the model given, or its weights."""
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
    """The front of an earlier search may be longer than this one's, which may have none. Its table names its files."""
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
    with suppress(OSError):  # something of the user's is in it
        table.parent.rmdir()


def _forget_weights(model: Path) -> None:
    """A model must never be read with another one's weights: for a moment there is no model instead."""
    if _weights_of(model).exists():
        model.unlink(missing_ok=True)
        _weights_of(model).unlink()


def _weights_of(model: Path) -> Path:
    return model.with_name(model.name + _DATA)


@contextmanager
def _named_as_meant(folder: Path) -> Iterator[None]:
    """Errors name the file that was to be, not where it was written first."""
    try:
        yield
    except OutputError as error:
        hidden = Path(error.where or folder)
        where = folder / hidden.name if folder in hidden.parents else hidden
        raise OutputError(error.what, where=where, cure=error.cure) from None
