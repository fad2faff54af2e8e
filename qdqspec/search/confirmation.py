"""Confirmation of a finished search: finalists are rebuilt and timed together, and one is selected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from qdqspec._core.progress import Deadline
from qdqspec._core.units import ratio_text
from qdqspec.errors import BackendError
from qdqspec.search.limits import Limits
from qdqspec.search.select import Selection, choose, finalists, front_of
from qdqspec.timing import CONFIRM_BUILDS, Bench
from qdqspec.types import (
    EXACT_DB,
    FLOAT32,
    GIVEN,
    FrontPoint,
    Interval,
    LatencyEvidence,
    Placement,
    RatioTest,
    Trial,
)

MOST_TIMES = 4  # repetitions of the confirmation, at most, while the result is undecided
FINALISTS = 4  # reference, winner, runner-up and everything quantized
FRONT = 8  # placements of a Pareto front that are rebuilt and timed together
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The choice, the measurement behind it, and the Pareto front for two objectives.

    ``lines`` are the finalists' trials for the journal, and ``ratios`` their times over the reference's, by role;
    ``trials`` are those of the search, with the accuracies measured since. ``raw_winner`` combines all wins in parts of
    the model, for strategies that build that; else it is the best of the search.
    """

    choice: Selection
    raw_winner: Placement
    latency: LatencyEvidence
    front: tuple[FrontPoint, ...]
    lines: tuple[tuple[str, Trial], ...]
    ratios: Mapping[str, Interval]
    trials: tuple[Trial, ...]

    @property
    def intervals(self) -> dict[str, Interval]:
        """The confirmed times over the reference's, by digest."""
        digests = {role: line.placement.digest for role, line in self.lines}
        ratios = {digests[role]: ratio for role, ratio in self.ratios.items()}
        return {**ratios, self.choice.placement.digest: self.latency.ratios["tuned"]}


def most_builds(*, pareto: bool = False, given: bool = False) -> tuple[int, int]:
    """The largest number of builds of a confirmation, also of a model ``given`` quantized, and of its repetitions."""
    builds = CONFIRM_BUILDS * (FINALISTS + given + (FRONT if pareto else 0))
    return builds, 0 if pareto else MOST_TIMES * builds


def confirm(
    trials: tuple[Trial, ...],
    everything: Placement,
    bench: Bench,
    limits: Limits,
    deadline: Deadline,
    *,
    pareto: bool,
    beside: Mapping[str, Path] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Confirmed:
    """Rebuild the finalists, time them together, and select one that satisfies the limits on all data.

    If the gain of the fastest is not decided, that is repeated, and all builds decide together. Everything quantized is
    timed for comparison, if the search built it or its builds are short, and if it meets the limits or time is left.
    Model files in ``beside``, by role, are timed too and never selected. A ``reference`` among them is the user's
    model, if that is not the one without pairs: then the latter is timed as `FLOAT32`, and a selected placement is
    faster than both. Raises `BackendError` if the reference does not build again.
    """
    own, min_gain, files = Confirmation(trials, bench, limits), limits.asked.min_gain, beside or {}
    roles = finalists(
        trials,
        everything,
        fits=lambda trial: limits.admits(trial.placement),
        admits=own.admits,
    )
    builds_seconds, barred = 2 * CONFIRM_BUILDS * trials[0].build_seconds, own.barred
    is_barred = everything.digest in barred
    is_extra = is_barred or everything.digest not in own.built
    if is_extra and not deadline.allows(builds_seconds, times=1 if is_barred else 2):
        roles.pop("everything", None)
    timed = dict(roles)
    if pareto:  # those of the front that are not finalists, including those below an SQNR limit
        known = {placement.digest for placement in roles.values()}
        fit = [trial for trial in trials if trial.reaches(None, limits.min_accuracy)]
        members = [t.placement for t in front_of(fit, FRONT) if t.placement.digest not in known]
        timed |= {f"front-{number}": placement for number, placement in enumerate(members, 1)}
    if "reference" in files:
        timed[FLOAT32] = roles["reference"]
    able = {role: each for role, each in timed.items() if each.sites and each.digest not in barred}
    measured = bench.compare(
        {**timed, **files, "tuned": roles["winner"]},
        is_settled=lambda ratios: is_settled([ratios[role] for role in able if role in ratios], min_gain),
        again=(lambda _: False) if pareto else own.repetitions(able, deadline, wait),
    )
    points = own.front(timed, measured) if pareto else ()
    ahead = {point.placement for point in points}
    among = {role: each for role, each in timed.items() if each.digest in ahead} if pareto else roles
    lines = [_line(number, role, roles[role], measured) for number, role in enumerate(roles, len(trials))]
    choice = own.choice(among, measured, lines)
    combined = (t.placement for t in reversed(trials) if t.ok and t.phase == "raw")
    return Confirmed(
        choice=choice,
        raw_winner=next(combined, roles["winner"]),
        latency=_renamed(measured, choice.role, (FLOAT32, *files)),
        front=points,
        lines=tuple(zip(roles, map(own.scored, lines), strict=True)),
        ratios={role: measured.ratios[role] for role in roles if role in measured.ratios},
        trials=tuple(map(own.scored, trials)),
    )


def is_settled(ratios: Sequence[RatioTest], min_gain: float) -> bool:
    """Whether intervals prove that each ratio to the reference is a gain of ``min_gain``, or less.

    Wide ones do so too: they are as wide as builds differ, which more rounds hardly change (666 intervals of stored
    confirmations: half-widths of .6 % in the median by the first six rounds, and .5 % by twelve).
    """
    return all(each.proves(min_gain) or each.excludes(min_gain) for each in map(_widened, ratios))


def _widened(ratio: RatioTest, factor: float = 1.4) -> RatioTest:
    """The test with a wider interval, as before the last of repeated tests (decision 7).

    A smaller ``factor`` ends confirmations earlier, and proves more gains falsely.
    """
    return replace(ratio, mean=ratio.mean.widened(factor))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The inputs of a selection: the trials, the bench that verifies placements, and the constraints."""

    trials: Sequence[Trial]
    bench: Bench
    limits: Limits

    @property
    def built(self) -> set[str]:
        """The digests of the placements that the search built."""
        return {trial.placement.digest for trial in self.trials}

    @property
    def barred(self) -> set[str]:
        """The digests of candidates that do not meet the constraints, by the measurements so far."""
        return {
            t.placement.digest for t in self.trials if not t.subgraph and not self.limits.admits(t.placement)
        }

    def admits(self, placement: Placement) -> bool:
        """Whether a placement meets the constraints on all data; measured if a few samples do not exclude it."""
        return self.measure(placement, only_near=True) and self.limits.admits(placement)

    def measure(self, placement: Placement, *, only_near: bool = False) -> bool:
        """Measure a placement on all data once, with ``only_near`` if it is not below the SQNR limit on a few samples.

        False if it is not measured: it is below the limit, or it fails.
        """
        bench, limits = self.bench, self.limits
        if not limits.are_measured or not placement.sites or limits.is_known(placement):
            return True
        try:
            with closing(bench.open(placement)) as engine, bench.several(placement, engine) as several:
                if only_near and limits.is_below(placement, several):
                    return False
                limits.confirm(placement, several)
        except BackendError:
            return False
        return True

    def scored(self, trial: Trial) -> Trial:
        """The trial with the task metric of its placement, if measured by now."""
        if not trial.ok or trial.subgraph or trial.accuracy is not None:
            return trial
        return replace(trial, accuracy=self.limits.figures(trial.placement).score)

    def choice(
        self, roles: Mapping[str, Placement], measured: LatencyEvidence, lines: Sequence[Trial]
    ) -> Selection:
        """The choice among placements that meet the constraints on all data, which is verified for each choice.

        The reasons count a finalist that the search did not build by its line.
        """
        ratios = {role: ratio for role, ratio in measured.tested.items() if role in roles}
        plain, barred, limits = measured.tested.get(FLOAT32), self.barred, self.limits
        # ratios of trials refer to the converted model, if candidates were converted
        factor = 1.0 if plain is None else plain.mean.median
        searched = [t if t.ratio is None else replace(t, ratio=factor * t.ratio) for t in self.trials]
        while True:
            also = (line for line in lines if line.placement.digest in barred - self.built)
            timed = [self.scored(trial) for trial in (*searched, *also)]
            choice = choose(
                roles,
                ratios,
                barred=barred,
                min_gain=limits.asked.min_gain,
                shortfall=limits.shortfall_text(timed),
                slower=_slower_text(timed, limits),
                plain=plain,
            )
            if choice.unchanged or self.admits(choice.placement):
                return choice
            barred.add(choice.placement.digest)

    def repetitions(
        self,
        able: Mapping[str, Placement],
        deadline: Deadline,
        wait: Callable[[float], None],
        *,
        most_times: int = MOST_TIMES,
        apart_seconds: float = 4.0,
        spare_seconds: float = 30.0,
    ) -> Callable[[Mapping[str, RatioTest]], bool]:
        """A function that decides by the ratios so far whether the finalists are built and timed once more.

        They are if a gain of an ``able`` one is likely, by its median, and none is proved: once within twice the time
        limit, and then up to ``most_times`` within the limit, or within ``spare_seconds`` of the start without one:
        more proves smaller gains. ``apart_seconds`` pass in between: after more, the state of the machine may differ
        more. Then a wider interval proves a gain: repeated tests at the same level prove more gains falsely.
        """
        min_gain, left, started = self.limits.asked.min_gain, most_times, deadline.spent
        spare = deadline
        if deadline.seconds is None:
            spare = Deadline(seconds=spare_seconds, clock=deadline.clock)

        def are_repeated(ratios: Mapping[str, RatioTest]) -> bool:
            nonlocal left, started
            is_first, seconds = left == most_times, deadline.spent - started
            faster = [r for r in able if r in ratios and ratios[r].mean.median < 1 - min_gain]
            likely = [ratios[role] for role in faster if self.admits(able[role])]
            tests = likely if is_first else map(_widened, likely)
            if not left or not likely or any(test.proves(min_gain) for test in tests):
                return False
            apart = 0.0 if is_first else apart_seconds
            limit, times = (deadline, 2) if is_first else (spare, 1)
            if not limit.allows(seconds + apart, times=times):
                return False
            if apart:
                wait(apart)
            left, started = left - 1, deadline.spent
            return True

        return are_repeated

    def front(self, roles: Mapping[str, Placement], measured: LatencyEvidence) -> tuple[FrontPoint, ...]:
        """Placements that no other beats in both time and SQNR on all data, fastest first, with the reference last.

        Those whose SQNR cannot be measured, or whose task metric is below its limit, are left out.
        """
        limits = self.limits
        searched = {t.placement.digest for t in self.trials if t.ok and t.sqnr_db is not None}
        timed = {
            placement.digest: (measured.ratios[role], placement)
            for role, placement in roles.items()
            if placement.sites and placement.digest in searched and role in measured.ratios
        }
        ranked = sorted(timed.values(), key=lambda each: each[0].median)
        points: list[FrontPoint] = []
        for ratio, placement in (*ranked, (measured.ratios["reference"], roles["reference"])):
            sqnr_db = EXACT_DB
            if placement.sites:
                if ratio.median >= 1 or not self.measure(placement):
                    continue
                figures = limits.figures(placement)
                if figures.whole_db is None or not limits.keeps_metric(placement):
                    continue
                sqnr_db = figures.whole_db
                if points and sqnr_db <= points[-1].sqnr_db:
                    continue
            points.append(
                FrontPoint(
                    placement=placement.digest,
                    pairs=placement.pairs,
                    ratio=ratio,
                    sqnr_db=sqnr_db,
                    accuracy=limits.figures(placement).score,
                )
            )
        return tuple(points)


def _slower_text(trials: Sequence[Trial], limits: Limits) -> str:
    """That all candidates within the limits are slower than the reference, with the fastest; empty if one is faster.

    If none is within the limits, that all are slower.
    """
    known = {t.placement: t.ratio for t in trials if t.is_candidate and t.ratio is not None}
    ratios = [ratio for placement, ratio in known.items() if limits.admits(placement)]
    if not known or min(ratios or known.values()) < 1:
        return ""
    takes = f"takes {ratio_text(min(ratios or known.values()))} of the reference's time"
    if not ratios:
        return f"no quantized candidate is within the limits, and none is faster: the fastest {takes}"
    within = " within the limits" if limits.are_measured else ""
    if len(ratios) == 1:
        return f"the only quantized candidate{within} is slower: it {takes}"
    return f"all {len(ratios)} quantized candidates{within} are slower: the fastest {takes}"


def _renamed(measured: LatencyEvidence, role: str, beside: Sequence[str]) -> LatencyEvidence:
    """The same measurement with role ``tuned`` for the selected model."""
    others = ("runner-up", "everything", GIVEN, *beside)
    names = {"tuned": role, "reference": "reference"}
    names |= {name: name for name in others if name in measured.samples and name != role}

    def chosen(values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {name: values[source] for name, source in names.items()}

    return replace(
        measured,
        samples=chosen(measured.samples),
        ratios=chosen(measured.ratios),
        tested=chosen(measured.tested),
        speedup=measured.ratios[role].inverse,
        failures={name: why for name, why in measured.failures.items() if name in beside},
        profiles=tuple(replace(one, ratios=chosen(one.ratios)) for one in measured.profiles),
    )


def _line(number: int, role: str, placement: Placement, measured: LatencyEvidence) -> Trial:
    trial = Trial(number=number, phase="confirm", placement=placement)
    if role not in measured.samples:
        return replace(trial, status="failed", error=measured.failures[role])
    return replace(trial, samples=measured.samples[role], ratio=measured.ratios[role].median)
