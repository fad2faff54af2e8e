"""TensorRT's timing cache, shared by the builds of one run.

With one cache, layers that two candidates have in common get the same kernels, and are not timed twice (3473 to 182 ms
in a recorded build). It is keyed by device and exact version, since TensorRT merges no others, and stored with the
results, because an entry with a noisy timing stays for the whole run. So a fresh build, which measures the variation
between builds, begins with an empty cache and does not change the run's. A run's file begins with a digest: a damaged
one would crash TensorRT, which parses the bytes in native code, in every build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from qdqspec._core.files import explained, replace_file
from qdqspec.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt

_DIGEST_BYTES = 32


class Shared:
    """The files of one run for one device and version; nothing is stored without a folder.

    ``cache`` is a timing cache given by the user, kept between runs, which replaces the run's own.
    """

    def __init__(
        self, folder: Path | None, key: str, *, fresh: bool = False, cache: Path | None = None
    ) -> None:
        self._folder = folder
        self._given = cache
        self._cache_file = cache or (folder and folder / f"{key}.timing-cache")
        self._key = key
        self._fresh = fresh
        self.notes: list[str] = []  # damaged files found
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def kind(self) -> str:
        """The cache that a build begins with: ``shared``, or ``empty`` if it is fresh or nothing is stored."""
        return "empty" if self._fresh or self._cache_file is None else "shared"

    def attach(self, config: trt.IBuilderConfig) -> trt.ITimingCache | None:
        """Give a build the timings of earlier ones. The returned object must exist until the build is done.

        TensorRT rejects a damaged cache or one of another driver: then an empty one is used. For a cache given by the
        user this is an error, since the build would replace it.
        """
        with self._lock():
            known = self.read()
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
        """Merge the timings of a build into the file, with those written by other processes."""
        learnt = config.get_timing_cache()
        if self._cache_file is None or self._fresh or learnt is None:
            return
        with self._lock():
            others = self.read()
            if others and (known := config.create_timing_cache(others)) is not None:
                learnt.combine(known, ignore_mismatch=False)
            self.write(bytes(learnt.serialize()))

    def record(self, facts: Mapping[str, Any]) -> None:
        """Append one line about a build to ``builds.jsonl``."""
        if self._folder is not None:
            with self._lock(), (self._folder / "builds.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")

    def _lock(self) -> AbstractContextManager[object]:
        if self._given is not None:
            return FileLock(self._given.with_name(f"{self._given.name}.lock"))
        return nullcontext() if self._folder is None else FileLock(self._folder / f"{self._key}.lock")

    def read(self) -> bytes:
        """The stored timings; empty if the build is fresh, there are none or they are damaged."""
        try:
            content = b"" if self._fresh or self._cache_file is None else self._cache_file.read_bytes()
        except FileNotFoundError:
            return b""
        if self._given is not None or not content:
            return content
        digest, timings = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(timings).digest() == digest:
            return timings
        self.notes.append(f"the timing cache of the run, {self._key}, is not as it was written: begun anew")
        return b""

    def write(self, timings: bytes) -> None:
        """Store timings, unless the build is fresh."""
        if self._cache_file is not None and not self._fresh:
            with explained("the timing cache", self._cache_file):
                self._cache_file.parent.mkdir(parents=True, exist_ok=True)
                digest = b"" if self._given else hashlib.sha256(timings).digest()
                replace_file(self._cache_file, digest + timings)
