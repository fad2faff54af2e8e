"""Confirmation of a finished search: finalists are rebuilt and timed together, and one is selected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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
    own, min_gain, files = _Confirmation(trials, bench, constraint), constraint.limits.min_gain, beside or {}
    roles = finalists(trials, everything, fits=constraint.reaches, admits=own.admits)
    builds_seconds = 2 * CONFIRM_BUILDS * trials[0].build_seconds
    if not own.was_built(everything) and not deadline.allows(builds_seconds, times=2):
        roles.pop("everything", None)
    timed = {**roles, **(own.front_roles(roles) if pareto else {})}
    if "reference" in files:
        timed[FLOAT32] = roles["reference"]
    able = [role for role, each in timed.items() if each.sites and each.digest not in own.barred]
    started = deadline.spent
    measured = bench.compare(
        {**timed, **files, "tuned": roles["winner"]},
        is_settled=lambda ratios: is_settled([ratios[role] for role in able if role in ratios], min_gain),
    )
    took = deadline.spent - started
    points = own.front(timed, measured) if pareto else ()
    ahead = {point.placement for point in points}
    among = {role: each for role, each in timed.items() if each.digest in ahead} if pareto else roles
    choice = own.choice(among, measured)
    close = own.undecided(among, measured) if choice.unchanged else ""
    spare = (
        deadline if deadline.seconds is not None else Deadline(seconds=SPARE_SECONDS, clock=deadline.clock)
    )
    is_likely = bool(close) and measured.tested[close].mean.median < 1 - min_gain
    allows = partial(deadline.allows, times=2) if is_likely else spare.allows
    if close and allows(CLOSE_SHARE * took):
        equal = {role: each for role, each in among.items() if each.digest == among[close].digest}
        models = {"reference": files.get("reference", roles["reference"]), **equal, "tuned": among[close]}
        again = bench.compare(models, builds=CLOSE_BUILDS, again=repetitions(min_gain, spare, wait))
        measured = _joined(measured, again) if "tuned" in again.ratios else measured
        choice = own.choice(among, measured)
    lines = (_line(number, role, roles[role], measured) for number, role in enumerate(roles, len(trials)))
    return Confirmed(
        choice=choice,
        latency=renamed(measured, choice.role, (FLOAT32, *files)),
        front=points,
        lines=tuple(zip(roles, map(own.scored, lines), strict=True)),
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


def repetitions(
    min_gain: float, spare: Deadline, wait: Callable[[float], None]
) -> Callable[[Mapping[str, RatioTest]], bool]:
    """A function that decides after each measurement, by its ratios, whether it is repeated at another time.

    It is if a gain is likely, and not proved by an interval that is wide enough for repeated tests.
    """
    left, started = MOST_TIMES - 1, spare.spent

    def is_repeated(ratios: Mapping[str, RatioTest]) -> bool:
        nonlocal left, started
        tested, seconds = ratios.get("tuned"), spare.spent - started
        if tested is None or not left or tested.mean.median >= 1 - min_gain:
            return False
        if _is_clear(tested, min_gain) or not spare.allows(seconds + APART_SECONDS):
            return False
        wait(APART_SECONDS)
        left, started = left - 1, spare.spent
        return True

    return is_repeated


def _joined(first: LatencyEvidence, again: LatencyEvidence) -> LatencyEvidence:
    """The later measurement, with the roles that only the first one has."""
    profiles = zip(first.profiles, again.profiles, strict=True)
    return replace(
        again,
        samples={**first.samples, **again.samples},
        ratios={**first.ratios, **again.ratios},
        tested={**first.tested, **again.tested},
        failures={**first.failures, **again.failures},
        profiles=tuple(replace(new, ratios={**old.ratios, **new.ratios}) for old, new in profiles),
    )


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
        plain, barred, constraint = measured.tested.get(FLOAT32), self.barred, self.constraint
        # ratios of trials refer to the converted model, if candidates were converted
        factor = 1.0 if plain is None else plain.mean.median
        searched = [t if t.ratio is None else replace(t, ratio=factor * t.ratio) for t in self.trials]
        while True:
            also = (
                _line(0, role, roles[role], measured)
                for role in ratios
                if roles[role].digest in barred and not self.was_built(roles[role])
            )
            timed = [self.scored(trial) for trial in (*searched, *also)]
            choice = choose(
                roles,
                ratios,
                barred=barred,
                min_gain=constraint.limits.min_gain,
                shortfall=constraint.shortfall(timed),
                slower=_slower_text(timed, constraint),
                plain=plain,
            )
            if choice.unchanged or self.admits(choice.placement):
                refused = constraint.refused(self.trials)
                return replace(choice, reason="; ".join(filter(None, (choice.reason, refused))))
            barred.add(choice.placement.digest)

    def undecided(self, roles: Mapping[str, Placement], measured: LatencyEvidence) -> str:
        """The fastest role whose gain may be large enough, is not proved, and that meets the constraints; or none."""
        barred, min_gain = self.barred, self.constraint.limits.min_gain
        near = [
            role
            for role, ratio in measured.tested.items()
            if role in roles
            and roles[role].sites
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
            if placement.sites and placement.digest in searched and role in measured.ratios
        }
        points: list[FrontPoint] = []
        for ratio, placement in sorted(timed.values(), key=lambda each: each[0].median):
            sqnr_db = self._confirmed_db(placement) if ratio.median < 1 else None
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
        return FrontPoint(
            placement=placement.digest,
            pairs=placement.pairs,
            ratio=ratio,
            sqnr_db=sqnr_db,
            accuracy=self.constraint.score(placement),
        )


def _slower_text(trials: Sequence[Trial], constraint: AccuracyConstraint) -> str:
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
