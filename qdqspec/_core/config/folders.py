"""Assigns output folders to specs.

The folder is ``<spec>/<case>``. If several folders have specs of one name, the spec that ran first keeps it,
recorded in a file in ``<spec>/``, and another one uses ``<spec>.<its folder>/<case>``, so that results of two
specs are never mixed. A folder named on the command line holds that file itself.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from qdqspec._core.config.settings import Settings
from qdqspec._core.files import create_file, replace_file
from qdqspec.types import Case

_NOTE = ".spec.json"


def find_folder(settings: Settings, case: Case) -> Path:
    """The folder of a case's files: ``output/<spec>/<case>``, or according to ``settings.layout``."""
    return _folder(settings, case, claim=False)


def claim_folder(settings: Settings, case: Case) -> Path:
    """The folder of a case's files, recorded as owned by its spec. Called before files are written."""
    return _folder(settings, case, claim=True)


def other_owner(folder: Path, case: Case) -> str | None:
    """The spec or model that owns a named output folder; ``None`` if it is this case's own, or free."""
    note = _read(folder)
    if note is None or _is_same(note, _note(case, folder)):
        return None
    return str(note.get("spec") or note.get("model"))


def note_owner(folder: Path, case: Case) -> None:
    """Record the owner of a named output folder. Raises ``OSError``."""
    replace_file(folder / _NOTE, json.dumps(_note(case, folder), indent=1) + "\n")


def _folder(settings: Settings, case: Case, *, claim: bool) -> Path:
    if settings.layout != "spec/case":
        return settings.output / case.id if settings.layout else settings.output
    mine = _note(case, settings.output)
    for name in _names(case, settings.root):
        folder = settings.output / name
        note = _read(folder)
        if note is not None and not _owner_is_missing(note, settings.output):
            if _is_same(note, mine):
                return folder / case.id
        elif not claim or _claimed(folder, mine, settings.output):
            return folder / case.id
    raise AssertionError("names never end")


def _names(case: Case, root: Path) -> Iterator[str]:
    """``net``; for later specs of that name ``net.specs-door``, then with numbers."""
    yield case.spec_name
    home = (case.spec or case.model).parent
    parts = home.relative_to(root).parts if home.is_relative_to(root) else (home.name,)
    longer = f"{case.spec_name}.{'-'.join(parts) or 'root'}"
    yield longer
    for number in itertools.count(2):
        yield f"{longer}-{number}"


def _note(case: Case, output: Path) -> dict[str, str | None]:
    """The owner of a folder, by paths relative to the output folder, so that the project can be moved."""
    spec = None if case.spec is None else _from(output, case.spec)
    return {"spec": spec, "model": _from(output, case.model)}


def _from(output: Path, path: Path) -> str:
    try:
        return Path(os.path.relpath(path, output)).as_posix()
    except ValueError:  # on another drive
        return path.as_posix()


def _is_same(note: Mapping[str, object], mine: Mapping[str, object]) -> bool:
    """Whether both are of one spec; a bare model and a spec are the same if the spec is of that model."""
    what = "spec" if note.get("spec") and mine["spec"] else "model"
    return note.get(what) == mine[what]


def _owner_is_missing(note: Mapping[str, object], output: Path) -> bool:
    """Whether the owner no longer exists: it was renamed or deleted."""
    return not (output / str(note.get("spec") or note.get("model"))).exists()


def _read(folder: Path) -> dict[str, object] | None:
    """The record of the owner; ``None`` if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        note = json.loads((folder / _NOTE).read_bytes())
        return note if isinstance(note, dict) else None
    return None


def _claimed(folder: Path, mine: Mapping[str, object], output: Path) -> bool:
    """Record the owner, unless another process has recorded another spec; errors are reported by later writes."""
    text = json.dumps(mine, indent=1) + "\n"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            create_file(folder / _NOTE, text)
        except FileExistsError:
            note = _read(folder)
            if note is not None and not _owner_is_missing(note, output):
                return _is_same(note, mine)
            replace_file(folder / _NOTE, text)
    return True
