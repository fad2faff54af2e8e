"""Which folder of a run's output belongs to which spec.

It is ``<spec>/<case>``. Where several folders have specs of one name, the spec that ran first keeps it, as a note in
``<spec>/`` states, and another one has ``<spec>.<its folder>/<case>``: results of two specs never meet. A folder
that is named on the command line has the note in itself.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from qdqspec.config.settings import Settings
from qdqspec.files import create_file, replace_file
from qdqspec.types import Case

_NOTE = ".spec.json"


def find_folder(settings: Settings, case: Case) -> Path:
    """Where the files of a case are, or would go: ``output/<spec>/<case>``, or as ``settings.layout`` says."""
    return _folder(settings, case, claim=False)


def claim_folder(settings: Settings, case: Case) -> Path:
    """The same before files are written there: from now on the folder is this spec's own."""
    return _folder(settings, case, claim=True)


def other_owner(folder: Path, case: Case) -> str | None:
    """The spec or model that a named output folder belongs to, as its note states; ``None`` where it is this one's."""
    note = _read(folder)
    if note is None or _is_same(note, _note(case, folder)):
        return None
    return str(note.get("spec") or note.get("model"))


def note_owner(folder: Path, case: Case) -> None:
    """Note in a named output folder whose results it holds. Raises ``OSError``."""
    replace_file(folder / _NOTE, json.dumps(_note(case, folder), indent=1) + "\n")


def _folder(settings: Settings, case: Case, *, claim: bool) -> Path:
    if settings.layout != "spec/case":
        return settings.output / case.id if settings.layout else settings.output
    mine = _note(case, settings.output)
    for name in _names(case, settings.root):
        folder = settings.output / name
        note = _read(folder)
        if note is not None and not _is_gone(note, settings.output):
            if _is_same(note, mine):
                return folder / case.id
        elif not claim or _claimed(folder, mine, settings.output):
            return folder / case.id
    raise AssertionError("names never end")


def _names(case: Case, root: Path) -> Iterator[str]:
    """``net``; for later comers ``net.specs-door``, and numbers where even that is taken."""
    yield case.spec_name
    home = (case.spec or case.model).parent
    parts = home.relative_to(root).parts if home.is_relative_to(root) else (home.name,)
    longer = f"{case.spec_name}.{'-'.join(parts) or 'root'}"
    yield longer
    for number in itertools.count(2):
        yield f"{longer}-{number}"


def _note(case: Case, output: Path) -> dict[str, str | None]:
    """Whose a folder is, by paths from the output folder: the whole project may be moved."""
    spec = None if case.spec is None else _from(output, case.spec)
    return {"spec": spec, "model": _from(output, case.model)}


def _from(output: Path, path: Path) -> str:
    try:
        return Path(os.path.relpath(path, output)).as_posix()
    except ValueError:  # on another drive
        return path.as_posix()


def _is_same(note: Mapping[str, object], mine: Mapping[str, object]) -> bool:
    """Whether both are of one spec; a bare model and a spec are the same where the spec is of that model."""
    what = "spec" if note.get("spec") and mine["spec"] else "model"
    return note.get(what) == mine[what]


def _is_gone(note: Mapping[str, object], output: Path) -> bool:
    """Whether the owner is not there any more: it was renamed, or deleted."""
    return not (output / str(note.get("spec") or note.get("model"))).exists()


def _read(folder: Path) -> dict[str, object] | None:
    """The note; none where there is none, and where it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        note = json.loads((folder / _NOTE).read_bytes())
        return note if isinstance(note, dict) else None
    return None


def _claimed(folder: Path, mine: Mapping[str, object], output: Path) -> bool:
    """Write the note, unless another process has just written one of another spec.

    Where it cannot be written, the results cannot either, and writing them reports that.
    """
    text = json.dumps(mine, indent=1) + "\n"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            create_file(folder / _NOTE, text)
        except FileExistsError:
            note = _read(folder)
            if note is not None and not _is_gone(note, output):
                return _is_same(note, mine)
            replace_file(folder / _NOTE, text)
    return True
