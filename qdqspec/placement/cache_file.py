"""`patterns.yaml`: the pattern cache as a file.

Any bytes give a cache or a `StateError` with the file's name. Aliases are rejected: with them, a small file
can expand to a large one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from qdqspec.errors import PlacementError, StateError
from qdqspec.graph.save import write_text
from qdqspec.placement.cache import CacheEntry, Key, PatternCache, pruned
from qdqspec.placement.relative import parse_scheme

SCHEMA_VERSION = 1
MOST_BYTES = 4 * 2**20  # the parser takes a second for some 200 KB
_DEPTH = 10  # a cache has eight levels; the parser's time is quadratic in them
_WIDE = 2**20  # characters before a line is broken: one line per scheme
_CURE = "delete it, and let a tuning run write it anew"


def write_cache(path: Path, cache: PatternCache) -> None:
    """Write a cache atomically. Raises `OutputError` if it cannot be written."""
    write_text(path, cache_text(cache))


def cache_text(cache: PatternCache) -> str:
    """The YAML text of a cache; equal caches give equal texts."""
    caches: dict[tuple[str, str], list[dict[str, object]]] = {}
    for key in sorted(cache.entries):
        rows = [_row(entry) for entry in cache.entries[key]]
        pattern: dict[str, object] = {
            "pattern": key.pattern,
            "text": cache.texts.get(key.pattern, ""),
            "schemes": rows,
        }
        caches.setdefault((key.backend, key.device), []).append(pattern)
    content = {
        "schema_version": SCHEMA_VERSION,
        "caches": [
            {"backend": backend, "device": device, "patterns": patterns}
            for (backend, device), patterns in caches.items()
        ],
    }
    text = io.StringIO()
    yaml = YAML()
    yaml.width = _WIDE
    yaml.dump(content, text)
    return text.getvalue()


def _row(entry: CacheEntry) -> CommentedMap:
    row = CommentedMap(ratio=float(entry.ratio))
    if entry.interval is not None:
        row["interval"] = list(map(float, entry.interval))
    row["sites"] = str(entry.scheme)
    row.fa.set_flow_style()
    return row


def read_cache(path: Path) -> PatternCache:
    """Read a cache. Raises `StateError` naming the file if it is missing, damaged, or not a cache."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise StateError(
                f"a pattern cache has at most {MOST_BYTES:,} bytes, not {path.stat().st_size:,}",
                where=path,
                cure=_CURE,
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise StateError(f"the pattern cache cannot be read: {error.strerror}", where=path) from None
    except UnicodeDecodeError:
        raise StateError("the pattern cache is not UTF-8 text", where=path, cure=_CURE) from None
    return _checked(_plain(text, path), path)


def _plain(text: str, where: Path) -> object:
    try:
        _refuse_tricks(text, where)
        return YAML(typ="safe", pure=True).load(text)
    except StateError:
        raise
    except Exception as error:  # noqa: BLE001 - the parser raises various other errors for invalid text
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise StateError(f"the pattern cache is not YAML: {reason}", where=where, cure=_CURE) from None


def _refuse_tricks(text: str, where: Path) -> None:
    """Reject constructs that take the parser time or memory out of proportion to the file."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent):
            raise StateError("a pattern cache has no aliases", where=where, cure=_CURE)
        if depth > _DEPTH:
            raise StateError("this is not a pattern cache: it nests too deep", where=where, cure=_CURE)


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


class _Scheme(_Row):
    ratio: _Ratio
    interval: Annotated[list[_Ratio], Field(min_length=2, max_length=2)] | None = None
    sites: str

    @model_validator(mode="after")
    def _can_be_read(self) -> _Scheme:
        self.entry()
        return self

    def entry(self) -> CacheEntry:
        try:
            scheme = parse_scheme(self.sites)
        except PlacementError as error:
            raise ValueError(error.what) from None
        interval = None if self.interval is None else (self.interval[0], self.interval[1])
        return CacheEntry(scheme=scheme, ratio=self.ratio, interval=interval)


class _Pattern(_Row):
    pattern: str
    text: str = ""
    schemes: list[_Scheme]


class _Cache(_Row):
    backend: str
    device: str
    patterns: list[_Pattern]


class _File(_Row):
    schema_version: Literal[1]
    caches: list[_Cache]

    def rows(self) -> Iterator[tuple[Key, _Pattern]]:
        for cache in self.caches:
            for pattern in cache.patterns:
                yield Key(cache.backend, cache.device, pattern.pattern), pattern


def _checked(content: Any, where: Path) -> PatternCache:
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the whole file"
        raise StateError(
            f"this is not a pattern cache: {place}: {problem['msg']}", where=where, cure=_CURE
        ) from None
    entries: dict[Key, tuple[CacheEntry, ...]] = {}
    for key, pattern in file.rows():
        own = (scheme.entry() for scheme in pattern.schemes)
        entries[key] = pruned((*entries.get(key, ()), *own))
    return PatternCache(entries=entries, texts={key.pattern: row.text for key, row in file.rows()})
