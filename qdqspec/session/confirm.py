"""Confirmation of a finished search: finalists are rebuilt and timed together, and one is selected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qdqspec.accuracy.constraint import AccuracyConstraint
from qdqspec.deadline import Deadline
from qdqspec.errors import BackendError
from qdqspec.measurement.admission import Admission
from qdqspec.measurement.bench import CONFIRM_BUILDS, Bench
from qdqspec.search.select import Selection, choose, finalists, front_of, is_candidate, reaches
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
from qdqspec.units import ratio_text

CLOSE_BUILDS = 2 * CONFIRM_BUILDS  # where the first confirmation does not decide
CLOSE_SHARE = 1.5  # of the time of the first confirmation that this takes, if all finalists differ
PRECISE = 1.06  # high over low end of an interval with which a confirmation may end early
MOST_TIMES = 4  # that builds are timed where the first confirmation does not decide
REPEATED_BUILDS = 2 * CLOSE_BUILDS * (MOST_TIMES - 1)  # of the repetitions, at most
APART_SECONDS = 4.0  # between these, so that the state of the machine may differ
SPARE_SECONDS = 30.0  # that repetitions may take in a search without a time limit
EARLY = 1.4  # width of an interval, in widths of the one that decides, that ends a confirmation early (decision 37)
FINALISTS = 4  # reference, winner, runner-up and everything quantized
FRONT = 8  # placements of a Pareto front that are rebuilt and timed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The choice, the measurement behind it, and the Pareto front for two objectives.

    ``lines`` are the finalists' trials for the journal, by role, and ``ratios`` their times over the reference's;
    ``trials`` are the trials of the search, with the accuracies measured since.
    """

    choice: Selection
    latency: LatencyEvidence
    front: tuple[FrontPoint, ...]
    lines: tuple[tuple[str, Trial], ...]
    ratios: Mapping[str, Interval]
    trials: tuple[Trial, ...]


def most_builds(*, pareto: bool) -> int:
    """The largest number of builds of a confirmation without its repetitions."""
    return CONFIRM_BUILDS * (FINALISTS + (FRONT if pareto else 0)) + 2 * CLOSE_BUILDS


def confirm(
    trials: tuple[Trial, ...],
    everything: Placement,
    bench: Bench,
    constraint: AccuracyConstraint,
    deadline: Deadline,
    *,
    pareto: bool,
    beside: Mapping[str, Path] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Confirmed:
    """Rebuild the finalists, time them together, and select one that satisfies the limits on all data.

    If the gain of the fastest is not decided, it is measured again with twice as many builds: within twice the time
    limit if a large enough gain is likely, else within the limit, or within `SPARE_SECONDS` without one. That is
    repeated up to `MOST_TIMES` until it decides, with a ``wait`` between, and all of these decide together. Everything
    quantized is timed for comparison, unless the search did not build it and its builds would take too long. Model
    files in ``beside``, by role, are timed too and never selected. A ``reference`` among them is the model of the user,
    if that is not the one without pairs: then the latter is timed as `FLOAT32`, and a selected placement is faster than
    both. Raises `BackendError` if the reference does not build again.
    """
    own = _Confirmation(trials, bench, constraint)
    spare = (
        deadline if deadline.seconds is not None else Deadline(seconds=SPARE_SECONDS, clock=deadline.clock)
    )
    roles = finalists(trials, everything, fits=constraint.reaches, admits=own.admits)
    if not own.was_built(everything) and not deadline.allows(own.least_seconds, times=2):
        roles.pop("everything", None)
    timed = {**roles, **(own.front_roles(roles) if pareto else {})}
    files = dict(beside or {})
    if "reference" in files:
        timed[FLOAT32] = roles["reference"]
    started = deadline.spent
    barred, min_gain = own.barred | {roles["reference"].digest}, constraint.limits.min_gain
    able = [role for role, each in timed.items() if each.digest not in barred]
    measured = bench.compare(
        {**timed, **files, "tuned": roles["winner"]},
        is_settled=lambda ratios: is_settled([ratios[role] for role in able if role in ratios], min_gain),
    )
    took = deadline.spent - started
    points: tuple[FrontPoint, ...] = ()
    among = roles
    if pareto:
        points = own.front(timed, measured)
        ahead = {point.placement for point in points}
        among = {role: each for role, each in timed.items() if each.digest in ahead}
    choice = own.choice(among, measured)
    close = own.undecided(among, measured) if choice.unchanged else ""
    is_likely = bool(close) and measured.tested[close].mean.median < 1 - min_gain
    allows = partial(deadline.allows, times=2) if is_likely else spare.allows
    if close and allows(CLOSE_SHARE * took):
        decides = _Repeated(min_gain, spare, wait)
        reference = files.get("reference", roles["reference"])
        measured = _measured_again(measured, close, roles, reference, bench, decides)
        choice = own.choice(among, measured)
    return Confirmed(
        choice=choice,
        latency=renamed(measured, choice.role, (FLOAT32, *files)),
        front=points,
        lines=tuple(
            (role, own.scored(_line(number, role, placement, measured)))
            for number, (role, placement) in enumerate(roles.items(), len(trials))
        ),
        ratios={role: measured.ratios[role] for role in roles if role in measured.ratios},
        trials=tuple(map(own.scored, trials)),
    )


def is_settled(ratios: Sequence[RatioTest], min_gain: float) -> bool:
    """Whether precise intervals prove that each ratio to the reference is a gain of ``min_gain``, or less."""
    return all(each.mean.high <= PRECISE * each.mean.low and _is_clear(each, min_gain) for each in ratios)


def _is_clear(ratio: RatioTest, min_gain: float) -> bool:
    """Whether a gain is proved or excluded by a wider interval than that of the final test.

    Repeated tests at the same level prove more gains falsely.
    """
    wide = replace(ratio, mean=ratio.mean.widened(EARLY))
    return wide.proves(min_gain) or wide.excludes(min_gain)


def admits(placement: Placement, bench: Bench, admission: Admission | None) -> bool:
    """Whether a placement meets the constraints on all data, which is measured if necessary.

    A placement below the SQNR limit on the few samples is not run on all data. Raises `BackendError`.
    """
    is_measured = measure_accuracy(placement, bench, admission, only_near=True)
    return admission is None or (is_measured and admission.admits(placement))


def measure_accuracy(
    placement: Placement, bench: Bench, admission: Admission | None, *, only_near: bool = False
) -> bool:
    """Measure a placement on all data, once, and return whether that is done. Raises `BackendError`.

    With ``only_near`` it is not done for a placement below the SQNR limit on the few samples.
    """
    if admission is None or not placement.sites or admission.is_known(placement):
        return True
    with closing(bench.open(placement)) as engine, bench.several(placement, engine) as several:
        if only_near and admission.is_below(placement, several):
            return False
        admission.confirm(placement, several)
    return True


@dataclass(frozen=True, slots=True)
class _Confirmation:
    """The inputs of a selection: the trials, the bench that verifies placements, and the constraints."""

    trials: Sequence[Trial]
    bench: Bench
    constraint: AccuracyConstraint

    @property
    def barred(self) -> set[str]:
        """The digests of candidates that do not meet the constraints, by the measurements so far."""
        return {t.placement.digest for t in self.trials if not t.subgraph and not self.constraint.reaches(t)}

    def was_built(self, placement: Placement) -> bool:
        """Whether the search built the placement."""
        return any(trial.placement.digest == placement.digest for trial in self.trials)

    @property
    def least_seconds(self) -> float:
        """The least duration of builds of the reference and of one other placement."""
        return 2 * CONFIRM_BUILDS * self.trials[0].build_seconds

    def admits(self, placement: Placement) -> bool:
        """Whether a placement meets the constraints on all data; false if it cannot be measured."""
        try:
            return admits(placement, self.bench, self.constraint.admission)
        except BackendError:
            return False

    def scored(self, trial: Trial) -> Trial:
        """The trial with the task metric of its placement, if measured by now."""
        if not trial.ok or trial.subgraph or trial.accuracy is not None:
            return trial
        return replace(trial, accuracy=self.constraint.score(trial.placement))

    def choice(self, roles: Mapping[str, Placement], measured: LatencyEvidence) -> Selection:
        """The choice among placements that meet the constraints on all data, which is verified for each choice."""
        ratios = {role: ratio for role, ratio in measured.tested.items() if role in roles}
        barred, gain = self.barred, self.constraint.limits.min_gain
        while True:
            also = (
                _line(0, role, roles[role], measured)
                for role in ratios
                if roles[role].digest in barred and not self.was_built(roles[role])
            )
            # ratios of trials refer to the converted model, if candidates were converted
            plain = measured.tested.get(FLOAT32)
            searched = self.trials if plain is None else rescaled(self.trials, plain.mean.median)
            timed = [self.scored(trial) for trial in (*searched, *also)]
            choice = choose(
                roles,
                ratios,
                barred=barred,
                min_gain=gain,
                shortfall=self.constraint.shortfall(timed),
                slower=slower_text(timed, self.constraint),
                plain=plain,
            )
            if choice.unchanged or self.admits(choice.placement):
                refused = self.constraint.refused(self.trials)
                return replace(choice, reason=f"{choice.reason}; {refused}") if refused else choice
            barred.add(choice.placement.digest)

    def undecided(self, roles: Mapping[str, Placement], measured: LatencyEvidence) -> str:
        """The fastest role whose gain may be large enough, is not proved, and that meets the constraints; or none."""
        barred = self.barred | {roles["reference"].digest}
        min_gain = self.constraint.limits.min_gain
        near = [
            role
            for role, ratio in measured.tested.items()
            if role in roles
            and roles[role].digest not in barred
            and ratio.mean.median < 1
            and not (ratio.proves(min_gain) or ratio.excludes(min_gain))
        ]
        ranked = sorted(near, key=lambda role: measured.ratios[role].median)
        return next((role for role in ranked if self.admits(roles[role])), "")

    def front_roles(self, roles: Mapping[str, Placement]) -> dict[str, Placement]:
        """The placements of the Pareto front that are not finalists, including those below an SQNR limit."""
        known = {placement.digest for placement in roles.values()}
        fit = [trial for trial in self.trials if reaches(trial, None, self.constraint.min_accuracy)]
        members = [t.placement for t in front_of(fit, FRONT) if t.placement.digest not in known]
        return {f"front-{number}": placement for number, placement in enumerate(members, 1)}

    def front(self, roles: Mapping[str, Placement], measured: LatencyEvidence) -> tuple[FrontPoint, ...]:
        """The Pareto front of rebuilt placements by time and SQNR on all data, fastest first.

        The last point is always the reference. A placement below the limit of the task metric is not a point.
        """
        searched = {t.placement.digest for t in self.trials if t.ok and t.sqnr_db is not None}
        timed = {
            placement.digest: (measured.ratios[role], placement)
            for role, placement in roles.items()
            if role in measured.ratios
            and measured.ratios[role].median < 1
            and placement.digest in searched
            and placement.sites
        }
        points: list[FrontPoint] = []
        for ratio, placement in sorted(timed.values(), key=lambda each: each[0].median):
            sqnr_db = self._confirmed_db(placement)
            if sqnr_db is not None and (not points or sqnr_db > points[-1].sqnr_db):
                points.append(self._point(placement, ratio, sqnr_db))
        return (*points, self._point(roles["reference"], measured.ratios["reference"], EXACT_DB))

    def _confirmed_db(self, placement: Placement) -> float | None:
        """The SQNR on all data; ``None`` if it cannot be measured or the task metric is below its limit."""
        try:
            measure_accuracy(placement, self.bench, self.constraint.admission)
        except BackendError:
            return None
        score, least = self.constraint.score(placement), self.constraint.min_accuracy
        is_below = least is not None and score is not None and score < least
        return None if is_below else self.constraint.confirmed_db(placement)

    def _point(self, placement: Placement, ratio: Interval, sqnr_db: float) -> FrontPoint:
        digest, accuracy = placement.digest, self.constraint.score(placement)
        return FrontPoint(
            placement=digest, pairs=placement.pairs, ratio=ratio, sqnr_db=sqnr_db, accuracy=accuracy
        )


@dataclass(slots=True)
class _Repeated:
    """Whether a measurement that has not decided yet is repeated at another time."""

    min_gain: float
    spare: Deadline
    wait: Callable[[float], None]
    _left: int = field(default=MOST_TIMES - 1, init=False)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.spare.spent

    def again(self, ratios: Mapping[str, RatioTest]) -> bool:
        """Whether a gain is likely, and not proved by an interval that is wide enough for repeated tests."""
        tested, seconds = ratios.get("tuned"), self.spare.spent - self._started
        if tested is None or not self._left or tested.mean.median >= 1 - self.min_gain:
            return False
        if _is_clear(tested, self.min_gain) or not self.spare.allows(seconds + APART_SECONDS):
            return False
        self.wait(APART_SECONDS)
        self._left -= 1
        self._started = self.spare.spent
        return True


def _measured_again(
    measured: LatencyEvidence,
    role: str,
    roles: Mapping[str, Placement],
    reference: Placement | Path,
    bench: Bench,
    repeated: _Repeated,
) -> LatencyEvidence:
    """The measurement with the reference and this role timed anew; unchanged if the role does not build again."""
    placement = roles[role]
    names = {role, *(name for name, other in roles.items() if other.digest == placement.digest)}
    again = bench.compare(
        {"reference": reference, **dict.fromkeys(names, placement), "tuned": placement},
        builds=CLOSE_BUILDS,
        is_settled=lambda ratios: is_settled(
            [ratios["tuned"]] if "tuned" in ratios else [], repeated.min_gain
        ),
        again=repeated.again,
    )
    if "tuned" not in again.ratios:
        return measured
    kept = {name: ratio for name, ratio in measured.ratios.items() if name not in again.ratios}
    tested = {name: ratio for name, ratio in measured.tested.items() if name in kept}
    return replace(
        again,
        samples={**{name: measured.samples[name] for name in kept}, **again.samples},
        ratios={**kept, **again.ratios},
        tested={**tested, **again.tested},
        failures={**measured.failures, **again.failures},
        profiles=tuple(
            replace(anew, ratios={**{name: first.ratios[name] for name in kept}, **anew.ratios})
            for first, anew in zip(measured.profiles, again.profiles, strict=True)
        ),
    )


def rescaled(trials: Sequence[Trial], factor: float) -> list[Trial]:
    """The trials with their ratios times a factor: the time over the reference's of the model that they refer to."""
    return [trial if trial.ratio is None else replace(trial, ratio=factor * trial.ratio) for trial in trials]


def slower_text(trials: Sequence[Trial], constraint: AccuracyConstraint) -> str:
    """That all candidates within the limits are slower than the reference, with the fastest; empty if one is faster."""
    known = {t.placement.digest: t.ratio for t in trials if is_candidate(t) and constraint.reaches(t)}
    ratios = [ratio for ratio in known.values() if ratio is not None]
    if not ratios or min(ratios) < 1:
        return ""
    within = " within the limits" if constraint.admission is not None else ""
    takes = f"takes {ratio_text(min(ratios))} of the reference's time"
    if len(ratios) == 1:
        return f"the only quantized candidate{within} is slower: it {takes}"
    return f"all {len(ratios)} quantized candidates{within} are slower: the fastest {takes}"


def renamed(measured: LatencyEvidence, role: str, beside: Sequence[str] = ()) -> LatencyEvidence:
    """The same measurement with role ``tuned`` for the selected model."""
    others = ("runner-up", "everything", GIVEN, *beside)
    names = {"tuned": role, "reference": "reference"}
    names |= {name: name for name in others if name in measured.samples and name != role}
    return replace(
        measured,
        samples={name: measured.samples[source] for name, source in names.items()},
        ratios={name: measured.ratios[source] for name, source in names.items()},
        tested={name: measured.tested[source] for name, source in names.items()},
        speedup=measured.ratios[role].inverse,
        failures={name: why for name, why in measured.failures.items() if name in beside},
        profiles=tuple(
            replace(profile, ratios={name: profile.ratios[source] for name, source in names.items()})
            for profile in measured.profiles
        ),
    )


def _line(number: int, role: str, placement: Placement, measured: LatencyEvidence) -> Trial:
    """The journal line of a finalist's rebuilds."""
    trial = Trial(number=number, phase="confirm", placement=placement)
    if role not in measured.samples:
        return replace(trial, status="failed", error=measured.failures[role])
    return replace(trial, samples=measured.samples[role], ratio=measured.ratios[role].median)
