"""Puts the files of a result into their folder all at once, and never over files of the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqspec._core.files import RESULT, explained, partial_folder
from qdqspec.app.preparation.cached import FRONT, REGIONS, table_of
from qdqspec.errors import OutputError
from qdqspec.graph.model import Model
from qdqspec.graph.save import refuse_overwriting

_CURE = "choose another output folder: --qdq-output DIR of pytest, -o DIR of a verb"
_NUMBERED = re.compile(r"[0-9]+\.(onnx|onnx\.data|sh)")


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing; raises `OutputError` on failure."""
    with explained("the folder", folder, _CURE):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results to; they are moved to ``folder`` at the end, unless an error occurs.

    All files of a result appear together, never mixed with those of an earlier one: they are written to a hidden folder
    and moved out when the last one is complete. ``result.json``, which reports write after everything else, is removed
    before the first one moves: if it exists, the files beside it belong to it.

    Raises `OutputError` if they cannot be written, or would overwrite the model ``given``. It names the final file.
    """
    try:
        with explained("the results", folder, _CURE), partial_folder(folder) as stage:
            yield stage
            _move_out(stage, folder, given)
    except OutputError as error:
        hidden = Path(error.where or folder)
        where = folder / hidden.name if folder in hidden.parents else hidden
        raise OutputError(error.what, where=where, cure=error.cure) from None


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
    for models in (folder / FRONT, folder / REGIONS):
        _remove_models(models, given)
    for name in files:  # a model must never be read with the weights of another one
        if _weights_of(folder / name).exists():
            (folder / name).unlink(missing_ok=True)
            _weights_of(folder / name).unlink()
    for name in sorted(files, key=lambda name: name.suffix != ".data"):
        (folder / name.parent).mkdir(exist_ok=True)
        (stage / name).replace(folder / name)


def _remove_models(folder: Path, given: Model) -> None:
    """Remove the models of an earlier search, which may be more than those of the new one. The table lists them."""
    table = table_of(folder)
    if not table.is_file():
        return
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    numbers = {line.partition(".")[0] for line in lines}
    models = [
        f for f in folder.iterdir() if _NUMBERED.fullmatch(f.name) and f.name.partition(".")[0] in numbers
    ]
    own = {path.resolve() for path in given.user_files}
    for file in (*models, table):
        if file.resolve() not in own:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # the folder also holds files of the user
        folder.rmdir()


def _weights_of(model: Path) -> Path:
    return model.with_name(model.name + ".data")
