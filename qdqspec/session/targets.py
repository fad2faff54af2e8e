"""Finds one placement for several runtimes.

The candidates are the best placements of the searches on each runtime, and crossovers of the winners: the units
that both quantize, and those that either quantizes. All are timed on all runtimes, interleaved with the float
models. The accurate ones with the least weighted geometric mean of ratios are built anew and timed together
with the float model and the best model of each runtime's own search.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qdqspec.accuracy.parity import compare_models
from qdqspec.errors import BackendError
from qdqspec.measurement.bench import FLOOR_EPS
from qdqspec.measurement.together import ratios_between
from qdqspec.placement.space.search_space import labels_of
from qdqspec.preparation.files import make_folder, write_placed, write_placement
from qdqspec.preparation.timing import BUILDS, ROUNDS
from qdqspec.search.select import reaches
from qdqspec.session.compared_runtimes import TimedFile, float_file, time_across
from qdqspec.session.evidence import CaseWork
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import NOT_CANDIDATES, Clock, CommonPlacement, Interval, Placement, Samples, TargetResult

BEST = 3  # placements of each search that become candidates
FINALISTS = 3
SCREENING_ROUNDS = 12
_FLOAT, _OWN = "float", "own"

_Label = tuple[str, str]  # a runtime, and a digest, `_FLOAT` or `_OWN`


@dataclass(frozen=True, slots=True)
class _Timed:
    """The samples of each model by runtime, and the clock that compares them."""

    samples: Mapping[str, Mapping[str, Sequence[Samples]]]
    clock: Clock


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A placement, the work in whose space it was made, and its file."""

    placement: Placement
    origin: CaseWork
    path: Path


def find_common(
    name: str,
    works: Sequence[CaseWork],
    report: Callable[[str, str], None],
    output: Path,
) -> CommonPlacement:
    """Find the common placement of cases that differ in the runtime only, and write its model to ``output``.

    Weights are the ``targets`` of the cases. Raises `BackendError` if a float model does not run.
    """
    report(name, "one placement for several runtimes")
    started = time.monotonic()
    with TemporaryFolder() as folder:
        candidates = {c.placement.digest: c for c in _candidates(works, folder)}
        search = _Search(works)
        timed = search.timed(candidates, builds=1, rounds=SCREENING_ROUNDS)
        ratios = search.ratios(timed)
        ranked = sorted(
            (digest for digest in candidates if _is_complete(ratios, works, digest)),
            key=lambda digest: search.center(ratios, digest),
        )
        fast = [d for d in ranked if all(ratios[_on(work), d].median <= 1 for work in works)]
        finalists: dict[str, _Candidate] = {}
        for digest in fast:
            if len(finalists) < FINALISTS and _is_accurate(works, candidates[digest].path):
                finalists[digest] = candidates[digest]
        confirmed = search.timed(finalists, builds=BUILDS, rounds=ROUNDS, own=True)
        found = search.choose(name, confirmed, finalists)
        if not found.unchanged:
            _write(finalists[found.placement], output)
        return replace(found, candidates=len(candidates), seconds=time.monotonic() - started)


class _Search:
    """Times candidates on all runtimes, and chooses among the finalists."""

    def __init__(self, works: Sequence[CaseWork]) -> None:
        self._works = works
        weights = {_on(work): work.setup.case.targets[_on(work)] for work in works}
        total = math.fsum(weights.values())
        self._weights = {on: weight / total for on, weight in weights.items()}

    def timed(
        self, candidates: Mapping[str, _Candidate], *, builds: int, rounds: int, own: bool = False
    ) -> _Timed:
        """Samples of the float models and candidates on all runtimes; with ``own`` of each runtime's own best too.

        Raises `BackendError` if a float model does not run.
        """
        files: dict[_Label, TimedFile] = {}
        for work in self._works:
            blank = files[_on(work), _FLOAT] = float_file(work.setup)
            if own:
                files[_on(work), _OWN] = replace(blank, path=work.finder.tuned_path)
            for digest, candidate in candidates.items():
                files[_on(work), digest] = replace(blank, path=candidate.path)
        texts = {" ".join(label): label for label in files}
        found, clock = time_across(
            {text: files[label] for text, label in texts.items()},
            [work.setup for work in self._works],
            builds=builds,
            rounds=rounds,
        )
        for text, error in found.failures.items():
            on, name = texts[text]
            if name == _FLOAT:
                raise BackendError(f"the float model does not run on {on}: {error}")
        samples: dict[str, dict[str, list[Samples]]] = {_on(work): {} for work in self._works}
        for text, taken in found.samples.items():
            on, name = texts[text]
            samples[on][name] = taken
        return _Timed(samples, clock)

    def ratios(self, timed: _Timed, base: str = _FLOAT) -> dict[_Label, Interval]:
        """The time of each model over that of the ``base`` model on the same runtime."""
        return {
            (on, name): ratio
            for on, own in timed.samples.items()
            for name, ratio in ratios_between(own, base, timed.clock).items()
        }

    def center(self, ratios: Mapping[_Label, Interval], digest: str) -> float:
        """The weighted geometric mean of the ratios of a candidate; from one build there are no intervals."""
        logs = (weight * math.log(ratios[on, digest].median) for on, weight in self._weights.items())
        return math.exp(math.fsum(logs))

    def mean(self, ratios: Mapping[_Label, Interval], digest: str) -> Interval:
        """The weighted geometric mean of the ratios of a candidate; errors of the runtimes are independent."""
        center, low, high = self.center(ratios, digest), 0.0, 0.0
        for backend, weight in self._weights.items():
            ratio = ratios[backend, digest]
            low += (weight * math.log(ratio.median / ratio.low)) ** 2
            high += (weight * math.log(ratio.high / ratio.median)) ** 2
        return Interval(
            median=center, low=center * math.exp(-math.sqrt(low)), high=center * math.exp(math.sqrt(high))
        )

    def choose(self, name: str, timed: _Timed, finalists: Mapping[str, _Candidate]) -> CommonPlacement:
        """The finalist with the least mean among those that are slower than float on no runtime."""
        ratios = self.ratios(timed)
        complete = [digest for digest in finalists if _is_complete(ratios, self._works, digest)]
        ranked = sorted(complete, key=lambda digest: self.center(ratios, digest))
        gain = max(work.setup.case.tune.min_gain for work in self._works)
        for digest in ranked:
            if not self._fault(ratios, digest, gain):
                over_own = self.ratios(timed, _OWN)
                candidate = finalists[digest]
                mean = self.mean(ratios, digest)
                return CommonPlacement(
                    name=name,
                    clock=timed.clock,
                    builds=BUILDS,
                    targets=tuple(
                        self._target(w, ratios, over_own[_on(w), digest], candidate) for w in self._works
                    ),
                    mean=mean,
                    unchanged=False,
                    reason=f"least weighted mean of {len(finalists)} finalists",
                    placement=digest,
                    pairs=candidate.placement.pairs,
                    origin=candidate.origin.setup.target,
                )
        none = "no accurate candidate is faster on all runtimes"
        reason = self._fault(ratios, ranked[0], gain) if ranked else none
        one = Interval(median=1.0, low=1.0, high=1.0)
        return CommonPlacement(
            name=name, clock=timed.clock, builds=BUILDS, targets=(), mean=one, unchanged=True, reason=reason
        )

    def _fault(self, ratios: Mapping[_Label, Interval], digest: str, gain: float) -> str:
        """The reason why a finalist is not selected; empty if it may be. Differences below 1 % do not count."""
        for backend in self._weights:
            ratio = ratios[backend, digest]
            if ratio.high > 1 + FLOOR_EPS:
                return (
                    f"the best finalist may be slower than float on {backend}: "
                    f"{ratio.median:.3f} (95 %: {ratio.low:.3f} to {ratio.high:.3f})"
                )
        mean = self.mean(ratios, digest)
        if mean.high > 1 - gain:
            return f"a gain of {gain:.0%} is not proved: mean {mean.median:.3f}, up to {mean.high:.3f}"
        return ""

    def _target(
        self, work: CaseWork, ratios: Mapping[_Label, Interval], loss: Interval, candidate: _Candidate
    ) -> TargetResult:
        result = work.finder.find().result
        return TargetResult(
            case=work.setup.case.name,
            target=work.setup.target,
            weight=self._weights[_on(work)],
            ratio=ratios[_on(work), candidate.placement.digest],
            own=ratios[_on(work), _OWN],
            loss=loss,
            own_builds=result.built,
            own_unchanged=result.unchanged,
            sqnr_db=compare_models(work.setup, candidate.path, divided=False).sqnr_db,
        )


def folder_of(works: Sequence[CaseWork]) -> Path:
    """The folder of the common placement, beside those of the cases: ``common``, or ``common-int8`` of a matrix."""
    rest = [str(value) for axis, value in works[0].setup.case.matrix.items() if axis != "backend"]
    return works[0].setup.output.parent / "-".join(["common", *rest])


def _on(work: CaseWork) -> str:
    return work.setup.backend.name


def _is_complete(ratios: Mapping[_Label, Interval], works: Sequence[CaseWork], digest: str) -> bool:
    """Whether a candidate was built and run on every runtime."""
    return all((_on(work), digest) in ratios for work in works)


def _candidates(works: Sequence[CaseWork], folder: Path) -> Iterator[_Candidate]:
    for origin in works:
        for placement in dict.fromkeys([*_best(origin), *_crossovers(origin, works)]):
            if placement.sites:
                path = folder / f"{placement.digest}.onnx"
                if not path.exists():
                    write_placement(origin.setup.prepared, placement, path)
                yield _Candidate(placement, origin, path)


def _best(work: CaseWork) -> list[Placement]:
    """The winner of a search, and its fastest candidates that were accurate enough."""
    result, rules = work.finder.find().result, work.setup.case.tune
    least = None if result.accuracy is None else result.accuracy.least
    fits = partial(reaches, min_sqnr_db=rules.limits.min_sqnr_db, min_accuracy=least)
    good = [t for t in result.trials if t.ok and t.phase not in NOT_CANDIDATES and not t.subgraph]
    faster = [t for t in good if t.ratio is not None and t.ratio < 1 and t.placement.sites and fits(t)]
    ranked = sorted(faster, key=lambda t: t.ratio or 0.0)
    winner = [] if result.unchanged else [result.winner]
    return list(dict.fromkeys([*winner, *(t.placement for t in ranked)]))[:BEST]


def _crossovers(origin: CaseWork, works: Sequence[CaseWork]) -> Iterator[Placement]:
    """In the space of one runtime: the best of another one, and the union and intersection of both quantized sets."""
    space = origin.setup.prepared.space
    mine = [labels_of(space, placement) for placement in _best(origin)[:1]]
    for work in works:
        if work is origin:
            continue
        theirs = [labels_of(space, placement) for placement in _best(work)[:1]]
        for labels in theirs:
            yield space.resolve(labels)
        for own, other in itertools.product(mine, theirs):
            yield space.resolve({unit: label for unit, label in own.items() if unit in other})
            yield space.resolve({**other, **own})


def _is_accurate(works: Sequence[CaseWork], path: Path) -> bool:
    """Whether a model meets the limits of all cases, each measured on its own runtime, on all data."""
    for work in works:
        rules, scores = work.setup.case.tune, work.setup.prepared.scores
        least_db = rules.limits.min_sqnr_db
        if least_db is not None and compare_models(work.setup, path, divided=False).sqnr_db < least_db:
            return False
        bound = rules.accuracy
        if bound is not None:
            reference = scores.of_reference(bound.metric, bound.output).value
            if scores.of_file(path, bound.metric, bound.output).value < bound.least(reference):
                return False
    return True


def _write(candidate: _Candidate, output: Path) -> None:
    """Write the model and its scheme."""
    prepared = candidate.origin.setup.prepared
    make_folder(output)
    write_placement(prepared, candidate.placement, output / "tuned.onnx")
    write_placed(prepared, candidate.placement, output / "scheme.json", candidate.origin.setup.target)
