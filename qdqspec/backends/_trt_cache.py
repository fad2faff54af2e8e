"""What the builds of one run share: TensorRT's timing cache.

With one cache, layers that two candidates have in common get the same kernels, and are not timed twice
(3473 to 182 ms in a recorded build). It is keyed by device and exact version, since TensorRT merges no
others, and lies with the results, because a noisy entry stays in it for the whole run. That is why a fresh
build, which is to show how much builds differ, begins with an empty one and leaves the run's as it was.

Beside each file stands its digest: TensorRT reads the bytes in native code, and what a disk or a kill has spoilt
would crash every build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from qdqspec.errors import BackendError
from qdqspec.files import explained, replace_file

if TYPE_CHECKING:
    import tensorrt as trt


class Shared:
    """The files of one run for one device and version; nothing is kept where there is no folder.

    ``cache`` is a timing cache of the user's, kept across runs, in place of the run's own.
    """

    def __init__(
        self, folder: Path | None, key: str, *, fresh: bool = False, cache: Path | None = None
    ) -> None:
        self._folder = folder
        self._given = cache
        self._key = key
        self._fresh = fresh
        self.notes: list[str] = []  # what was found damaged
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def kind(self) -> str:
        """What a build begins with: ``shared``, or ``empty`` where it is fresh or nothing is kept."""
        return "empty" if self._fresh or self._cache_file is None else "shared"

    def attach(self, config: trt.IBuilderConfig) -> trt.ITimingCache | None:
        """Give a build what earlier ones learnt. The answer must live until the build is done.

        TensorRT refuses a cache of another driver or a damaged one: then it starts anew. A cache of the user's that is
        refused is an error, since the build would replace it.
        """
        with self._lock():
            known = b"" if self._fresh else self._read(self._cache_file)
        for content in dict.fromkeys((known, b"")):
            cache = config.create_timing_cache(content)
            if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
                return cache
            if content and self._given is not None:
                raise BackendError(
                    "TensorRT refuses the timing cache: it is damaged, or of another GPU or version",
                    where=self._given,
                    cure="name another file with tensorrt.timing-cache; one that does not exist is created",
                )
        return None

    def keep(self, config: trt.IBuilderConfig) -> None:
        """Merge what a build learnt into the file, with what others wrote since."""
        learnt = config.get_timing_cache()
        if self._cache_file is None or self._fresh or learnt is None:
            return
        with self._lock():
            others = self._read(self._cache_file)
            if others and (known := config.create_timing_cache(others)) is not None:
                learnt.combine(known, ignore_mismatch=False)
            self._write(self._cache_file, bytes(learnt.serialize()))

    def record(self, facts: Mapping[str, Any]) -> None:
        """Append one line about a build to ``builds.jsonl``."""
        if self._folder is not None:
            with self._lock(), (self._folder / "builds.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")

    @property
    def _cache_file(self) -> Path | None:
        return self._given or (self._folder and self._folder / f"{self._key}.timing-cache")

    def _lock(self) -> AbstractContextManager[object]:
        if self._given is not None:
            return FileLock(self._given.with_name(f"{self._given.name}.lock"))
        return nullcontext() if self._folder is None else FileLock(self._folder / f"{self._key}.lock")

    def _read(self, path: Path | None) -> bytes:
        """What was written, nothing where there is nothing or it is damaged."""
        if path is None:
            return b""
        if path != self._given and (damage := set_aside_damaged(path)) is not None:
            self.notes.append(damage)
        with suppress(FileNotFoundError):
            return path.read_bytes()
        return b""

    def _write(self, path: Path | None, content: bytes) -> None:
        """Whole or not at all."""
        assert path is not None
        with explained("the timing cache", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
            if path != self._given:
                seal(path)


def seal(path: Path) -> None:
    """Note what a file holds now, beside it."""
    replace_file(_seal_of(path), _digest(path))


def set_aside_damaged(path: Path) -> str | None:
    """Rename a file that does not hold what was noted, and say so; ``None`` where it does, or there is none."""
    if not path.exists():
        return None
    noted = _seal_of(path)
    if noted.exists() and noted.read_bytes() == _digest(path).encode():
        return None
    path.replace(path.with_name(f"{path.name}.damaged"))
    return f"{path.name} is not as it was written: set aside as {path.name}.damaged, and begun anew"


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
