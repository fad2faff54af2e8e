"""The SQNR of a candidate: on a few samples during a search, on all data before it is selected.

The reference's outputs are computed once and kept. A candidate is run on as many samples of all data as show on which
side of a limit it is; only one that may be selected is run on all. `NoiseBar` estimates the SQNR that a metric needs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from qdqspec.arrays import Array, Floats
from qdqspec.parity.compare import noise_power, power_of, require_numbers, signal_power, sqnr_db
from qdqspec.types import EXACT_DB, Placement, Site, Trial

SAMPLES = 8
HELD_BYTES = 64 << 20  # of the reference's outputs on all data
FEW = 2
# Samples after which an SQNR may be far from a limit: how much it can rise if the others have no noise, and the
# smallest distance that counts as far.
STEPS = {FEW: (6.0, 1.0), 4: (3.0, 0.5)}
KNOWN, SURE = (
    4,
    3.0,
)  # engines run on all samples after which their error is known, and deviations that are far
SMALL_DB = 2.0  # difference of all data from the few samples that these show well enough
# of placements on the few samples, and of their pairs those of one only: whose difference on all data is similar
SIMILAR_DB, SIMILAR_SHARE = 3.0, 0.1
# standard errors and decibels from a limit after which all data is not needed; standard errors of a rehearsal
DECIDED, DECIDED_DB, LIKELY = 4.0, 0.5, 2.0
LATEST = 3  # estimates whose errors show how wrong others may be
HARD_SHARE = 0.5  # of the noise over all data, in the samples from which the noise of others is estimated
MOST_DB = EXACT_DB  # finite value for equal outputs: JSON has no infinity


class Runs(Protocol):
    """The part of an engine's interface that runs it."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        ...


def outputs_of(engine: Runs, feeds: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
    """The outputs for each of these inputs, in order; an engine with a method ``run_each`` runs several at once."""
    run_each = getattr(engine, "run_each", None)
    return map(engine.run, feeds) if run_each is None else run_each(feeds)


class Reference(Runs, Protocol):
    """A model to compare with, open until it is closed."""

    def close(self) -> None:
        """Stop it."""
        ...


class OutputGate:
    """Measures the SQNR of an engine's worst output, in dB, against the reference's on the same samples."""

    def __init__(self, reference: Runs, feeds: Iterable[Mapping[str, Array]], samples: int = SAMPLES) -> None:
        self._pairs = [(feed, reference.run(feed)) for feed in islice(feeds, samples)]
        require_numbers(self._pairs)
        # SQNR on all samples minus that on the first ones, by the number of these
        self._differences: dict[int, list[float]] = {
            number: [] for number in STEPS if number < len(self._pairs)
        }

    @property
    def known(self) -> list[Mapping[str, Array]]:
        """The reference's outputs."""
        return [expected for _, expected in self._pairs]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._pairs)

    def __call__(self, engine: Runs) -> float:
        """Run an engine on the samples; an output that is not finite or of another shape counts as -200 dB."""
        return self._powers(engine).worst_db

    def by_output(self, engine: Runs) -> dict[str, float]:
        """The SQNR of each float output."""
        return self._powers(engine).by_output

    def first(self, engine: Runs) -> float:
        """The SQNR of the worst output on the first `FEW` samples."""
        return self._powers(engine, FEW).worst_db

    def _powers(
        self, engine: Runs, stop: int | None = None, found: _Powers | None = None, start: int = 0
    ) -> _Powers:
        found = found or _Powers()
        pairs = self._pairs[start:stop]
        for (_, expected), seen in zip(pairs, outputs_of(engine, [feed for feed, _ in pairs]), strict=True):
            found.add(expected, seen)
        return found

    def near(self, engine: Runs, limit_db: float, most_db: float | None = None) -> tuple[float, int]:
        """The SQNR of the worst output, and the number of samples that were run.

        Those are the first ones, as many as the steps, if these alone put the SQNR on all below the limit, or
        if the SQNR expected from them is far below it, or far above ``most_db``, by default the limit; else all. The
        expected SQNR and the distance that counts as far are derived from the engines that were run on all samples
        before. Without these, no SQNR counts as far above: the first samples may have saturated outputs.
        """
        found, at, done = _Powers(), dict[int, float](), 0
        for number, known in self._differences.items():
            found, done = self._powers(engine, number, found, done), number
            at[number] = found.worst_db
            expected_db, (rise, least) = at[number] + float(np.median(known or [0.0])), STEPS[number]
            far = max(least, SURE * float(np.std(known))) if len(known) >= KNOWN else np.inf
            is_above = expected_db > (limit_db if most_db is None else most_db) + far
            if is_above or expected_db < limit_db - far or at[number] < limit_db - rise:
                return expected_db, number
        found = self._powers(engine, None, found, done)
        for number, few_db in at.items():
            self._differences[number].append(found.worst_db - few_db)
        return found.worst_db, self.samples


@dataclass(slots=True)
class AllDataDifference:
    """The SQNR on all data minus that on the few samples, by placements measured on both.

    It depends on the SQNR itself: where an output saturates, a little noise changes hard samples only.
    """

    # SQNR on the few samples, the difference, and the pairs
    _known: list[tuple[float, float, frozenset[Site]]] = field(default_factory=list)
    _of: dict[str, float] = field(default_factory=dict)  # the latest difference by digest

    @property
    def most_db(self) -> float:
        """The largest difference of a placement that was measured on both, without its sign; 0 without any."""
        return max((abs(difference) for _, difference, _ in self._known), default=0.0)

    @property
    def is_known(self) -> bool:
        """Whether a placement was measured on both."""
        return bool(self._known)

    @property
    def is_small(self) -> bool:
        """Whether placements were measured on both and differ little: others need not be measured on all data."""
        return self.is_known and self.most_db <= SMALL_DB

    def is_of(self, placement: Placement) -> bool:
        """Whether this placement was measured or rehearsed on both."""
        return placement.digest in self._of

    def learn(self, few_db: float, all_data_db: float, placement: Placement) -> None:
        """Add a placement that was measured on both."""
        difference = all_data_db - few_db
        self._known.append((few_db, difference, placement.sites))
        self._of[placement.digest] = difference

    def at(self, few_db: float, placement: Placement | None = None) -> float:
        """The expected difference, of a placement its own if that is known; 0 without any.

        The mean of those known, weighted by how similar their SQNR is, and their pairs.
        """
        if not self._known:
            return 0.0
        if placement is not None and placement.digest in self._of:
            return self._of[placement.digest]
        distances = [abs(place - few_db) / SIMILAR_DB for place, _, _ in self._known]
        if placement is not None:
            others = (_other_share(sites, placement.sites) for _, _, sites in self._known)
            distances = [own + share / SIMILAR_SHARE for own, share in zip(distances, others, strict=True)]
        weights = np.exp(min(distances) - np.array(distances))
        return float(np.average([difference for _, difference, _ in self._known], weights=weights))


def _other_share(first: frozenset[Site], second: frozenset[Site]) -> float:
    """The share of the pairs of two placements that only one of them has."""
    return len(first ^ second) / max(1, len(first | second))


_Awaited: TypeAlias = Callable[[], Mapping[str, Array]]  # outputs that may not be computed yet


class HeldOutputs:
    """Outputs of the reference by number of the sample, up to `HELD_BYTES`; ``known`` are the first ones."""

    def __init__(self, known: Iterable[Mapping[str, Array]] = ()) -> None:
        self._found: dict[int, Mapping[str, Array]] = {}
        self._bytes = 0
        for number, outputs in enumerate(known):
            self.add(number, outputs)

    def __contains__(self, number: int) -> bool:
        return number in self._found

    def __getitem__(self, number: int) -> Mapping[str, Array]:
        return self._found[number]

    def add(self, number: int, outputs: Mapping[str, Array]) -> None:
        """Hold the outputs of a sample, unless they take too much memory. Changes this object."""
        size = sum(value.nbytes for value in outputs.values())
        if self._bytes + size <= HELD_BYTES:
            self._bytes += size
            self._found[number] = outputs


class AllData:
    """The SQNR of an engine's worst output over all of ``feeds``; ``reference`` builds the model to compare with.

    Outputs of the reference are computed once if they can be ``held``. For other samples it runs again each time, with
    ``at_once`` on each sample while the engine runs on it. ``samples`` is the number of feeds, ``seconds`` the time an
    engine may take, ``decided`` the number of standard errors from a limit after which `near` runs no further samples.
    """

    def __init__(
        self,
        feeds: Iterable[Mapping[str, Array]],
        reference: Callable[[], Reference],
        held: HeldOutputs | None = None,
        *,
        samples: int = 0,
        seconds: float = math.inf,
        at_once: bool = False,
        decided: float = DECIDED,
    ) -> None:
        self._feeds = feeds
        self._reference = reference
        self.samples = samples
        self._seconds, self._at_once, self._decided = seconds, at_once, decided
        self._held = HeldOutputs() if held is None else held
        self._whole: list[_Powers] = []  # of engines that were run on every sample
        self._errors: list[float] = []  # of their estimates

    def rehearsed(self, feeds: Iterable[Mapping[str, Array]], samples: int) -> AllData:
        """The same for rehearsals over ``feeds``, the first ones of these; they share the reference's outputs."""
        return AllData(
            feeds, self._reference, self._held, samples=samples, at_once=self._at_once, decided=LIKELY
        )

    def __call__(self, engine: Runs) -> float:
        """Run the engine on every sample."""
        self._whole.append(self._run(engine))
        return self._whole[-1].worst_db

    def near(self, engine: Runs, limit_db: float, *, above: bool = False) -> tuple[float, bool]:
        """The SQNR, and whether it is that of all samples: none more runs once it is below the limit for sure.

        After twice `SAMPLES`, of which every candidate was run on the first half before, four times as many and so on,
        the difference counts as sure if its mean over samples is more than ``decided`` standard errors from zero and
        the SQNR is `DECIDED_DB` from the limit. An SQNR above the limit is shown by a part of the samples only where
        all would take more than the time for one engine: a few samples may have most of the noise. Once an engine was
        run on all samples, the `estimated` SQNR of another is enough if it is twice that far below the limit, and twice
        as far as estimates of such engines were wrong; with ``above`` also if it is as far above, where little depends
        on it: another engine may have its noise on other samples.
        """
        hard, part, found_db = self._hard, _Powers(), None
        if hard:
            part = self._run(engine, hard.__contains__)
            found_db = self._expected(part)
            distance = limit_db - found_db
            if (abs(distance) if above else distance) > 2 * max(DECIDED_DB, self._wrong_db):
                return found_db, False
        started = time.monotonic()

        def is_enough(powers: _Powers) -> bool:
            whole = (time.monotonic() - started) * self.samples / powers.samples
            return powers.is_decided(limit_db, self._decided, above=whole > self._seconds)

        known = {number: part.sample(place) for place, number in enumerate(hard)}
        powers = self._run(engine, known=known, is_enough=is_enough)
        is_whole = powers.samples >= self.samples
        if is_whole:
            self._whole.append(powers)
            if found_db is not None:
                self._errors.append(powers.worst_db - found_db)
        return powers.worst_db, is_whole

    @property
    def _wrong_db(self) -> float:
        """The root mean square error of the latest estimates; without any limit while none was compared."""
        latest = self._errors[-LATEST:]
        return float(np.sqrt(np.mean(np.square(latest)))) if latest else np.inf

    def estimated(self, engine: Runs) -> float | None:
        """The SQNR expected from the samples that had `HARD_SHARE` of the noise of engines run on all samples before.

        The noise on all of them is that on these over their share: the ratio estimate of W. G. Cochran, "Sampling
        Techniques", 1977. ``None`` if no engine was run on all.
        """
        return self._expected(self._run(engine, hard.__contains__)) if (hard := self._hard) else None

    @property
    def _hard(self) -> list[int]:
        """The samples with the most noise of engines run on all before, in order; empty without one."""
        shares = _mean_shares(self._whole)
        return sorted({number for share in shares.values() for number in _largest(share)})

    def _expected(self, part: _Powers) -> float:
        """The SQNR on all samples, by that on the hard ones."""
        numbers, signal = self._hard, self._whole[0].signal
        by_output = (
            sqnr_db(sum(signal[name]), sum(part.noise[name]) / float(share[numbers].sum()))
            for name, share in _mean_shares(self._whole).items()
        )
        return float(np.clip(min(by_output), -MOST_DB, MOST_DB))

    def _run(
        self,
        engine: Runs,
        wanted: Callable[[int], bool] = lambda _: True,
        known: Mapping[int, _Powers] | None = None,
        is_enough: Callable[[_Powers], bool] = lambda _: False,
    ) -> _Powers:
        """The powers on the samples with the numbers ``wanted``, or on the first ones of these that are enough.

        Those that are ``known`` are not run again.
        """
        known, found, look = known or {}, _Powers(), 2 * SAMPLES
        expected = deque[tuple[list[_Powers], _Awaited | None]]()  # known before a sample, and its outputs

        def fed(opened: ExitStack) -> Iterator[Mapping[str, Array]]:
            start: Callable[[int, Mapping[str, Array]], _Awaited] | None = None
            before = list[_Powers]()
            for number, feed in enumerate(self._feeds):
                if number in known:
                    before.append(known[number])
                elif wanted(number):
                    if number in self._held:
                        outputs: _Awaited = partial(self._held.__getitem__, number)
                    else:
                        start = start or self._started(opened)
                        outputs = start(number, feed)
                    expected.append((before, outputs))
                    before = []
                    yield feed
            expected.append((before, None))

        with ExitStack() as opened:
            for seen in outputs_of(engine, fed(opened)):
                before, outputs = expected.popleft()
                found.extend(before)
                assert outputs is not None
                found.add(outputs(), seen)
                if look <= found.samples < self.samples:
                    if is_enough(found):
                        return found
                    look *= 2
        found.extend(expected.popleft()[0])
        return found

    def _started(self, opened: ExitStack) -> Callable[[int, Mapping[str, Array]], _Awaited]:
        """A function that starts the reference on a sample and returns one that waits for its outputs.

        The reference is open until ``opened`` is closed.
        """
        reference = opened.enter_context(closing(self._reference()))

        def outputs(number: int, feed: Mapping[str, Array]) -> Mapping[str, Array]:
            found = reference.run(feed)
            self._held.add(number, found)
            return found

        def computed(number: int, feed: Mapping[str, Array]) -> _Awaited:
            found = outputs(number, feed)
            return lambda: found

        if not self._at_once:
            return computed
        thread = opened.enter_context(ThreadPoolExecutor(1, "reference"))
        return lambda number, feed: thread.submit(outputs, number, feed).result


def _mean_shares(engines: Iterable[_Powers]) -> dict[str, Floats]:
    """The share of each sample in the noise of each output, the mean over engines with any and finite noise."""
    found: dict[str, list[Floats]] = {}
    for engine in engines:
        for name, powers in engine.noise.items():
            total = sum(powers)
            if 0 < total < math.inf:
                found.setdefault(name, []).append(np.array(powers) / total)
    return {name: np.asarray(np.mean(shares, axis=0), np.float64) for name, shares in found.items()}


def _largest(shares: Floats) -> list[int]:
    """The fewest samples that have `HARD_SHARE` of the noise."""
    falling = np.argsort(-shares, kind="stable")
    return [int(number) for number in falling[: 1 + np.searchsorted(np.cumsum(shares[falling]), HARD_SHARE)]]


class _Powers:
    """Signal and noise power of each float output by sample."""

    def __init__(self) -> None:
        self.signal: dict[str, list[float]] = {}
        self.noise: dict[str, list[float]] = {}

    def add(self, expected: Mapping[str, Array], seen: Mapping[str, Array]) -> None:
        """Add the outputs of one sample. Changes this object."""
        for name, values in expected.items():
            if np.issubdtype(values.dtype, np.floating):
                self.signal.setdefault(name, []).append(signal_power(values))
                self.noise.setdefault(name, []).append(noise_power(values, seen.get(name)))

    @property
    def by_output(self) -> dict[str, float]:
        """The SQNR of each float output, over all samples."""
        return {
            name: float(np.clip(sqnr_db(sum(signal), sum(self.noise[name])), -MOST_DB, MOST_DB))
            for name, signal in self.signal.items()
        }

    @property
    def worst_db(self) -> float:
        """The SQNR of the worst output."""
        return min(self.by_output.values(), default=MOST_DB)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return max(map(len, self.signal.values()), default=1)

    def sample(self, place: int) -> _Powers:
        """Those of one sample."""
        found = _Powers()
        found.signal = {name: [powers[place]] for name, powers in self.signal.items()}
        found.noise = {name: [powers[place]] for name, powers in self.noise.items()}
        return found

    def extend(self, several: Iterable[_Powers]) -> None:
        """Add those of further samples. Changes this object."""
        for other in several:
            for name, powers in other.signal.items():
                self.signal.setdefault(name, []).extend(powers)
                self.noise.setdefault(name, []).extend(other.noise[name])

    def is_decided(self, limit_db: float, errors: float, *, above: bool) -> bool:
        """Whether these samples show that the worst output's SQNR over all is below a limit, or that it is above.

        The mean over samples is so many standard errors from the limit then.
        """
        if abs(self.worst_db - limit_db) < DECIDED_DB:
            return False
        beyond = [self._beyond(name, limit_db, errors) for name in self.signal]
        return any(low > 0 for low, _ in beyond) or (above and all(high < 0 for _, high in beyond))

    def _beyond(self, name: str, limit_db: float, errors: float) -> tuple[float, float]:
        """The bounds of the mean of the noise of an output that is more than the limit allows."""
        signal, noise = np.array(self.signal[name]), np.array(self.noise[name])
        excess = noise - power_of(limit_db) * signal
        if not np.isfinite(excess).all():
            return -np.inf, np.inf
        reach = errors * float(excess.std(ddof=1)) / len(excess) ** 0.5
        return float(excess.mean()) - reach, float(excess.mean()) + reach


# this far below a rejected candidate's SQNR, which is twice its noise, no candidate is raced
FAR_BELOW_DB = 3.0
STEP_DB = 5.0  # target above a rejected candidate's SQNR while no accepted one is known


class Scored(NamedTuple):
    """The SQNR of a placement, whether it satisfies a metric constraint, and whether it was built or only rehearsed."""

    sqnr_db: float
    is_kept: bool
    is_built: bool


@dataclass(slots=True)
class NoiseBar:
    """Estimates the minimum SQNR that satisfies a metric constraint, from scored candidates and rehearsed placements.

    SQNR and score are only loosely correlated: the estimate decides which candidates are tried and raced, never
    which one wins. Rehearsals, which may use few samples, count less than builds: a rehearsed placement counts as
    accepted only above the SQNR of rejected builds.
    """

    found: dict[str, Scored] = field(default_factory=dict)  # by digest of the placement

    def learn(self, trial: Trial, least: float) -> None:
        """Add a scored candidate; one without a score, an SQNR or any pairs is ignored."""
        if trial.accuracy is not None and trial.sqnr_db is not None and trial.placement.sites:
            self.found[trial.placement.digest] = Scored(trial.sqnr_db, trial.accuracy >= least, is_built=True)

    def rehearse(self, placement: Placement, sqnr_db: float, *, kept: bool) -> None:
        """Add the expected SQNR of a placement, and whether it is expected to satisfy the constraint; once for each."""
        self.found.setdefault(placement.digest, Scored(sqnr_db, kept, is_built=False))

    @property
    def kept(self) -> list[float]:
        """SQNR in dB of placements that satisfied the constraint, and of those expected to above rejected builds."""
        missed = self.missed_db
        return [
            each.sqnr_db
            for each in self.found.values()
            if each.is_kept and (each.is_built or missed is None or each.sqnr_db > missed)
        ]

    @property
    def lost(self) -> list[float]:
        """SQNR in dB of placements that did not satisfy the constraint, or are not expected to."""
        return [each.sqnr_db for each in self.found.values() if not each.is_kept]

    @property
    def missed_db(self) -> float | None:
        """The highest SQNR of rejected builds that is below that of all accepted builds; ``None`` for none."""
        built = [each for each in self.found.values() if each.is_built]
        noisiest_kept = min((each.sqnr_db for each in built if each.is_kept), default=math.inf)
        return max(
            (each.sqnr_db for each in built if not each.is_kept and each.sqnr_db < noisiest_kept),
            default=None,
        )

    @property
    def rejected_db(self) -> float:
        """The highest SQNR of rejected placements that is below that of all accepted ones; minus infinity for none."""
        noisiest_kept = min(self.kept, default=math.inf)
        return max((db for db in self.lost if db < noisiest_kept), default=-math.inf)

    def is_far_below(self, sqnr_db: float) -> bool:
        """Whether a candidate's SQNR is so far below a rejected one's that it is not worth a race."""
        return sqnr_db <= self.rejected_db - FAR_BELOW_DB

    @property
    def next_db(self) -> float | None:
        """The SQNR to try next: between that of rejected and accepted placements; ``None`` while none was rejected."""
        if not self.lost:
            return None
        if self.rejected_db == -math.inf:
            return min(self.kept)
        quietest = self.rejected_db + STEP_DB
        return min(quietest, (self.rejected_db + min(self.kept)) / 2) if self.kept else quietest
