"""The pattern cache: the best schemes of each pattern, by backend and device, for warm starts of later searches.

A pattern is stored twice, with its shapes and without, so that a smaller variant of a model also matches.
Ratios are those of whole models, reference one: they rank the schemes of a pattern and do not predict another
model's ratio. The file `patterns.yaml` holds a cache: any bytes give a cache or a `StateError` with the file's name.
Aliases are rejected: with them, a small file can expand to a large one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml.events import AliasEvent

from qdqspec._core.records import problem_text
from qdqspec.errors import PlacementError, StateError
from qdqspec.graph import first_line
from qdqspec.graph.regions import PatternGranularity
from qdqspec.qdq.region_schemes import Frames, Scheme, find_ends, parse_scheme, placement_of, schemes_of
from qdqspec.qdq.search_space import SchemeSpace, labels_of
from qdqspec.types import NOT_CANDIDATES, Interval, Placement, Region, Trial

UNPROVED = 0.02  # penalty of a ratio without confirmation by fresh builds
GRANULARITIES: tuple[PatternGranularity, ...] = ("structure+shapes", "structure")


class Key(NamedTuple):
    """The key of a row of the cache. Placements are not transferred between backends."""

    backend: str
    device: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A scheme and the ratio of the fastest model with it; ``interval`` if fresh builds confirmed it."""

    scheme: Scheme
    ratio: float
    interval: tuple[float, float] | None = None

    @property
    def rank(self) -> tuple[float, str, float, float]:
        """Sort key, smaller is better: first the upper bound of the ratio, then fields that make the order total."""
        low, high = self.interval or (self.ratio, self.ratio * (1 + UNPROVED))
        return high, self.scheme.digest, self.ratio, low


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternCache:
    """Entries of each key, the best first; ``texts`` are readable forms of the patterns."""

    entries: Mapping[Key, tuple[CacheEntry, ...]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def pruned(entries: Iterable[CacheEntry], most: int = 32) -> tuple[CacheEntry, ...]:
    """The best entry of each scheme, the best first. More than ``most`` would only make the file larger."""
    best: dict[Scheme, CacheEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.rank):
        best.setdefault(entry.scheme, entry)
    return tuple(best.values())[:most]


# ---- out of a search ----------------------------------------------------------------------------


def gather(
    trials: Sequence[Trial],
    space: SchemeSpace,
    backend: str,
    device: str,
    *,
    confirmed: Mapping[str, Interval] | None = None,
    best_trials: int = 64,
) -> PatternCache:
    """The entries from the trials of a search: of each pattern with units, the most frequent scheme of each trial.

    ``confirmed`` are ratios of fresh builds, by placement. More than the ``best_trials`` would make the file larger and
    hardly add schemes that a later search begins with.
    """
    proved = confirmed or {}
    good = [t for t in trials if t.ok and t.ratio is not None and t.phase not in NOT_CANDIDATES]
    good.sort(key=lambda trial: _make_entry(Scheme(), trial, proved).rank)
    found: dict[Key, list[CacheEntry]] = {}
    texts: dict[str, str] = {}
    for granularity in GRANULARITIES:
        frames = Frames(space.model, space.regions, granularity)
        leaves = [region for region in frames.leaves if not space.unit_of.keys().isdisjoint(region.nodes)]
        for trial in good[:best_trials]:
            schemes = schemes_of(frames, trial.placement)
            counts: dict[str, Counter[Scheme]] = {}
            for region in leaves:
                pattern = frames.of(region.id).pattern
                counts.setdefault(pattern, Counter())[schemes[region.id]] += 1
                texts[pattern] = region.pattern_text
            for pattern, count in counts.items():
                scheme = min(count, key=lambda scheme: (-count[scheme], scheme.digest))
                found.setdefault(Key(backend, device, pattern), []).append(_make_entry(scheme, trial, proved))
    return PatternCache(entries={key: pruned(entries) for key, entries in found.items()}, texts=texts)


def _make_entry(scheme: Scheme, trial: Trial, confirmed: Mapping[str, Interval]) -> CacheEntry:
    interval = confirmed.get(trial.placement.digest)
    if interval is not None:
        return CacheEntry(scheme=scheme, ratio=interval.median, interval=(interval.low, interval.high))
    assert trial.ratio is not None
    return CacheEntry(scheme=scheme, ratio=trial.ratio)


# ---- into a search ------------------------------------------------------------------------------


def warm_starts(
    cache: PatternCache, regions: Sequence[Region], space: SchemeSpace, backend: str, device: str
) -> tuple[Placement, ...]:
    """Placements to begin with, of the best known scheme of each pattern; those with its shapes precede others.

    Entries of this device take precedence over those of others. Regions of unknown patterns stay float, and in one
    more placement are fully quantized. Raises `StateError` if the cache has entries of other backends only.
    """
    backends = sorted({key.backend for key in cache.entries})
    if backends and backend not in backends:
        raise StateError(
            f"the pattern cache was made on {', '.join(backends)}, not on {backend}: "
            "speed differs between backends",
            cure=f"start from a patterns.yaml that a run on {backend} has left",
        )
    own: dict[str, tuple[CacheEntry, ...]] = {}
    others: dict[str, tuple[CacheEntry, ...]] = {}
    for key, entries in cache.entries.items():
        if key.backend == backend:
            of_device = own if key.device == device else others
            of_device[key.pattern] = (*of_device.get(key.pattern, ()), *entries)
    usable = {pattern: pruned(entries) for pattern, entries in {**others, **own}.items()}
    frames = [Frames(space.model, regions, granularity) for granularity in GRANULARITIES]
    schemes: list[dict[str, Scheme]] = [{} for _ in frames]
    known: set[str] = set()
    for framed, chosen in zip(frames, schemes, strict=True):
        for region in (region for region in framed.leaves if region.id not in known):
            frame = framed.of(region.id)
            # the best of which all places exist: a cache may contain any
            for entry in usable.get(frame.pattern, ()):
                if all(find_ends(framed, frame, site.place) is not None for site in entry.scheme.sites):
                    chosen[region.id] = entry.scheme
                    known.add(region.id)
                    break
    if not known:
        return ()
    labels = labels_of(space, *map(placement_of, frames, schemes))
    unknown = {unit.id: unit.full for unit in space.units if frames[0].leaf_of.get(unit.id) not in known}
    starts = (space.resolve({**labels, **unknown}), space.resolve(labels))
    # an empty start records that a similar model stays float
    return tuple({start.digest: start for start in starts if start.sites or not unknown}.values())


# ---- the file -----------------------------------------------------------------------------------

SCHEMA_VERSION = 1
MOST_BYTES = 4 * 2**20  # the parser takes a second for some 200 KB
_WIDE = 2**20  # characters before a line is broken: one line per scheme
_CURE = "delete it, and let a tuning run write it anew"


def cache_text(cache: PatternCache) -> str:
    """The YAML text of a cache; equal caches give equal texts."""
    caches: dict[tuple[str, str], list[dict[str, object]]] = {}
    for key in sorted(cache.entries):
        rows = []
        for entry in cache.entries[key]:
            rows.append(_Line(ratio=float(entry.ratio)))
            if entry.interval is not None:
                rows[-1]["interval"] = list(map(float, entry.interval))
            rows[-1]["sites"] = str(entry.scheme)
        pattern: dict[str, object] = {"pattern": key.pattern, "text": cache.texts.get(key.pattern, "")}
        caches.setdefault((key.backend, key.device), []).append(pattern | {"schemes": rows})
    content = {
        "schema_version": SCHEMA_VERSION,
        "caches": [
            {"backend": backend, "device": device, "patterns": patterns}
            for (backend, device), patterns in caches.items()
        ],
    }
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDE))


class _Line(dict[str, object]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # of a library without types
    """Writes each `_Line` on one line, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - of any value
        return True


_Dumper.add_representer(
    _Line, lambda dumper, row: dumper.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True)
)


def read_cache(path: Path) -> PatternCache:
    """Read a cache. Raises `StateError` naming the file if it is missing, damaged, or not a cache."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            what = f"a pattern cache has at most {MOST_BYTES:,} bytes, not {size:,}"
            raise StateError(what, where=path, cure=_CURE)
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise StateError(f"the pattern cache cannot be read: {error.strerror}", where=path) from None
    except UnicodeDecodeError:
        raise StateError("the pattern cache is not UTF-8 text", where=path, cure=_CURE) from None
    try:
        content = yaml.safe_load(text)  # deep nesting is an error, aliases share what they name
        if any(isinstance(event, AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise yaml.YAMLError("a pattern cache has no aliases")
    except Exception as error:  # noqa: BLE001 - the parser raises various other errors for invalid text
        what = f"the pattern cache is not YAML: {first_line(error)}"
        raise StateError(what, where=path, cure=_CURE) from None
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        what = f"this is not a pattern cache: {problem_text(error, 'the whole file')}"
        raise StateError(what, where=path, cure=_CURE) from None
    entries: dict[Key, tuple[CacheEntry, ...]] = {}
    texts: dict[str, str] = {}
    for part in file.caches:
        for pattern in part.patterns:
            key = Key(part.backend, part.device, pattern.pattern)
            own = (scheme.entry() for scheme in pattern.schemes)
            entries[key] = pruned((*entries.get(key, ()), *own))
            texts[pattern.pattern] = pattern.text
    return PatternCache(entries=entries, texts=texts)


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
