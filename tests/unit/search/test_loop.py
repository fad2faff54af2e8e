"""The search loop of any strategy: budget, journal, resume, and the required reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from qdqspec.errors import BackendError
from qdqspec.measurement.bench import ASSUMED_EPS, Built
from qdqspec.search.base import Proposal
from qdqspec.search.loop import Budget, Search
from qdqspec.types import FIRST, Consumer, LayerTime, Placement, Progress, Race, Samples, Site, Trial

NOISE = Samples(wall_ms=(1.0, 1.1, 1.2))


def placement(name: str) -> Placement:
    if name == "reference":
        return Placement(sites=frozenset())
    return Placement(sites=frozenset({Site(tensor=name, consumers=(Consumer("n", 0),), format="uint8")}))


NAMES = ("reference", "a", "b", "c", "d", "e")
NAME_OF = {placement(name).digest: name for name in NAMES}


@dataclass
class Script:
    """A strategy that proposes named placements in order and stores the results."""

    names: Sequence[str] = NAMES
    received: list[Trial] = field(default_factory=list)
    asked: int = 0

    def ask(self, n: int = 1) -> list[Proposal]:
        batch = self.names[self.asked : self.asked + n]
        self.asked += len(batch)
        return [Proposal(placement=placement(name), phase="pure", profile=name == "a") for name in batch]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.received.extend(trials)

    def done(self) -> bool:
        return self.asked >= len(self.names)


class Bench:
    """A bench without measurements: candidates in ``fails`` fail, ``a`` and ``c`` win."""

    def __init__(self, fails: Sequence[str] = (), log: list[Trial] | None = None) -> None:
        self.fails, self.log = fails, log
        self.built: list[str] = []
        self.recalled: list[str] = []
        self.best: float | None = None
        self.eps = 0.01
        self.settle = None

    def build(self, number: int, what: Placement, phase: str, **how) -> Built:
        return Built(self._trial(number, what, phase))

    def measure(self, built: Built) -> Trial:
        return built.trial

    def _trial(self, number: int, what: Placement, phase: str) -> Trial:
        name = NAME_OF[what.digest]
        self.built.append(name)
        if self.log is not None:
            assert (
                len([t for t in self.log if t.phase != "noise"]) == number
            )  # the last trial is in the journal
        trial = Trial(number=number, phase=phase, placement=what)
        if name in self.fails:
            return replace(trial, status="failed", error=f"{name} is broken")
        won = name in ("reference", "a", "c")
        self.best = 1.0 - number / 10 if won else self.best
        verdict = "faster" if won else "slower"
        race = Race(opponent="x", ratio=0.9, p_value=0.0, pairs=6, verdict=verdict) if number else None
        return replace(trial, incumbent=won, ratio=self.best, race=race)

    def recall(self, trial: Trial) -> None:
        self.recalled.append(NAME_OF[trial.placement.digest])
        self.best = trial.ratio if trial.incumbent else self.best

    def measure_noise(self, what: Placement, seconds: float | None = None) -> Samples:
        self.built.append("noise")
        self.eps = 0.03
        return NOISE


class Log:
    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self.trials = list(trials)

    def append(self, trial: Trial) -> None:
        self.trials.append(trial)


def run(bench: Bench, *, trials: int = 60, seconds=None, log=None, names=NAMES, **more):
    clock = iter(range(10_000))
    budget = Budget(trials=trials, seconds=seconds, clock=lambda: float(next(clock)))
    script = Script(names)
    return Search(script, bench, budget, log or Log(), case="case", **more).run(), script


def names_of(trials: Sequence[Trial]) -> list[str]:
    return [NAME_OF[trial.placement.digest] for trial in trials]


def test_every_proposal_is_built_reported_and_written_to_the_journal_once() -> None:
    log = Log()
    bench = Bench(log=log.trials)
    trials, script = run(bench, log=log)
    assert names_of(trials) == list(NAMES)
    assert [trial.number for trial in trials] == list(range(6))
    assert tuple(script.received) == trials
    assert bench.built == ["reference", "noise", *NAMES[1:]]
    assert [trial.phase for trial in log.trials] == ["pure", "noise", *["pure"] * 5]
    assert log.trials[1].samples == NOISE


def test_the_variation_between_builds_is_measured_after_the_first_race_with_a_time_limit() -> None:
    log = Log()
    bench = Bench(log=log.trials)
    trials, _ = run(bench, log=log, seconds=10_000.0)
    assert bench.built == ["reference", "a", "noise", *NAMES[2:]]
    assert [trial.eps for trial in log.trials] == [None, ASSUMED_EPS, *[0.03] * 5]
    assert [trial.eps for trial in trials] == [ASSUMED_EPS, *[0.03] * 5]
    again = Bench()
    resumed, _ = run(again, replay=log.trials, seconds=10_000.0)
    assert again.built == []
    assert [trial.eps for trial in resumed] == [trial.eps for trial in trials]


def test_a_search_killed_before_measuring_noise_measures_it_on_resume() -> None:
    log = Log()
    run(Bench(log=log.trials), log=log, seconds=10_000.0)
    resumed = Bench()
    run(resumed, replay=log.trials[:2], seconds=10_000.0)
    assert resumed.built == ["noise", *NAMES[2:]]


def test_every_trial_has_the_variation_between_builds() -> None:
    log = Log()
    trials, script = run(Bench(fails=("b",)), log=log)
    assert {trial.eps for trial in (*trials, *script.received)} == {0.03}
    assert [trial.eps for trial in log.trials] == [None, *[0.03] * 6]  # unknown before the measurement


@pytest.mark.parametrize("how", ["replayed", "taken in at once"])
def test_a_resumed_strategy_receives_the_same_variation_between_builds(how: str) -> None:
    log = Log()
    run(Bench(), log=log, trials=4)
    script = Script()
    resumed = Search(script, Bench(), Budget(trials=6), Log(), case="case", replay=log.trials)
    if how == "taken in at once":
        resumed.resume()
    resumed.run()
    assert [trial.eps for trial in script.received] == [0.03] * 6


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_number_of_builds_is_limited(budget: int) -> None:
    assert len(run(Bench(), trials=budget)[0]) == budget


def test_failed_builds_count_towards_the_limit() -> None:
    trials, script = run(Bench(fails=("a", "b", "d")), trials=4)
    assert [trial.ok for trial in trials] == [True, False, False, True]
    assert script.received[1].error == "a is broken"


def test_the_time_limit_ends_the_search() -> None:
    assert 1 < len(run(Bench(), seconds=3.0)[0]) < 6


@pytest.mark.parametrize("spent", [{"trials": 0}, {"seconds": 0.0}])
def test_the_reference_is_built_for_any_budget(spent: dict) -> None:
    assert names_of(run(Bench(), **spent)[0]) == ["reference"]


def test_a_failed_build_of_the_reference_is_an_error() -> None:
    bench, log = Bench(fails=("reference",)), Log()
    with pytest.raises(BackendError, match="without any Q/DQ: reference is broken"):
        run(bench, log=log)
    assert bench.built == ["reference"]
    assert not log.trials[0].ok


def test_progress_counts_the_results_of_trials() -> None:
    seen: list[Progress] = []
    run(Bench(fails=("b",)), trials=10, seconds=1000.0, watch=seen.append)
    assert [progress.done for progress in seen if not progress.doing] == [1, 2, 3, 4, 5, 6]
    steps = [progress.doing for progress in seen if progress.doing]
    assert steps[1:3] == ["building the reference", "timing the reference"]
    last = seen[-1]
    assert (last.kept, last.dropped, last.failed, last.total, last.case) == (2, 2, 1, 10, "case")
    assert last.best == pytest.approx(0.7)
    assert last.seconds_left is not None
    assert 0 <= last.seconds_left <= 1000


def test_the_time_left_is_not_estimated_from_the_first_candidates() -> None:
    """The reference takes less time than a candidate, so an estimate from it would be too low."""
    seen: list[Progress] = []
    run(Bench(), trials=60, seconds=10_000.0, watch=seen.append)
    left = {progress.done: progress.seconds_left or 0.0 for progress in seen if not progress.doing}
    assert min(left[1], left[2]) > 9_900
    assert left[3] < 9_900
    free: list[Progress] = []
    run(Bench(), trials=60, watch=free.append)
    without_estimate = [progress.done for progress in free if progress.seconds_left is None]
    assert max(without_estimate) == 2


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        ({"trials": 4}, "its limit of 4 builds"),
        ({"trials": 1}, "its limit of 1 build"),
        ({"trials": 60, "seconds": 3.0}, "its limit of 3.0 s"),
        ({"trials": 60, "seconds": 90.0, "tick": 40.0}, "its limit of 1 min 30 s"),
        ({"trials": 60}, ""),
        ({"trials": 6}, ""),  # exactly the number of proposals
    ],
)
def test_the_search_reports_the_limit_that_ended_it(budget: dict, limit: str) -> None:
    tick = budget.pop("tick", 1.0)
    clock = iter(range(10_000))
    allowed = Budget(**budget, clock=lambda: tick * next(clock))
    search = Search(Script(NAMES), Bench(), allowed, Log(), case="case")
    search.run()
    assert search.ended_by == limit


def test_waiting_for_another_run_is_not_part_of_the_time_limit() -> None:
    clock, log = iter(range(10_000)), Log()
    waited = [0.0]

    def now() -> float:  # the clock waits for 40 seconds after the reference is built
        waited[0] = 40.0 * bool(log.trials)
        return next(clock) + waited[0]

    budget = Budget(trials=60, seconds=5.0, clock=now, waited=lambda: waited[0])
    assert 1 < len(Search(Script(NAMES), Bench(), budget, log, case="case").run()) < 6


def test_one_build_may_end_after_the_time_limit_where_it_is_allowed() -> None:
    (*_, built) = Search(Script(NAMES), Bench(), Budget(trials=2), Log(), case="case").run()
    now = 0.0
    strict, lenient = (Budget(trials=60, seconds=5.0, clock=lambda: now, late=late) for late in (0, 1))
    now = 6.0
    assert strict.reached([])
    assert not lenient.reached([])
    lenient.note(built)
    assert lenient.reached([]) == strict.reached([])


@pytest.mark.parametrize(("used", "left"), [(0.0, 40.0), (6.0, 34.0), (100.0, 20.0)])
def test_time_spent_before_the_search_counts_up_to_half_of_the_limit(used: float, left: float) -> None:
    now = 0.0
    budget = Budget(trials=60, seconds=40.0, used=used, clock=lambda: now)
    assert budget.left == left
    now = left
    assert budget.reached([]) == "its limit of 40 s"


def test_the_time_limit_of_the_run_ends_the_search() -> None:
    ended = Search(Script(NAMES), Bench(), Budget(trials=60, run_left=lambda: 0.0), Log(), case="case")
    assert len(ended.run()) == 1
    assert ended.ended_by == "the time limit of the run"


# ---- resume -------------------------------------------------------------------------------------


def journal(*names: str, fails: Sequence[str] = ()) -> list[Trial]:
    """The journal of a run that was killed after these placements."""
    log = Log()
    try:
        run(Bench(fails=fails), names=names, log=log)
    except BackendError:
        assert "reference" in fails
    return log.trials


def test_the_variation_that_was_measured_last_is_used() -> None:
    known = journal("reference", "a")
    first = replace(next(t for t in known if t.phase == "noise"), eps=0.05)
    bench = Bench()
    run(bench, replay=[first, *known], seconds=10_000.0)
    assert (bench.eps, "noise" in bench.built) == (0.03, False)


def test_a_complete_journal_is_replayed_without_building() -> None:
    bench, log = Bench(), Log()
    trials, script = run(bench, replay=journal(*NAMES), log=log)
    assert bench.built == []
    assert bench.recalled == names_of(trials) == list(NAMES)
    assert bench.eps == 0.03
    assert log.trials == []
    assert len(script.received) == 6


def test_proposals_after_a_partial_journal_are_built() -> None:
    bench, log = Bench(fails=("b",)), Log()
    trials, _ = run(bench, replay=journal("reference", "a", "b", fails=("b",)), log=log)
    assert bench.built == ["c", "d", "e"]
    assert names_of(log.trials) == ["c", "d", "e"]
    assert [trial.ok for trial in trials] == [True, True, False, True, True, True]


def test_a_journal_without_noise_measures_it_on_resume() -> None:
    bench, log = Bench(), Log()
    run(bench, replay=journal("reference")[:1], log=log)
    assert bench.built[0] == "noise"
    assert log.trials[0].phase == "noise"


def test_proposals_are_built_from_the_first_difference_to_the_journal_on() -> None:
    bench = Bench()
    trials, _ = run(bench, replay=journal("reference", "a", "c", "b"))
    assert bench.built == ["b", "c", "d", "e"]
    assert names_of(trials) == list(NAMES)


def test_the_result_of_a_subgraph_is_not_used_for_the_whole_model() -> None:
    """A placement may be proposed for a subgraph and for the whole model."""
    bench = Bench()
    part = Trial(number=1, phase="isolated", placement=placement("a"), ratio=0.5, subgraph=("n",))
    trials, _ = run(bench, replay=[*journal("reference"), part])
    assert bench.built == list(NAMES[1:])
    assert not any(trial.subgraph for trial in trials)


def test_replayed_trials_count_towards_the_budget() -> None:
    bench = Bench()
    trials, _ = run(bench, trials=4, replay=journal("reference", "a", "b"))
    assert len(trials) == 4
    assert bench.built == ["c"]


def test_a_failed_reference_of_the_journal_is_built_again() -> None:
    bench = Bench()
    trials, _ = run(bench, replay=journal("reference", fails=("reference",)))
    assert trials[0].ok
    assert bench.built[0] == "reference"


def test_confirmations_of_the_journal_are_not_replayed_as_trials() -> None:
    bench = Bench()
    confirm = Trial(number=2, phase="confirm", placement=placement("b"), ratio=0.5)
    trials, _ = run(bench, replay=[*journal("reference", "a"), confirm])
    assert bench.built == ["b", "c", "d", "e"]
    assert trials[2].ratio != 0.5


@pytest.mark.parametrize(("build_seconds", "end"), [(0.0, 40.0), (2.0, 30.0), (100.0, 20.0)])
def test_time_for_confirmation_builds_is_reserved_up_to_half_of_the_limit(build_seconds, end):
    now = 0.0
    budget = Budget(trials=60, seconds=40.0, confirming=5, clock=lambda: now)
    trial = Trial(number=0, phase="pure", placement=placement("a"), build_seconds=build_seconds)
    budget.note(trial)
    assert budget.left == 40.0  # no winner to confirm
    budget.note(replace(trial, incumbent=True))
    now = end - 1
    assert budget.left == 1.0
    assert not budget.reached([trial])
    now = end
    assert budget.left == 0.0
    assert budget.reached([trial]) == "its limit of 40 s"


# ---- trials before the search -------------------------------------------------------------------


def before(name: str = "b", *, opponent: str = "reference", verdict: str = "faster", **changed) -> Trial:
    """A trial that was made before the search; it won against the reference."""
    race = Race(opponent=placement(opponent).digest, ratio=0.8, p_value=0.0, pairs=6, verdict=verdict)  # type: ignore[arg-type] # one of the verdicts
    trial = Trial(number=3, phase=FIRST, placement=placement(name), ratio=0.8, race=race, incumbent=True)
    return replace(trial, **changed)


def test_a_trial_before_the_search_is_its_own_once_it_is_asked_for() -> None:
    bench, log, names = Bench(), Log(), ("reference", "b", "d")
    trials, script = run(bench, log=log, names=names, before=[before()])
    assert bench.built == ["reference", "noise", "d"]
    assert bench.recalled == ["b"]
    assert trials[1] == replace(before(), number=1, phase="pure", eps=0.03)
    assert names_of(script.received) == list(names)
    assert [trial.number for trial in log.trials if trial.phase != "noise"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("trial", "is_used"),
    [
        (before(), True),
        (before(verdict="slower", incumbent=False), True),
        (before(opponent="e", incumbent=False), True),  # it won and missed a limit
        (before(race=None, incumbent=False), True),  # so inaccurate that it was not raced
        (before(opponent="e"), False),
        (before(opponent="e", verdict="slower", incumbent=False), False),
        (before(opponent="e", verdict="no difference", incumbent=False), False),
        (before("c"), False),
    ],
)
def test_a_trial_before_the_search_is_used_if_it_raced_against_the_present_incumbent(
    trial: Trial, *, is_used: bool
) -> None:
    bench = Bench()
    run(bench, names=("reference", "b"), before=[trial])
    assert ("b" not in bench.built) is is_used
    assert ("b" in bench.recalled) is is_used


@pytest.mark.parametrize("has_layers", [False, True])
def test_a_trial_before_the_search_without_the_layer_times_asked_for_is_built(*, has_layers: bool) -> None:
    layers = (LayerTime(name="n", op_type="Conv", milliseconds=1.0),) if has_layers else ()
    bench = Bench()
    run(bench, names=("reference", "a"), before=[before("a", layers=layers)])
    assert ("a" not in bench.built) is has_layers


def test_a_candidate_loses_to_a_trial_before_the_search_that_won() -> None:
    lost = before("d", opponent="b", verdict="slower", incumbent=False)
    bench = Bench()
    run(bench, names=("reference", "b", "d"), before=[before(), lost])
    assert bench.built == ["reference", "noise"]


def test_a_recorded_trial_is_used_instead_of_one_before_the_search() -> None:
    """Journals of earlier versions have a build of the placement in the search too."""
    recorded = journal("reference", "b")
    bench, log = Bench(), Log()
    trials, _ = run(bench, names=("reference", "b", "d"), log=log, replay=recorded, before=[before()])
    assert trials[1].ratio == recorded[2].ratio
    assert trials[1].race == recorded[2].race
    assert names_of(log.trials) == ["d"]


@pytest.mark.parametrize("at_once", [False, True], ids=["as asked", "at once"])
def test_a_resumed_search_uses_trials_before_it_like_an_uninterrupted_one(*, at_once: bool) -> None:
    names, given = ("reference", "b", "d", "c", "e"), [before(), before("e")]
    whole = Log()
    trials, _ = run(Bench(), log=whole, names=names, before=given)
    for cut in range(1, len(whole.trials) + 1):
        script, bench, log = Script(names), Bench(), Log()
        search = Search(
            script, bench, Budget(trials=60), log, case="case", replay=whole.trials[:cut], before=given
        )
        if at_once:
            search.resume()
        assert search.run() == trials
        assert tuple(script.received) == trials
        assert [*whole.trials[:cut], *log.trials] == whole.trials
        assert "b" not in bench.built
