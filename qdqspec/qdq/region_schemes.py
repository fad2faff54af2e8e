"""Schemes: the Q/DQ pairs of one region, relative to its pattern, to transfer placements between regions and models.

A scheme is independent of models. A `Frame` maps the places of a pattern to a region of a model; `schemes_of` and
`placement_of` convert placements to schemes and back. An edge, a tensor and the input that reads it, is of the leaf
of its reader. If a tensor leaves the leaf that makes it, quantized for all readers, the producer's leaf has it too, so
that each of both leaves can be transferred alone.

The file `patterns.yaml` holds the best schemes of each pattern, by backend and device, for warm starts of later
searches. A pattern is stored twice, with its shapes and without, so that a smaller variant of a model also matches.
Ratios are those of whole models, reference one: they rank the schemes of a pattern and do not predict another
model's ratio. Any bytes give a cache or a `StateError` with the file's name. Aliases are rejected: with them, a small
file can expand to a large one.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias, cast

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from yaml.events import AliasEvent

from qdqspec._core.records import problem_text
from qdqspec.errors import PlacementError, StateError
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import is_commutative
from qdqspec.graph.regions import PatternGranularity, PatternMaker, flow_of
from qdqspec.qdq.search_space import SchemeSpace, group_sites, join_readers, labels_of
from qdqspec.types import NOT_CANDIDATES, Consumer, Interval, Placement, Region, Site, Trial

PlaceKind: TypeAlias = Literal["in", "out", "result"]


@dataclass(frozen=True, slots=True, order=True)
class RelativeSite:
    """A pair like `qdqspec.types.Site`, at a slot of a node of a pattern, by its canonical index, instead of names.

    ``in``: that input of the node. ``out``: that output, for all readers. ``result``: that output as an output
    of the model; ignored where it is not one.
    """

    kind: PlaceKind
    node: int
    slot: int
    format: str
    axis: int = -1  # -1: one scale for the whole tensor
    weight: bool = False

    def __str__(self) -> str:
        axis = f"/{self.axis}" if self.axis >= 0 else ""
        return f"{self.kind}{self.node}.{self.slot}={'w:' if self.weight else ''}{self.format}{axis}"


_WRITTEN = re.compile(
    r"(in|out|result)([0-9]{1,9})\.([0-9]{1,9})=(w:)?([a-z][a-z0-9_]{0,31})(?:/([0-9]{1,3}))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The pairs of one region. Equal sites are the same scheme, in any order."""

    sites: frozenset[RelativeSite] = frozenset()

    def __str__(self) -> str:
        """``in0.0=uint8 in0.1=w:int8/0 out2.0=uint8``; `parse_scheme` is the inverse."""
        return " ".join(map(str, sorted(self.sites)))

    @property
    def digest(self) -> str:
        """Sixteen hex digits, stable over runs, machines and order of sites."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def parse_scheme(text: str) -> Scheme:
    """The scheme of a text from ``str``. Raises `PlacementError` quoting the word that is not a site."""
    sites = []
    for word in text.split():
        match = _WRITTEN.fullmatch(word)
        if match is None:
            raise PlacementError(
                f"'{word[:60]}' is not a site", cure="a site is written like in0.1=w:int8/0 or out3.0=uint8"
            )
        kind, node, slot, weight, fmt, axis = match.groups()
        place = cast("PlaceKind", kind), int(node), int(slot)
        sites.append(RelativeSite(*place, fmt, -1 if axis is None else int(axis), weight is not None))
    return Scheme(sites=frozenset(sites))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A region with its nodes in the canonical order of its pattern."""

    region: Region
    pattern: str  # digest, in the granularity of the frames
    order: tuple[str, ...]
    position: Mapping[str, int]


class Frames:
    """The frames of a model's regions, each computed on first use.

    With ``granularity="structure"``, regions that differ in shapes only share their patterns.
    """

    def __init__(
        self, model: Model, regions: Iterable[Region], granularity: PatternGranularity = "structure+shapes"
    ) -> None:
        self.model = model
        self.regions = {region.id: region for region in regions}
        self._granularity = granularity
        self.of = cache(self._make_frame)
        self.place = cache(self._find_place)

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that partition the model."""
        return tuple(region for region in self.regions.values() if not region.children)

    @cached_property
    def leaf_of(self) -> dict[str, str]:
        """The leaf of each node, by name."""
        return {node: region.id for region in self.leaves for node in region.nodes}

    def _make_frame(self, region_id: str) -> Frame:
        """The frame of a region."""
        region, by_name = self.regions[region_id], self.model.by_name
        pattern = self._maker.make(by_name[name].index for name in region.nodes)
        position = {name: i for i, name in enumerate(pattern.order)}
        return Frame(region=region, pattern=pattern.digest, order=pattern.order, position=position)

    def _find_place(self, end: Consumer) -> tuple[str, int, int]:
        """The leaf of an input, its node and slot there. Raises `PlacementError` if no leaf has it."""
        if end.node not in self.leaf_of:
            raise PlacementError(f"node '{end.node}' is in no region", where=self.model.where)
        frame = self.of(self.leaf_of[end.node])
        # Its own slot, unless operands may be swapped.
        slot = self.slots_of(frame, self.model.by_name[end.node]).index(end.input)
        return frame.region.id, frame.position[end.node], slot

    @cached_property
    def _maker(self) -> PatternMaker:
        return PatternMaker(flow_of(self.model), self._granularity)

    def slots_of(self, frame: Frame, node: Node) -> tuple[int, ...]:
        """The inputs of a node, as indexes in canonical order."""
        inputs = range(len(node.inputs))
        if not is_commutative(node, self.model.opset):
            return tuple(inputs)
        return tuple(sorted(inputs, key=lambda i: (self._rank(frame, node.inputs[i]), i)))

    def _rank(self, frame: Frame, tensor: str) -> tuple[object, ...]:
        """Sort key of an operand that is the same in all regions of the pattern: its producer, or its readers."""
        maker = self.model.producer.get(tensor)
        if maker is not None and maker.name in frame.position:
            return 0, frame.position[maker.name], maker.outputs.index(tensor)
        ends = self.model.consumers.get(tensor, ())
        readers = sorted(frame.position[end.node] for end in ends if end.node in frame.position)
        elem_type, dims = self.model.elem_type(tensor), self.model.shape(tensor) or ()
        shape = tuple(-1 if dim is None else dim for dim in dims)
        return (
            1,
            tensor in self.model.constants,
            -1 if elem_type is None else elem_type,
            shape,
            tuple(readers),
        )


def schemes_of(frames: Frames, placement: Placement) -> dict[str, Scheme]:
    """The scheme of each leaf, by region id; leaves that stay float have an empty one.

    A site has a place at each edge, and at the producer's output if all consumers read the tensor quantized. A pair on
    an output of a body of If, Loop or Scan is in no scheme, since no region has that output. Raises `PlacementError` if
    a site names a node that is in no region.
    """
    model = frames.model
    found: dict[str, set[RelativeSite]] = {region.id: set() for region in frames.leaves}
    for site in placement.sites:
        ends = [end for end in site.consumers if not end.is_output]
        readers = {e for e in ends if e.node not in model.by_name or not model.by_name[e.node].is_marker}
        places: list[tuple[PlaceKind, str, int, int]] = [("in", *frames.place(end)) for end in readers]
        maker = model.producer.get(site.tensor)
        if maker is not None and not site.weight and maker.name in frames.leaf_of:
            frame = frames.of(frames.leaf_of[maker.name])
            place = frame.region.id, frame.position[maker.name], maker.outputs.index(site.tensor)
            if len(ends) < len(site.consumers):
                places.append(("result", *place))
            is_whole = bool(readers) and readers == set(model.consumers[site.tensor])
            if is_whole and site.tensor in frame.region.outputs:
                places.append(("out", *place))
        axis = -1 if site.axis is None else site.axis
        for kind, region_id, node, slot in places:
            found[region_id].add(RelativeSite(kind, node, slot, site.format, axis, site.weight))
    return {region_id: Scheme(sites=frozenset(sites)) for region_id, sites in found.items()}


def placement_of(frames: Frames, schemes: Mapping[str, Scheme]) -> Placement:
    """The placement of schemes, given by the ids of leaves.

    Edges become sites as `group_sites` states. If two schemes contain one edge, the reader's takes precedence over the
    producer's. Raises `PlacementError` if a scheme does not fit its region.
    """
    edges: dict[Consumer, Site] = {}
    for kinds in (("out", "result"), ("in",)):
        for region_id, chosen in schemes.items():
            frame = frames.of(region_id)
            for one in sorted(site for site in chosen.sites if site.kind in kinds):
                found = find_ends(frames, frame, one)
                if found is None:
                    raise PlacementError(
                        f"the scheme's site {one} is not in region {region_id} of {len(frame.order)} nodes",
                        where=frames.model.where,
                        cure="a scheme fits the regions of its own pattern only",
                    )
                axis = None if one.axis < 0 else one.axis
                for tensor, end in found:
                    edges[end] = Site(
                        tensor=tensor, consumers=(end,), format=one.format, axis=axis, weight=one.weight
                    )
    return Placement(sites=frozenset(map(join_readers, group_sites(frames.model, edges.values()))))


def find_ends(frames: Frames, frame: Frame, place: RelativeSite) -> list[tuple[str, Consumer]] | None:
    """The edges at a place of a region; ``None`` if there is no such place."""
    model = frames.model
    if place.node >= len(frame.order):
        return None
    node = model.by_name[frame.order[place.node]]
    if place.kind in ("out", "result"):
        tensor = node.outputs[place.slot] if place.slot < len(node.outputs) else ""
        wanted = place.kind == "result"
        return [(tensor, end) for end in model.ends(tensor) if end.is_output == wanted] if tensor else None
    slots = frames.slots_of(frame, node)
    if place.slot >= len(slots) or not node.inputs[slots[place.slot]]:
        return None
    return [(node.inputs[slots[place.slot]], Consumer(node.name, slots[place.slot]))]


# ---- the pattern cache ----------------------------------------------------------------------------

UNPROVED = 0.02  # penalty of a ratio without confirmation by fresh builds
GRANULARITIES: tuple[PatternGranularity, ...] = ("structure+shapes", "structure")


class Key(NamedTuple):
    """The key of a row of the cache. Placements are not transferred between backends."""

    backend: str
    device: str
    pattern: str


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


_Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


class CacheEntry(_Row):
    """A scheme and the ratio of the fastest model with it; ``interval`` if fresh builds confirmed it."""

    scheme: Scheme = Field(validation_alias=AliasChoices("sites", "scheme"))
    ratio: _Ratio
    interval: Annotated[tuple[_Ratio, _Ratio], Field(strict=False)] | None = None

    @field_validator("scheme", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        try:
            return parse_scheme(value) if isinstance(value, str) else value
        except PlacementError as error:
            raise ValueError(error.what) from None

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

    @classmethod
    def gather(
        cls,
        trials: Sequence[Trial],
        space: SchemeSpace,
        backend: str,
        device: str,
        *,
        confirmed: Mapping[str, Interval] | None = None,
        best_trials: int = 64,
    ) -> PatternCache:
        """The entries from the trials of a search: of each pattern with units, the most frequent scheme of each trial.

        ``confirmed`` are ratios of fresh builds, by placement. More than the ``best_trials`` would make the file larger
        and hardly add schemes that a later search begins with.
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
                    found.setdefault(Key(backend, device, pattern), []).append(
                        _make_entry(scheme, trial, proved)
                    )
        return cls(entries={key: pruned(entries) for key, entries in found.items()}, texts=texts)

    def warm_starts(self, space: SchemeSpace, backend: str, device: str) -> tuple[Placement, ...]:
        """Placements to begin with, of the best known scheme of each pattern; those with its shapes precede others.

        Entries of this device take precedence over those of others. Regions of unknown patterns stay float, and in one
        more placement are fully quantized. Raises `StateError` if the cache has entries of other backends only.
        """
        backends = sorted({key.backend for key in self.entries})
        if backends and backend not in backends:
            raise StateError(
                f"the pattern cache was made on {', '.join(backends)}, not on {backend}: "
                "speed differs between backends",
                cure=f"start from a patterns.yaml that a run on {backend} has left",
            )
        usable: dict[str, tuple[CacheEntry, ...]] = {}
        for key, entries in self.entries.items():
            is_own = key.device == device or Key(backend, device, key.pattern) not in self.entries
            if key.backend == backend and is_own:
                usable[key.pattern] = pruned((*usable.get(key.pattern, ()), *entries))
        frames = [Frames(space.model, space.regions, granularity) for granularity in GRANULARITIES]
        schemes: list[dict[str, Scheme]] = [{} for _ in frames]
        known: set[str] = set()
        for framed, chosen in zip(frames, schemes, strict=True):
            for region in (region for region in framed.leaves if region.id not in known):
                frame = framed.of(region.id)
                # the best of which all places exist: a cache may contain any
                for entry in usable.get(frame.pattern, ()):
                    if all(find_ends(framed, frame, site) is not None for site in entry.scheme.sites):
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

    @classmethod
    def read(cls, path: Path) -> PatternCache:
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
            what = f"the pattern cache is not YAML: {str(error).partition(chr(10))[0]}"
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
                entries[key] = pruned((*entries.get(key, ()), *pattern.schemes))
                texts[pattern.pattern] = pattern.text
        return cls(entries=entries, texts=texts)

    def text(self) -> str:
        """The YAML text; equal caches give equal texts."""
        caches: dict[tuple[str, str], list[dict[str, object]]] = {}
        for key in sorted(self.entries):
            rows = []
            for entry in self.entries[key]:
                rows.append(_Line(ratio=float(entry.ratio)))
                if entry.interval is not None:
                    rows[-1]["interval"] = list(map(float, entry.interval))
                rows[-1]["sites"] = str(entry.scheme)
            pattern: dict[str, object] = {"pattern": key.pattern, "text": self.texts.get(key.pattern, "")}
            caches.setdefault((key.backend, key.device), []).append(pattern | {"schemes": rows})
        content = {
            "schema_version": SCHEMA_VERSION,
            "caches": [
                {"backend": backend, "device": device, "patterns": patterns}
                for (backend, device), patterns in caches.items()
            ],
        }
        return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDE))


def pruned(entries: Iterable[CacheEntry], most: int = 32) -> tuple[CacheEntry, ...]:
    """The best entry of each scheme, the best first. More than ``most`` would only make the file larger."""
    best: dict[Scheme, CacheEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.rank):
        best.setdefault(entry.scheme, entry)
    return tuple(best.values())[:most]


def _make_entry(scheme: Scheme, trial: Trial, confirmed: Mapping[str, Interval]) -> CacheEntry:
    interval = confirmed.get(trial.placement.digest)
    if interval is not None:
        return CacheEntry(scheme=scheme, ratio=interval.median, interval=(interval.low, interval.high))
    assert trial.ratio is not None
    return CacheEntry(scheme=scheme, ratio=trial.ratio)


# ---- the file -----------------------------------------------------------------------------------

SCHEMA_VERSION = 1
MOST_BYTES = 4 * 2**20  # the parser takes a second for some 200 KB
_WIDE = 2**20  # characters before a line is broken: one line per scheme
_CURE = "delete it, and let a tuning run write it anew"


class _Line(dict[str, object]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # of a library without types
    """Writes each `_Line` on one line, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - of any value
        return True


_Dumper.add_representer(
    _Line, lambda dumper, row: dumper.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True)
)


class _Pattern(_Row):
    pattern: str
    text: str = ""
    schemes: list[CacheEntry]


class _Cache(_Row):
    backend: str
    device: str
    patterns: list[_Pattern]


class _File(_Row):
    schema_version: Literal[1]
    caches: list[_Cache]
