"""The cache on disk: folders of files under a key computed from everything they depend on.

A cache can always be rebuilt, so no error here fails a run: a damaged entry counts as missing, a folder that cannot be
written is replaced by a temporary one for this run, and both are reported in ``warnings``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from qdqspec._core.files import (
    PartialFolder,
    TemporaryFolder,
    explained,
    file_digest,
    is_full,
    remove_partial,
    replace_file,
    unwritable,
)
from qdqspec._core.records import content_sum, parse_json
from qdqspec.errors import StateError

MANIFEST = "entry.json"
# Errors of a folder that cannot be written; any other error is that of the function which fills the entry.
_UNWRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of qdqspec; it may be deleted at any time.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEntry:
    """One entry. ``damage`` describes its damage, empty if intact."""

    folder: Path
    size_bytes: int
    age_seconds: float
    damage: str


class Store:
    """The cache in ``folder``, created on first write. ``clock`` gives seconds since the epoch."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self._clock = clock
        self._elsewhere: Path | None = None  # a temporary folder, if ours cannot be written

    def get(self, key: str) -> Path | None:
        """The entry's folder; ``None`` if it is missing or damaged."""
        for entry in filter(Path.is_dir, (root / key for root in self._roots())):
            reason = _damage(entry)
            if reason is None:
                return entry
            if entry.is_dir():  # else another run has just removed it
                self.warn(f"{entry}: a damaged cache entry was ignored ({reason}); it will be made anew")
        return None

    def put(self, key: str, fill: Callable[[Path], None]) -> Path:
        """Call ``fill`` to write an entry's files to an empty folder, and store them under ``key``.

        The entry appears atomically; an intact one stored meanwhile is kept instead. ``fill`` is called once more if
        the cache cannot be written. Raises `OutputError` if a temporary folder has no space either, and any error of
        ``fill``.
        """
        try:
            root = self._elsewhere or self._made_folder()
            with PartialFolder(root) as partial:
                entry = partial / key  # with the rights of a new folder: other users may share the cache
                entry.mkdir()
                fill(entry)
                _write_manifest(entry, self._clock())
                return _move_in(entry, root / key)
        except OSError as error:
            if error.errno not in _UNWRITABLE and not is_full(error):
                raise
            if self._elsewhere is not None:
                cure = "set TMPDIR to another folder"
                raise unwritable("the cache entry", self._elsewhere, error, cure) from None
            self._own = TemporaryFolder()  # from now on, for the lifetime of this object
            self._elsewhere = self._own.path
            reason = error.strerror or error
            self.warn(f"{self.folder}: the cache cannot be written ({reason}); this run goes on without it")
        return self.put(key, fill)

    def discard(self, key: str) -> None:
        """Remove an entry, if it exists, because its result is no longer valid."""
        for root in self._roots():
            _remove(root / key)

    def age_seconds(self, entry: Path) -> float:
        """The age of an entry; never negative, even if the clock was set back. A damaged one has that of its folder."""
        try:
            created = float(_manifest(entry)["created"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            created = entry.stat().st_mtime if entry.exists() else 0.0
        return max(0.0, self._clock() - created)

    def entries(self) -> tuple[StoreEntry, ...]:
        """Every entry, the oldest first. Each is read to find damage; one that is removed meanwhile is omitted."""
        found = []
        for entry in self._entries():
            damage = _damage(entry) or ""
            with suppress(FileNotFoundError):
                size = sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
                age = self.age_seconds(entry)
                found.append(StoreEntry(folder=entry, size_bytes=size, age_seconds=age, damage=damage))
        return tuple(sorted((each for each in found if each.size_bytes), key=lambda each: -each.age_seconds))

    def prune(self, older_than_seconds: float) -> int:
        """Remove entries of at least that age, and incomplete ones; returns the number of entries removed."""
        old = [entry for entry in self._entries() if self.age_seconds(entry) >= older_than_seconds]
        for entry in old:
            _remove(entry)
        remove_partial(self.folder)
        return sum(not entry.exists() for entry in old)

    def export(self, archive: Path) -> int:
        """Write all intact entries to a zip archive, in one step; returns their number. Raises `OutputError`."""
        with explained("the archive", archive), PartialFolder(archive.parent) as folder:
            copies = folder / "entries"
            copies.mkdir()
            for entry in self._entries():
                with suppress(FileNotFoundError, shutil.Error):  # removed meanwhile
                    shutil.copytree(entry, copies / entry.name)
                if _damage(copies / entry.name) is not None:
                    shutil.rmtree(copies / entry.name, ignore_errors=True)
            Path(shutil.make_archive(f"{folder / 'whole'}", "zip", copies)).replace(archive)
            return len(list(copies.iterdir()))

    def take(self, archive: Path) -> tuple[int, int]:
        """Add the entries of an archive of `export`; returns the number added, and of those already present.

        Raises `StateError` for an archive that is missing, is damaged or has other files, before any entry is added.
        """
        if not archive.is_file():
            raise StateError("there is no such archive", where=archive, cure="check the path")
        try:
            with PartialFolder(self._made_folder()) as partial:
                with zipfile.ZipFile(archive) as file:
                    file.extractall(partial)  # whatever its names are, inside of this folder
                entries = sorted(partial.iterdir())
                for entry in entries:
                    if (reason := _damage(entry)) is not None:
                        raise ValueError(f"entry {entry.name[:200]!r}: {reason}")
                fresh = [entry for entry in entries if self.get(entry.name) is None]
                for entry in fresh:
                    _move_in(entry, self.folder / entry.name)
        except (ValueError, EOFError, LookupError, zipfile.BadZipFile, RuntimeError) as error:
            cure = "export it again; nothing was added"
            raise StateError(f"this archive cannot be imported: {error}", where=archive, cure=cure) from None
        except OSError as error:
            raise unwritable("the cache", self.folder, error, "choose another with --cache-dir") from None
        return len(fresh), len(entries) - len(fresh)

    def _roots(self) -> tuple[Path, ...]:
        return (self.folder,) if self._elsewhere is None else (self._elsewhere, self.folder)

    def _made_folder(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
            if not (self.folder / name).exists():
                replace_file(self.folder / name, text)
        return self.folder

    def _entries(self) -> list[Path]:
        return sorted(p.parent for p in self.folder.glob(f"[!.]*/{MANIFEST}"))

    def warn(self, text: str) -> None:
        """Add a warning about the cache, once."""
        if text not in self.warnings:
            self.warnings.append(text)


def cache_key(**parts: object) -> str:
    """The key of an entry that depends on ``parts``: JSON values; the order of keys in mappings does not matter."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _move_in(partial: Path, entry: Path) -> Path:
    """Rename a complete folder to its place, unless an intact one exists already."""
    with FileLock(entry.parent / ".lock", thread_local=False):
        if entry.is_dir():
            if _damage(entry) is None:
                return entry
            _remove(entry)
        partial.rename(entry)
    return entry


def _remove(entry: Path) -> None:
    """Remove an entry, if it exists, in one step as other runs see it: renamed first. Errors are ignored."""
    if entry.is_dir():
        with suppress(OSError), PartialFolder(entry.parent) as folder:
            entry.rename(folder / entry.name)


def _write_manifest(folder: Path, created: float) -> None:
    files = {path.relative_to(folder).as_posix(): file_digest(path) for path in _files(folder)}
    manifest: dict[str, object] = {"created": created, "files": files}
    data = json.dumps({**manifest, "sum": content_sum(manifest)}, indent=1).encode()
    with (folder / MANIFEST).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _damage(entry: Path) -> str | None:
    """The damage of an entry; ``None`` if intact."""
    try:
        expected = _manifest(entry)["files"]
        for name in {*expected, *(p.relative_to(entry).as_posix() for p in _files(entry))}:
            if file_digest(entry / name) != expected.get(name):
                return f"'{name}' was changed"
    except FileNotFoundError as error:
        return f"'{Path(error.filename or MANIFEST).name}' is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"'{MANIFEST}' was changed"
    return None


def _manifest(entry: Path) -> dict[str, Any]:
    """The manifest of an entry. Raises ``ValueError`` if it was changed."""
    manifest: dict[str, Any] = parse_json((entry / MANIFEST).read_bytes())
    total = manifest.pop("sum", None)
    if manifest.keys() != {"created", "files"} or total != content_sum(manifest):
        raise ValueError("its sum does not fit")
    return manifest


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
