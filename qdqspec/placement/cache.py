"""The pattern cache: the best schemes of each pattern, by backend and device, for warm starts of later searches.

A pattern is stored twice, with its shapes and without, so that a smaller variant of a model also matches.
Ratios are those of whole models, reference one: they rank the schemes of a pattern and do not predict another
model's ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qdqspec.errors import StateError
from qdqspec.placement.relative import Frames, Scheme, find_ends, placement_of, schemes_of
from qdqspec.placement.space import SchemeSpace, labels_of
from qdqspec.regions.pattern import PatternGranularity
from qdqspec.types import NOT_CANDIDATES, Interval, Label, Placement, Region, Trial

MOST = 32  # schemes per pattern
MINIMUM_DISTANCE = 2  # schemes that differ in fewer sites count as duplicates
UNPROVED = 0.02  # penalty of a ratio without confirmation by fresh builds
GRANULARITIES: tuple[PatternGranularity, ...] = ("structure+shapes", "structure")
_BEST_TRIALS = 64  # trials whose schemes are stored
_STARTS = 2  # warm starts of different rank; each takes one build of the next search
_CLOSE = 1.1  # largest ratio of a lower rank to the best for a warm start


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

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends with entries."""
        return tuple(sorted({key.backend for key in self.entries}))


def pruned(
    entries: Iterable[CacheEntry], *, most: int = MOST, minimum_distance: int = MINIMUM_DISTANCE
) -> tuple[CacheEntry, ...]:
    """The best entries first, without duplicates of better ones, at most ``most``."""
    kept: list[CacheEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.rank):
        if len(kept) == most:
            break
        if all(entry.scheme.distance(better.scheme) >= minimum_distance for better in kept):
            kept.append(entry)
    return tuple(kept)


# ---- out of a search ----------------------------------------------------------------------------


def gather(
    trials: Sequence[Trial],
    space: SchemeSpace,
    backend: str,
    device: str,
    *,
    confirmed: Mapping[str, Interval] | None = None,
) -> PatternCache:
    """The entries from the trials of a search. ``confirmed`` are ratios of fresh builds, by placement."""
    proved = confirmed or {}
    good = [t for t in trials if t.ok and t.ratio is not None and t.phase not in NOT_CANDIDATES]
    good.sort(key=lambda trial: _entry(Scheme(), trial, proved).rank)
    found: dict[Key, list[CacheEntry]] = {}
    texts: dict[str, str] = {}
    for granularity in GRANULARITIES:
        frames = Frames(space.model, space.regions, granularity)
        for trial in good[:_BEST_TRIALS]:
            for pattern, scheme, text in _told(frames, space, trial.placement):
                texts[pattern] = text
                found.setdefault(Key(backend, device, pattern), []).append(_entry(scheme, trial, proved))
    return PatternCache(entries={key: pruned(entries) for key, entries in found.items()}, texts=texts)


def _told(frames: Frames, space: SchemeSpace, placement: Placement) -> Iterator[tuple[str, Scheme, str]]:
    """The most frequent scheme of each pattern with units, and the pattern's text."""
    schemes = schemes_of(frames, placement)
    counts: dict[str, Counter[Scheme]] = {}
    texts: dict[str, str] = {}
    for region in frames.leaves:
        if not space.unit_of.keys().isdisjoint(region.nodes):
            pattern = frames.of(region.id).pattern
            counts.setdefault(pattern, Counter())[schemes[region.id]] += 1
            texts[pattern] = region.pattern_text
    for pattern, count in counts.items():
        scheme = min(count, key=lambda scheme: (-count[scheme], scheme.digest))
        yield pattern, scheme, texts[pattern]


def _entry(scheme: Scheme, trial: Trial, confirmed: Mapping[str, Interval]) -> CacheEntry:
    interval = confirmed.get(trial.placement.digest)
    if interval is not None:
        return CacheEntry(scheme=scheme, ratio=interval.median, interval=(interval.low, interval.high))
    assert trial.ratio is not None
    return CacheEntry(scheme=scheme, ratio=trial.ratio)


# ---- into a search ------------------------------------------------------------------------------


class WarmStart(NamedTuple):
    """A placement to begin with. ``proved`` if this device measured the best scheme of each region in it."""

    placement: Placement
    proved: bool


class _Known(NamedTuple):
    """The entries for one region, and the index of the frames that they refer to."""

    frames: int
    entries: tuple[CacheEntry, ...]


def warm_starts(
    cache: PatternCache, regions: Sequence[Region], space: SchemeSpace, backend: str, device: str
) -> tuple[WarmStart, ...]:
    """Placements to begin with: the best known scheme of each pattern, then the second best.

    Entries of this device take precedence over those of others; if it has entries for each region, only the
    best is returned. Regions of unknown patterns stay float, and in one more placement are fully quantized.
    Raises `StateError` if the cache has entries of other backends only.
    """
    if cache.entries and backend not in cache.backends:
        raise StateError(
            f"the pattern cache was made on {', '.join(cache.backends)}, not on {backend}: "
            "speed differs between backends",
            cure=f"start from a patterns.yaml that a run on {backend} has left",
        )
    usable = _usable(cache, backend, device)
    frames = [Frames(space.model, regions, granularity) for granularity in GRANULARITIES]
    known = {
        region.id: entries
        for region in frames[0].leaves
        if (entries := _known(usable, frames, region.id)) is not None
    }
    starts: dict[str, WarmStart] = {}
    unknown = {unit.id: unit.full for unit in space.units if frames[0].leaf_of.get(unit.id) not in known}
    patterns = [frames[found.frames].of(region_id).pattern for region_id, found in known.items()]
    is_own = all(Key(backend, device, pattern) in cache.entries for pattern in patterns)
    proved = not unknown and is_own
    ranks = 1 if proved else _STARTS
    for rank in range(ranks if known else 0):
        labels = _composed(frames, space, known, rank)
        for start in (space.resolve({**labels, **(unknown if rank == 0 else {})}), space.resolve(labels)):
            if start.sites or proved:  # an empty start records that a similar model stays float
                starts.setdefault(start.digest, WarmStart(start, proved))
    return tuple(starts.values())


def _usable(cache: PatternCache, backend: str, device: str) -> dict[str, tuple[CacheEntry, ...]]:
    """Entries by pattern: this device's, or if it has none those of all other devices."""
    own: dict[str, tuple[CacheEntry, ...]] = {}
    others: dict[str, tuple[CacheEntry, ...]] = {}
    for key, entries in cache.entries.items():
        if key.backend == backend:
            found = own if key.device == device else others
            found[key.pattern] = (*found.get(key.pattern, ()), *entries)
    return {pattern: pruned(entries) for pattern, entries in {**others, **own}.items()}


def _known(
    usable: Mapping[str, tuple[CacheEntry, ...]], frames: Sequence[Frames], region_id: str
) -> _Known | None:
    """The entries for a region; those with its shapes if there are any."""
    for index, framed in enumerate(frames):
        entries = usable.get(framed.of(region_id).pattern, ())
        frame = framed.of(region_id)
        fitting = tuple(  # all places of the scheme exist in the region: a cache may contain any
            entry
            for entry in entries
            if all(find_ends(framed, frame, site.place) is not None for site in entry.scheme.sites)
        )
        if fitting:
            return _Known(index, fitting)
    return None


def _composed(
    frames: Sequence[Frames],
    space: SchemeSpace,
    known: Mapping[str, _Known],
    rank: int,
) -> dict[str, Label]:
    """Labels of all units if each region uses its scheme of that rank, or its best if none is close."""
    placements = []
    for index, framed in enumerate(frames):
        schemes = {
            region_id: _ranked(found.entries, rank).scheme
            for region_id, found in known.items()
            if found.frames == index
        }
        placements.append(placement_of(framed, schemes))
    return labels_of(space, *placements)


def _ranked(entries: Sequence[CacheEntry], rank: int) -> CacheEntry:
    close = [entry for entry in entries if entry.ratio <= _CLOSE * entries[0].ratio]
    return close[rank] if rank < len(close) else entries[0]
