"""Twins of a device: devices of the same key that build and time candidates at the same time as a search's own device.

A twin has a bench of its own. The bench of the search sends it requests, which are JSON data, and sends it all
trials, so that both have the same incumbent. Only times of one device are compared, and the ratios on each
device are combined. A twin on which a first pair of models has another ratio than on the other devices is
excluded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qdqspec.codec import from_data, to_data
from qdqspec.errors import BackendError, QdqspecError
from qdqspec.measurement.journal import trial_from_json, trial_to_json
from qdqspec.measurement.race import Turn, on_each_clock
from qdqspec.measurement.together import Together, ratios_between
from qdqspec.types import Clock, Placement, Samples, Trial

if TYPE_CHECKING:
    from qdqspec.measurement.bench import Bench, Candidate

AGREEMENT = 4.0  # times ``eps``: the largest difference of a ratio between devices of one key
PAIR_BUILDS, PAIR_ROUNDS = 2, 12
FREEDOM = 6  # degrees of freedom that a comparison keeps when it is spread, if it has so many alone
PATIENCE, PATIENCE_FACTOR = 60.0, 3.0  # seconds for an answer, and times what the same work took here
_STEP = 0.05


class LostTwinError(Exception):
    """The connection to a twin is lost."""


class Twin(Protocol):
    """A connection to a twin; an answer that does not come fails with `LostTwinError`."""

    @property
    def name(self) -> str:
        """The twin in records and messages: its host and device."""
        ...

    def ask(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request; they are answered one after the other."""
        ...


@dataclass(eq=False, slots=True)
class Member:
    """A connected twin with its state."""

    twin: Twin
    opened: Future[Any]
    pair: Future[Any] | None = None
    pending: Future[Any] | None = None
    ratio: float | None = None  # of the pair of models that is timed on all devices
    learnt: int = 0  # trials that were sent to it
    measured: set[str] = field(default_factory=set)  # digests of candidates that it knows, as it timed them
    is_out: bool = False  # for good
    disagrees: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it is prepared and has nothing to do."""
        return all(each is None or each.done() for each in (self.opened, self.pair, self.pending))


class Twins:
    """The twins of a search; ``joined`` gives those that are connected now. Without any, nothing is spread."""

    def __init__(self, joined: Callable[[], Sequence[Twin]] = tuple) -> None:
        self._joined = joined
        self._members: dict[Twin, Member] = {}
        self._trials: list[Trial] = []
        self._pair: tuple[Placement, float] | None = None
        self._eps = 0.0
        self._clock: Clock = "wall"
        self._request: Mapping[str, Any] | None = None
        self._digest: Callable[[], str] = str
        self._note: Callable[[str], None] = lambda _: None

    def open(
        self, request: Mapping[str, Any], digest: Callable[[], str], clock: Clock, note: Callable[[str], None]
    ) -> None:
        """Let twins prepare the search as in ``request``; each answers the digest of a model that it has made.

        A twin that answers another one than ``digest()`` has inserted other pairs or numbers, and is excluded.
        """
        self._request, self._digest, self._clock, self._note = request, digest, clock, note

    def learn(self, trial: Trial, eps: float) -> None:
        """Send a trial of the search to all twins, with their next requests."""
        self._trials.append(trial)
        self._eps = eps
        is_first = self._pair is None and trial.ok and not trial.subgraph and not trial.twin
        if is_first and trial.placement.sites and trial.race is not None and trial.ratio:
            self._pair = trial.placement, trial.ratio

    def idle(self, *, seconds: float = 0.0, compared: bool = True) -> list[Member]:
        """The twins that are prepared and have nothing to do, all after at most ``seconds``.

        ``compared`` excludes those on which the pair of models was not timed yet.
        """
        end = time.monotonic() + seconds
        while True:
            self._refresh()
            usable = [m for m in self._members.values() if not m.is_out and not m.disagrees]
            if all(m.is_idle for m in usable) or time.monotonic() >= end:
                return [m for m in usable if m.is_idle and (not compared or m.ratio is not None)]
            time.sleep(_STEP)

    def ask(self, member: Member, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request to an idle twin, with the trials that it does not know yet."""
        news = [t for t in self._trials[member.learnt :] if t.placement.digest not in member.measured]
        member.learnt = len(self._trials)
        state = {"recall": [trial_to_json(trial) for trial in news], "eps": self._eps}
        member.pending = member.twin.ask({**request, **state})
        return member.pending

    def answer(self, member: Member, future: Future[Any], spent: float) -> Any:
        """The answer of a twin, or ``None`` if it is lost, has failed, or takes much longer than ``spent`` seconds.

        A later answer is ignored.
        """
        try:
            found = future.result(PATIENCE + PATIENCE_FACTOR * spent)
        except LostTwinError:
            return None
        except TimeoutError:
            self._set_aside(member, "it does not answer in time")
            return None
        if "error" in found:
            self._set_aside(member, found["error"])
            return None
        return found

    def _refresh(self) -> None:
        """Prepare new twins, compare the prepared ones, and remove those whose connection is lost."""
        joined = self._joined() if self._request is not None else ()
        for twin in joined:
            if twin not in self._members:
                self._members[twin] = Member(twin, twin.ask({"do": "open", **(self._request or {})}))
        for twin, member in list(self._members.items()):
            if twin not in joined:
                del self._members[twin]
            elif not member.is_out and member.is_idle:
                self._compare(member)

    def _compare(self, member: Member) -> None:
        opened = self.answer(member, member.opened, 0.0)
        if opened is None:
            return
        if self._pair is None or member.ratio is not None:
            return
        placement, _ = self._pair
        if member.pair is None:
            if opened["digest"] != self._digest():
                self._set_aside(member, "it makes another model of the same placement")
                return
            pair = {"reference": _placement_to_json(Placement(sites=frozenset()))}
            pair["pair"] = _placement_to_json(placement)
            words = {"candidates": pair, "builds": PAIR_BUILDS, "rounds": PAIR_ROUNDS, "take": "sample"}
            member.pair = self.ask(member, {"do": "time", **words})
            return
        timed = self.answer(member, member.pair, 0.0)
        if timed is None:
            return
        block = together_of(timed)
        if block.failures:
            self._set_aside(member, "; ".join(map(str, block.failures.values())))
            return
        member.ratio = ratios_between(block.samples, "reference", self._clock)["pair"].median
        self._judge()

    def _judge(self) -> None:
        """Exclude the twins whose ratio differs from the others'; all twins if this device differs."""
        assert self._pair is not None
        own, members = self._pair[1], [m for m in self._members.values() if m.ratio is not None]
        logs = [math.log(m.ratio or 1.0) for m in members]
        centre = statistics.median([math.log(own), *logs]) if len(logs) > 1 else math.log(own)
        most = AGREEMENT * self._eps
        is_odd = abs(math.log(own) - centre) > most
        for member, value in zip(members, logs, strict=True):
            was, member.disagrees = member.disagrees, is_odd or abs(value - centre) > most
            if member.disagrees and not was:
                self._note(
                    f"a device of the same key, {member.twin.name}, is not used: the first candidate takes "
                    f"{member.ratio:.3f} of the reference's time there and {own:.3f} here"
                    + (", and the other devices differ from this one" if is_odd else "")
                )

    def _set_aside(self, member: Member, why: str) -> None:
        member.is_out = True
        self._note(f"a device of the same key, {member.twin.name}, is not used: {why}")


def answer(bench: Bench, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer of a twin: its bench records the trials of the search, and builds and times candidates."""
    bench.eps = request["eps"]
    for each in request["recall"]:
        bench.recall(trial_from_json(each))
    if request["do"] == "trial":
        words = {name: request[name] for name in ("number", "phase", "profile", "timed")}
        placement = _placement_of(request["placement"])
        trial = bench.trial(placement=placement, subgraph=tuple(request["subgraph"]), **words)
        return {"trial": trial_to_json(trial)}
    candidates = {
        name: str(each["file"]) if "file" in each else _placement_of(each)
        for name, each in request["candidates"].items()
    }
    found = bench.timed(candidates, request["builds"], request["rounds"], take=getattr(Turn, request["take"]))
    return {
        "samples": {name: to_data(builds) for name, builds in found.samples.items()},
        "failures": {name: str(error) for name, error in found.failures.items()},
    }


def together_of(data: Mapping[str, Any]) -> Together:
    """The builds that a twin has timed."""
    samples = {n: [from_data(Samples, each) for each in builds] for n, builds in data["samples"].items()}
    return Together(samples, {name: BackendError(why) for name, why in data["failures"].items()})


def timing_request(
    candidates: Mapping[str, Candidate], builds: int, rounds: int, take: Callable[..., Samples]
) -> dict[str, Any]:
    """The request to build candidates and time them together."""
    models = {
        name: _placement_to_json(each.model)
        if isinstance(each.model, Placement)
        else {"file": each.model.name}
        for name, each in candidates.items()
    }
    words = {"builds": builds, "rounds": rounds, "take": take.__name__}
    return {"do": "time", "candidates": models, **words}


def trial_request(number: int, placement: Placement, **asked: Any) -> dict[str, Any]:
    """The request to build a candidate and race it against the incumbent."""
    return {"do": "trial", "number": number, "placement": _placement_to_json(placement), **asked}


def builds_on_each(roles: int, builds: int, devices: int) -> int:
    """The builds of each role on each of several devices instead of ``builds`` on one.

    At least as many together, and so many that the interval of a ratio has nearly the same degrees of freedom.
    """
    enough, each = min(roles * (builds - 1), FREEDOM), math.ceil(builds / devices)
    while roles * (each * devices - 1) - (devices - 1) < enough:
        each += 1
    return each


def merged(blocks: Sequence[Together], times: int = 1) -> Together:
    """The builds of several devices as if one had timed them all, each role with equally many builds on each.

    Each device may have timed at several ``times``, a block for each. The first block's rounds are kept; those of the
    others are scaled, so that the mean of all builds is equal in each round. Groups that failed in the first block are
    left out.
    """
    own, *others = blocks
    if not others or not own.samples:
        return own
    names = list(own.samples)
    flat = [[build for name in names for build in block.samples[name]] for block in blocks]
    rounds = min(len(build.wall_ms) for builds in flat for build in builds)
    scaled = [_aligned(builds, flat[0], rounds) for builds in flat]
    each = len(own.samples[names[0]])
    notes = []
    if times > 1:
        notes.append(f"measured {times} times; later times are scaled to the first")
    if len(blocks) > times:
        notes.append(
            f"timed on {len(blocks) // times} devices of one key; times of the others are scaled to this one's"
        )
    samples = {
        name: [
            replace(build, notes=(*build.notes, *notes))
            for builds in scaled
            for build in builds[position * each : (position + 1) * each]
        ]
        for position, name in enumerate(names)
    }
    return Together(samples, own.failures, devices=len(blocks))


def _aligned(builds: Sequence[Samples], onto: Sequence[Samples], rounds: int) -> list[Samples]:
    """The first rounds of builds of one device, scaled in each round to the mean of another's builds."""

    def scaled(own: tuple[float, ...], *times: tuple[float, ...]) -> tuple[float, ...]:
        if not all(times):
            return ()
        here, there = (
            np.log(np.asarray([each[:rounds] for each in some])).mean(axis=0)
            for some in (times[: len(builds)], times[len(builds) :])
        )
        factor = np.exp(there - here) if builds is not onto else np.ones(rounds)
        return tuple((np.asarray(own[:rounds]) * factor).tolist())

    return [on_each_clock(scaled, build, *builds, *onto) for build in builds]


def _placement_to_json(placement: Placement) -> dict[str, Any]:
    return {"scheme": to_data(placement), "digest": placement.digest}


def _placement_of(data: Mapping[str, Any]) -> Placement:
    placement = from_data(Placement, data["scheme"])
    if placement.digest != data["digest"]:
        raise QdqspecError(f"the scheme has digest {placement.digest}, not {data['digest']}")
    return placement
