"""One case at work: everything that can be known of it, each thing found once. Part of the session."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from filelock import FileLock

from qdqspec import __version__
from qdqspec.backends.base import Array, Engine
from qdqspec.baseline.store import Renewal
from qdqspec.errors import BackendError, DataError, QdqspecError, StateError
from qdqspec.graph.model import Model, load_model
from qdqspec.lint import lint_model
from qdqspec.measure.lock import RunLock
from qdqspec.measure.store import Store
from qdqspec.parity.compare import compare_outputs
from qdqspec.parity.metrics import accuracy
from qdqspec.parity.shapes import shape_profiles
from qdqspec.placement.scheme import read_scheme
from qdqspec.placement.survival import check_survival
from qdqspec.session.files import (
    BuildLogs,
    make_folder,
    open_journal,
    take_results,
    write_patterns,
    write_results,
)
from qdqspec.session.gate import Gate, Gatekeeper, conditions_of
from qdqspec.session.kept import PATTERNS, SCHEME, Kept, data_digest, keep, key_of, recall
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.session.timing import BUILDS, ROUNDS, time_files
from qdqspec.session.tuning import MakeStrategy, Tuned, Tuning, Workbench, tune
from qdqspec.types import (
    AccuracyEvidence,
    Case,
    DeviceKey,
    Finding,
    LatencyEvidence,
    LintTarget,
    Optimizer,
    ParityEvidence,
    PlacedPair,
    Placement,
    SearchResult,
    SurvivalEvidence,
)

DRIFT = 0.05  # from here on it is said
VERIFY_BUILDS, VERIFY_ROUNDS = 2, 12  # how thoroughly a cached winner is timed at first


class CaseWork:
    """What is known of one case in one session. Reading an attribute does the work it takes, once."""

    def __init__(self, case: Case, bench: Workbench, store: Store, device: DeviceKey) -> None:
        self.case = case
        self.store = store
        self.device = device
        self._work = bench
        self._latency: LatencyEvidence | None = None
        self._failure: QdqspecError | None = None

    @cached_property
    def given(self) -> Model:
        """The user's model."""
        return load_model(self.case.model)

    @cached_property
    def _building(self) -> Workbench:
        """The workbench, with the shapes of this case and a folder beside its results for what builds share."""
        options = replace(
            self._work.options,
            profiles=shape_profiles(self.given, self.case.inputs),
            state=self.output / self._work.backend.name,
        )
        return replace(self._work, options=options)

    @cached_property
    def prepared(self) -> Prepared:
        """The model with what tuning needs."""
        work = self._building
        return Prepared(self.case, self.given, work.backend, work.options, work.settings.seed)

    @property
    def output(self) -> Path:
        """The folder of the case's files."""
        return self._work.settings.folder(self.case)

    @cached_property
    def kept(self) -> Kept:
        """The finished search: from the cache where it still verifies, else made now.

        What went wrong once is not tried again in this session: every check of the case says the same.
        """
        if self._failure is not None:
            raise self._failure
        try:
            with self._alone():
                return self._found()
        except StateError:
            raise  # another run in the folder may have ended by the next time
        except QdqspecError as error:
            self._failure = error
            raise

    def _found(self) -> Kept:
        settings = self._work.settings
        known = None if settings.no_cache else recall(self.store, self._key)
        if settings.scheme is not None:
            return self._chosen(settings.scheme, known)
        if settings.mode in ("measure", "verify"):
            return self._required(known)
        if known is not None and self._still_holds(known):
            take_results(known, self.given, self.output)
            return known
        return self._tuned()

    @property
    def search(self) -> SearchResult:
        """What the search came to."""
        return self.kept.result

    @property
    def latency(self) -> LatencyEvidence | None:
        """Reference and tuned model timed against each other; ``None`` in a run without timing."""
        if self._work.settings.mode == "verify":
            return None
        kept = self.kept
        if self._latency is None:
            self._latency = self._measured(kept)
        return self._latency

    @cached_property
    def tuned_path(self) -> Path:
        """The file of what is shipped: the tuned model, or the user's own where it was left alone."""
        return self.kept.model or require_path(self.given)

    @cached_property
    def pairs(self) -> tuple[PlacedPair, ...]:
        """The shipped Q/DQ pairs with their numbers."""
        kept = self.kept
        return () if kept.result.left_alone else read_scheme(kept.folder / SCHEME).pairs

    @cached_property
    def parity(self) -> ParityEvidence:
        """Outputs of the tuned model against the reference's, on evaluation data where there is some."""
        return self.parity_with(self.tuned_path)

    def parity_with(self, tuned: Path) -> ParityEvidence:
        """Outputs of another model that takes the same inputs against those of the model given."""
        feeds, kind = self._comparison_data()
        with self._engine(require_path(self.given)) as ours, self._engine(tuned) as theirs:
            return compare_outputs(((ours.run(feed), theirs.run(feed)) for feed in feeds), kind)

    @cached_property
    def accuracy(self) -> dict[str, AccuracyEvidence]:
        """The task metrics that the case's checks name, for reference and tuned model."""
        wanted = {
            check.params.evidence_key: check.params for check in self.case.checks if check.kind == "accuracy"
        }
        return {key: self._accuracy(params.metric, params.output) for key, params in wanted.items()}

    @cached_property
    def lint(self) -> dict[LintTarget, tuple[Finding, ...]]:
        """What the targets that the case's checks name would make of the tuned model."""
        asked = [check.params.target for check in self.case.checks if check.kind == "lint"]
        targets = dict.fromkeys(target for targets in asked for target in targets)
        tuned = load_model(self.tuned_path) if targets else self.given
        return {target: lint_model(tuned, target) for target in targets}

    @cached_property
    def survival(self) -> dict[Optimizer, SurvivalEvidence]:
        """What is left of the tuned model's pairs after each optimizer that the case's checks name."""
        asked = [check.params.through for check in self.case.checks if check.kind == "survival"]
        names = dict.fromkeys(name for through in asked for name in through)
        return {found.optimizer: found for found in check_survival(self.tuned_path, tuple(names))}

    @cached_property
    def gate(self) -> Gate:
        """The case beside its committed baseline; empty in a run without timing."""
        latency = self.latency
        if latency is None:
            return Gate()
        now = conditions_of(self.case, self.device, self.given.sha256, self.search.winner.digest, latency)
        measure, note = partial(self._measured, self.kept), self.prepared.warnings.append
        return Gatekeeper(self.case, self._work.settings, self.device, now, latency, measure, note).gate()

    @property
    def renewals(self) -> tuple[Renewal, ...]:
        """Baseline entries measured in this session and not yet written."""
        return self.gate.renewals if "gate" in self.__dict__ else ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the model files, external data included."""
        return {"reference": _size(require_path(self.given), self.given), "tuned": _size(self.tuned_path)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of this case so far."""
        own = self.prepared.warnings if "prepared" in self.__dict__ else []
        return (*own, *self._drift_warning(), *self.store.warnings)

    def _drift_warning(self) -> tuple[str, ...]:
        if self._latency is None or abs(self._latency.drift) <= DRIFT:
            return ()
        drifted = f"the machine's speed drifted by {self._latency.drift:+.0%} while it was measured"
        return (f"{drifted}: ratios were taken round by round and hold, milliseconds hold less",)

    @cached_property
    def _key(self) -> str:
        words = sorted(self._work.options.extra.items())  # another way to build is another search
        return key_of(
            self.case,
            self.given.sha256,
            data_digest(self.case.inputs.calibration),
            " ".join([self.device.key, *(f"{word}={text}" for word, text in words)]),
            self._work.settings.seed,
        )

    def _alone(self) -> AbstractContextManager[object]:
        """One run in the folder. Workers of one test run wait for each other, and find the work done."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            make_folder(self.output)
            return FileLock(self.output / ".lock", thread_local=False)
        return RunLock(self.output)

    @property
    def target(self) -> str:
        """Backend and variant that the case runs on."""
        return self._work.backend.target

    def tuning(self, journal: BuildLogs, make: MakeStrategy, name: str) -> Tuning:
        """The search of this case by a strategy, to be stepped through."""
        return Tuning(self.prepared, self._building, journal, make=make, name=name)

    def _tuned(self) -> Kept:
        with open_journal(self.output, self.journal_header, self.prepared.warnings) as journal:
            tuned = tune(self.prepared, self._building, journal)
            self._latency = tuned.latency
            kept = self._written(tuned)
            # Last, as they mark the journal as finished: what could not be written is not searched again.
            for role, trial in tuned.confirmed:
                journal.append(trial, role=role)
        return kept

    def _written(self, tuned: Tuned) -> Kept:
        """The result in its folder and, where one is wanted, in the cache."""
        result, raw_winner, folder = tuned.result, tuned.raw_winner, self.output
        backend = self._work.backend.target
        write_results(self.prepared, result, raw_winner, folder, backend)
        write_patterns(
            self.prepared, result.trials, tuned.intervals, folder / PATTERNS, backend, self.device.key
        )
        cut_short = (
            self._work.seconds_left() == 0
        )  # of a search that the run's time limit ended, nothing is kept
        if self._work.settings.no_cache or cut_short:
            return Kept(result=result, folder=folder, raw_winner=raw_winner)
        self.store.discard(self._key)
        return keep(self.store, self._key, result, raw_winner, folder)

    @property
    def journal_header(self) -> dict[str, object]:
        """What makes a search of this case another one: a journal with another header is not gone on with."""
        return {
            "model_sha256": self.given.sha256,
            "search": self._key,
            "backend": self._work.backend.target,
            "device": self.device.key,
            "seed": self._work.settings.seed,
            "qdqspec": __version__,
        }

    def _still_holds(self, known: Kept) -> bool:
        """Time a cached winner anew; where a short look proves nothing, look as closely as a search would."""
        if known.model is None:
            return True
        self._latency = self._timed(known, VERIFY_BUILDS, VERIFY_ROUNDS)
        if self._latency.speedup.low <= 1:
            self._latency = self._timed(known)
        if self._latency.speedup.low <= 1:
            self.prepared.warnings.append(
                "the cached winner is no longer faster than the reference: tuned anew"
            )
            return False
        return True

    def _required(self, known: Kept | None) -> Kept:
        if known is None:
            raise StateError(
                f"no winner is known for {self.case.name} on this device, and mode "
                f"'{self._work.settings.mode}' does not search",
                where=self.case.spec or self.case.model,
                cure="run it once with --qdq-mode=run",
            )
        return known

    def _chosen(self, digest: str, known: Kept | None) -> Kept:
        """The placement of a known trial whose digest begins so, built again from its labels."""
        trials = known.result.trials if known else ()
        found = {t.placement.digest: t.placement for t in trials if t.ok}
        meant = [placement for name, placement in found.items() if name.startswith(digest)]
        if known is None or len(meant) != 1:
            raise StateError(
                f"several trials of {self.case.name} have a scheme that begins with '{digest}'"
                if meant
                else f"no trial of {self.case.name} on this device has scheme {digest}",
                where=self.case.spec or self.case.model,
                cure="run the case once without --qdq-scheme, and take a digest from its trials.jsonl",
            )
        if meant[0].digest == known.result.winner.digest:
            return known
        return self._rebuilt(known, meant[0])

    def _rebuilt(self, known: Kept, placement: Placement) -> Kept:
        result = replace(
            known.result,
            winner=placement,
            left_alone=not placement.sites,
            reason=f"scheme {placement.digest} was asked for",
            provenance=replace(known.result.provenance, source="replayed"),
        )
        folder = self.output / placement.digest
        make_folder(folder)
        write_results(self.prepared, result, placement, folder, self._work.backend.target)
        return Kept(result=result, folder=folder, raw_winner=placement)

    def _measured(self, kept: Kept, builds: int = 3, rounds: int = 24) -> LatencyEvidence:
        """As `_timed`; raises `BackendError` where the tuned model does not run any more."""
        if kept.model is None:
            return self._timed(kept, builds=VERIFY_BUILDS, rounds=VERIFY_ROUNDS)
        measured = self._timed(kept, builds, rounds)
        if "tuned" not in measured.samples:
            raise BackendError(
                f"the tuned model could not be built and run again: {measured.failures['tuned']}",
                where=kept.model,
                cure="tune it anew with --qdq-mode=run",
            )
        return measured

    def _timed(self, kept: Kept, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """Reference and what is shipped, from fresh builds, interleaved."""
        return self.timed_with(kept.model or require_path(self.given), builds, rounds)

    def timed_with(self, tuned: Path, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """The model given and another that takes the same inputs, from fresh builds, interleaved."""
        files = {"reference": require_path(self.given), "tuned": tuned}
        sample, rules = self.prepared.sample, self.case.tune
        return time_files(self._building, files, sample, rules, builds=builds, rounds=rounds)

    def _engine(self, path: Path) -> AbstractContextManager[Engine]:
        return closing(self._building.backend.build(path, self._building.options))

    def _comparison_data(self) -> tuple[Iterable[Mapping[str, Array]], str]:
        if self.prepared.evaluation is not None:
            return self.prepared.evaluation, "evaluation"
        if self.prepared.calibration is not None:
            return self.prepared.calibration, "calibration"
        return self.prepared.feeds(), "random"

    def _accuracy(self, metric: str, output: str | None) -> AccuracyEvidence:
        data = self.prepared.evaluation
        if data is None:
            raise DataError(
                "accuracy is asked for, and there is no evaluation data",
                where=self.case.spec or self.case.model,
                cure="name an .npz file with inputs and labels in inputs.evaluation",
            )
        labels = data.require_labels()

        def score(path: Path) -> float:
            with self._engine(path) as engine:
                return accuracy(metric, (engine.run(feed) for feed in data), labels, output=output)

        return AccuracyEvidence(
            metric=metric,
            reference=score(require_path(self.given)),
            tuned=score(self.tuned_path),
            samples=len(labels),
        )


def _size(path: Path, model: Model | None = None) -> int:
    data = path.with_name(path.name + ".data")
    named = model.external_files() if model is not None else (data,) if data.is_file() else ()
    return path.stat().st_size + sum(file.stat().st_size for file in named)
