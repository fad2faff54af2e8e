"""Several shape profiles timed as one.

The objective is the weighted geometric mean of the ratios to the reference, one ratio per profile, which equals the
ratio of weighted geometric means of times: so one sample of such an engine combines a run at every profile. Races,
intervals and gates are independent of profiles; the samples of each profile are kept in addition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qdqspec._core.arrays import Array
from qdqspec.backends.base import Engine
from qdqspec.timing.race import time_after_another
from qdqspec.timing.stats import Deviation
from qdqspec.timing.together import Together
from qdqspec.types import Clock, LayerTime, ProfileLatency, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The inputs for timing at one shape profile. Shares of all profiles add up to one."""

    feeds: Mapping[str, Array]
    name: str = ""  # its shapes, as text
    share: float = 1.0


def attach(engine: Engine, loads: Sequence[Load]) -> Engine:
    """Bind the inputs of an engine; returns an engine that times all profiles. Closes it on failure."""
    try:
        engine.bind(loads[0].feeds)
        for profile, load in enumerate(loads[1:], 1):
            engine.bind(load.feeds, profile=profile)
    except BaseException:
        engine.close()
        raise
    return engine if len(loads) == 1 else AllProfiles(engine, tuple(load.share for load in loads))


class AllProfiles:
    """An engine timed at all its profiles in turn, with the interface of one. The inputs must already be bound."""

    def __init__(self, engine: Engine, shares: Sequence[float]) -> None:
        self.graph_hash = engine.graph_hash
        self.pid: int = getattr(engine, "pid", 0)  # its process, if it has one
        self._engine = engine
        self._shares = tuple(shares)

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes that the engine holds on its device, and that are free there; ``None`` without a device."""
        found: tuple[int, int] | None = getattr(self._engine, "device_memory", lambda: None)()
        return found

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once, at the profile that accepts these inputs."""
        return self._engine.run(feeds)

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Set the inputs of one profile again."""
        self._engine.bind(feeds, profile=profile)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:  # noqa: ARG002 - it times them all
        """Time every profile; a sample is the weighted geometric mean of one run at each."""
        parts = [self._engine.time(runs, warmup, profile=number) for number, _ in enumerate(self._shares)]
        return as_one(parts, self._shares)

    def time_after_another(self, runs: int, warmup: int) -> Samples:
        """Like `time`, of runs after another model at every profile."""
        profiles = range(len(self._shares))
        parts = [time_after_another(self._engine, runs, warmup, profile=number) for number in profiles]
        return as_one(parts, self._shares)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:  # noqa: ARG002 - of them all
        """Layers with their shares of the objective."""
        parts = [self._engine.layers(runs, profile=number) for number, _ in enumerate(self._shares)]
        return merged_layers(parts, self._shares)

    def close(self) -> None:
        """Close the engine; closing twice is harmless."""
        self._engine.close()


def as_one(parts: Sequence[Samples], shares: Sequence[float]) -> Samples:
    """Combine samples of the profiles, run by run; those of each profile are kept in ``profiles``."""
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    wall = _means([part.wall_ms for part in parts], shares)
    cpu = _means([part.cpu_ms for part in parts], shares) if all(part.cpu_ms for part in parts) else ()
    return Samples(wall_ms=wall, cpu_ms=cpu, notes=notes, profiles=tuple(parts))


def merged_layers(parts: Sequence[tuple[LayerTime, ...]], shares: Sequence[float]) -> tuple[LayerTime, ...]:
    """Combine layers of the profiles; a layer's time is its weight in the objective.

    A small change of a layer's time changes the logarithm of the objective by its share of its profile's total, times
    the profile's share. Layers with equal names and nodes are added up; the total is the mean of the totals.
    """
    wholes = [math.fsum(layer.milliseconds for layer in part) for part in parts]
    if not all(wholes):
        return parts[0]
    (scale,) = _means([(whole,) for whole in wholes], shares)
    found: dict[tuple[object, ...], LayerTime] = {}
    for part, whole, share in zip(parts, wholes, shares, strict=True):
        seen: Counter[LayerTime] = Counter()  # two kernels may belong to one node
        for layer in part:
            kernel = replace(layer, name="", milliseconds=0.0, place="")
            seen[kernel] += 1
            known = found.get((kernel, seen[kernel]), replace(layer, milliseconds=0.0))
            milliseconds = known.milliseconds + layer.milliseconds / whole * share * scale
            found[kernel, seen[kernel]] = replace(known, milliseconds=milliseconds)
    return tuple(found.values())


def profile_latencies(
    loads: Sequence[Load], timed: Together, roles: Mapping[str, str], clock: Clock, times: Deviation
) -> tuple[ProfileLatency, ...]:
    """Predicted ratios to the reference at each profile, for the groups of each role; empty for a single profile."""
    if len(loads) == 1:
        return ()
    ratios = [timed.estimates(roles["reference"], clock, times, profile) for profile in range(len(loads))]
    return tuple(
        ProfileLatency(
            name=load.name,
            share=load.share,
            ratios={role: own[name].predicted for role, name in roles.items()},
        )
        for load, own in zip(loads, ratios, strict=True)
    )


def _means(columns: Sequence[Sequence[float]], shares: Sequence[float]) -> tuple[float, ...]:
    """The weighted geometric mean of each row."""
    return tuple(
        math.exp(math.fsum(share * math.log(value) for share, value in zip(shares, row, strict=True)))
        for row in zip(*columns, strict=True)
    )
