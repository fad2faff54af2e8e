"""What a finished search ships: finalists built afresh, timed together, and chosen among. Part of the session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qdqspec.errors import BackendError
from qdqspec.measure.bench import CONFIRM_BUILDS, Bench
from qdqspec.measure.stats import inverse
from qdqspec.search.select import Choice, choose, finalists, front_of
from qdqspec.session.held import Held
from qdqspec.types import FrontPoint, LatencyEvidence, Placement, Trial

FINALISTS = 4  # reference, winner, runner-up and everything quantized
FRONT = 8  # placements of a front that are built afresh and timed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The choice, the measurement behind it, and the front where two objectives were asked for.

    ``lines`` are the finalists' trials for the journal, by role; ``trials`` those of the search, with what was
    learnt of their accuracy meanwhile.
    """

    choice: Choice
    latency: LatencyEvidence
    front: tuple[FrontPoint, ...]
    lines: tuple[tuple[str, Trial], ...]
    trials: tuple[Trial, ...]


def most_builds(*, pareto: bool) -> int:
    """How many fresh builds a confirmation takes at most."""
    return CONFIRM_BUILDS * (FINALISTS + (FRONT if pareto else 0))


def confirm(
    trials: tuple[Trial, ...],
    everything: Placement,
    bench: Bench,
    held: Held,
    *,
    pareto: bool,
    ended_by: str = "",
    beside: Mapping[str, Placement] | None = None,
) -> Confirmed:
    """Build the finalists afresh, time them together, and choose; who would be shipped is scored before.

    What stands ``beside`` them, by role, is timed as well and never chosen.
    ``ended_by`` is the limit that ended the search, where one did. Raises `BackendError` where the reference does
    not build again.
    """
    roles = finalists(trials, everything, min_sqnr_db=held.min_sqnr_db, min_accuracy=held.min_accuracy)
    front = _front_roles(trials, roles, held) if pareto else {}
    measured = bench.compare({**roles, **front, **(beside or {}), "tuned": roles["winner"]})
    barred = {t.placement.digest for t in trials if not t.subgraph and not held.reaches(t)}
    is_heard = any(t.placement == everything and not t.subgraph for t in trials)
    unheard = {everything.digest} if held.min_sqnr_db is not None and not is_heard else set[str]()
    choice = _chosen(roles, measured, bench, barred, unheard, ended_by)
    points = _front(trials, {**roles, **front}, measured, bench, held) if pareto else ()
    scored = tuple(_scored(trial, held) for trial in trials)
    if choice.unchanged and (lacked := held.in_the_way(scored)):
        choice = replace(choice, reason=f"{lacked}; {choice.reason}")
    return Confirmed(
        choice=choice,
        latency=renamed(measured, choice.role, tuple(beside or ())),
        front=points,
        lines=tuple(
            (role, _scored(_line(number, role, placement, measured), held))
            for number, (role, placement) in enumerate(roles.items(), len(trials))
        ),
        trials=scored,
    )


def _chosen(
    roles: Mapping[str, Placement],
    measured: LatencyEvidence,
    bench: Bench,
    barred: set[str],
    unheard: set[str],
    ended_by: str,
) -> Choice:
    """The choice among those that are accurate enough; of whom that is not known, it is found out."""
    ratios = {role: ratio for role, ratio in measured.ratios.items() if role in roles}
    while True:
        choice = choose(roles, ratios, barred=barred, unheard=unheard, ended_by=ended_by)
        if choice.unchanged or _admitted(choice.placement, bench):
            return choice
        barred.add(choice.placement.digest)


def _admitted(placement: Placement, bench: Bench) -> bool:
    """Whether a placement is accurate enough; one that cannot be scored is not."""
    try:
        return bench.admits(placement)
    except BackendError:
        return False


def _front_roles(trials: Sequence[Trial], roles: Mapping[str, Placement], held: Held) -> dict[str, Placement]:
    """The placements of the front that are no finalists already."""
    known = {placement.digest for placement in roles.values()}
    fit = [trial for trial in trials if held.reaches(trial)]
    members = [t.placement for t in front_of(fit, FRONT) if t.placement.digest not in known]
    return {f"front-{number}": placement for number, placement in enumerate(members, 1)}


def _front(
    trials: Sequence[Trial],
    roles: Mapping[str, Placement],
    measured: LatencyEvidence,
    bench: Bench,
    held: Held,
) -> tuple[FrontPoint, ...]:
    """What remains of the front once its members were built afresh, timed together, and scored."""
    heard = {t.placement.digest: t for t in trials if t.ok and t.sqnr_db is not None}
    timed = {
        placement.digest: (measured.ratios[role], placement)
        for role, placement in roles.items()
        if role in measured.ratios and placement.digest in heard and held.reaches(heard[placement.digest])
    }
    points: list[FrontPoint] = []
    for digest, (ratio, placement) in sorted(timed.items(), key=lambda item: item[1][0].median):
        sqnr_db = heard[digest].sqnr_db or 0.0
        if (not points or sqnr_db > points[-1].sqnr_db) and _admitted(placement, bench):
            points.append(
                FrontPoint(
                    placement=digest,
                    pairs=placement.pairs,
                    ratio=ratio,
                    sqnr_db=sqnr_db,
                    accuracy=held.score(placement),
                )
            )
    return tuple(points)


def renamed(measured: LatencyEvidence, role: str, beside: Sequence[str] = ()) -> LatencyEvidence:
    """The same measurement with ``tuned`` standing for what is shipped."""
    names = {"tuned": role, "reference": "reference"} | {
        name: name
        for name in ("runner-up", "everything", *beside)
        if name in measured.samples and name != role
    }
    return LatencyEvidence(
        clock=measured.clock,
        samples={name: measured.samples[source] for name, source in names.items()},
        ratios={name: measured.ratios[source] for name, source in names.items()},
        speedup=inverse(measured.ratios[role]),
        builds=measured.builds,
        provenance=measured.provenance,
        drift=measured.drift,
        failures={name: why for name, why in measured.failures.items() if name in beside},
        profiles=tuple(
            replace(profile, ratios={name: profile.ratios[source] for name, source in names.items()})
            for profile in measured.profiles
        ),
    )


def _scored(trial: Trial, held: Held) -> Trial:
    """The trial with what is known of its placement's accuracy by now."""
    if not trial.ok or trial.subgraph or trial.accuracy is not None:
        return trial
    return replace(trial, accuracy=held.score(trial.placement))


def _line(number: int, role: str, placement: Placement, measured: LatencyEvidence) -> Trial:
    """The journal's line of a finalist's fresh builds."""
    trial = Trial(number=number, phase="confirm", placement=placement)
    if role not in measured.samples:
        return replace(trial, status="failed", error=measured.failures[role])
    return replace(trial, samples=measured.samples[role], ratio=measured.ratios[role].median)
