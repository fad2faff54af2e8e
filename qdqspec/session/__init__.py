"""The pipeline: a session tunes, measures and judges cases, and remembers what it found.

The pipeline of a case:

    model > regions > space of placements > search (build, race, confirm) > winner
          > latency, parity, accuracy, size, survival, lint > evidence > checks > record

`CaseWork` does the work of one case, each part once and only when asked for; `Session` owns what cases
share: the backend, the cache, the device's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from qdqspec import __version__
from qdqspec.backends.base import Availability, BuildOptions
from qdqspec.baseline.store import Renewal
from qdqspec.cases import SPEC_SUFFIXES, find_case
from qdqspec.checks._verdicts import raised as raised_verdict
from qdqspec.checks._verdicts import timed_out
from qdqspec.checks.base import Check
from qdqspec.checks.parity import ParityParams
from qdqspec.config import Settings
from qdqspec.config.declared import check_option
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError
from qdqspec.graph.model import Model, load_model
from qdqspec.measure.isolate import Isolated
from qdqspec.measure.lock import DeviceLock, log_wait
from qdqspec.measure.store import Store
from qdqspec.placement.import_qdq import import_placement
from qdqspec.registry import resolve
from qdqspec.session.culprits import MOST, culprits_of
from qdqspec.session.parity import SideBySide
from qdqspec.session.planning import plan_text
from qdqspec.session.probes import Prober, read_probe
from qdqspec.session.result import Result
from qdqspec.session.scores import joined_metrics
from qdqspec.session.study import AnyStrategy, Study
from qdqspec.session.work import CaseWork, skipped_record
from qdqspec.session.workbench import Workbench
from qdqspec.spec.inline import Asked, AskedWithStrategy, PathLike, inline_case
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    CulpritEvidence,
    DeviceKey,
    Evidence,
    EvidenceKind,
    Metric,
    Probe,
    Progress,
    Region,
    RunRecord,
    SearchResult,
    Verdict,
)
from qdqspec.units import seconds_text

_Key = tuple[str, str, str, int, int, str]


class Session:
    """Tunes, measures and judges. What is wrong with input or machine is raised as `QdqspecError`.

    ``overrides`` are fields of `Settings`, such as ``backend="onnxruntime"`` or ``seed=7``. ``watch`` is told
    how far a search is. ``metrics`` are task metrics by the names that specs give them; see `Metric`. Close a
    session when done: it holds child processes.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        watch: Callable[[Progress], None] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = Settings(**overrides) if settings is None else replace(settings, **overrides)
        for option in self.settings.backend_option:
            check_option(option, "backend_option", command_line=True)
        self.watch = watch
        self.metrics = joined_metrics(metrics or {})
        self.backend = Isolated(self.settings.backend)
        self._options = BuildOptions.of(self.settings)
        self._store = Store(self.settings.cache_dir)
        self._works: dict[_Key, CaseWork] = {}
        self._results: dict[_Key, dict[str, CheckResult]] = {}
        self._raised: dict[_Key, set[str]] = {}  # the checks whose result is an error
        self._needs: dict[_Key, set[EvidenceKind]] = {}  # what was asked of a case
        self._skipped: dict[_Key, CaseRecord] = {}
        self._started = (datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic())

    def availability(self, case: Case) -> Availability:
        """Whether the backend works here and has one of the case's number formats, and what to do if not."""
        found = self.backend.probe(self._options)
        wanted = case.quantize.formats
        if not found.usable:
            return found
        here = self.backend.capabilities(self._options)
        if not set(wanted).isdisjoint(here.formats):
            return found
        reasons = [f"; {here.lacking[name]}" for name in wanted if name in here.lacking]
        return replace(
            found,
            usable=False,
            why=f"{self.backend.name} has no {' or '.join(wanted)} on this device{''.join(reasons)}",
            install=f"choose one of its formats ({', '.join(here.formats)}), or another backend",
        )

    def tune(self, model: PathLike | Case, **asked: Unpack[AskedWithStrategy]) -> Result:
        """Search the fastest placement of a model, or of a case of a spec; see `Asked` for what may be said.

        A winner that is known and still holds is taken. Raises `QdqspecError` where something is wrong.
        """
        case = self._asked(model, asked)
        evidence = self.evidence(case, frozenset({"latency", "parity"}))
        record = self._run_record([CaseRecord(evidence=evidence)])
        return Result(record=record, kept=self.work(case).finder.kept, given=self.model(case))

    def find_culprits(
        self,
        model: PathLike | Case,
        tuned: PathLike | None = None,
        *,
        most: int | None = MOST,
        **asked: Unpack[AskedWithStrategy],
    ) -> CulpritEvidence:
        """Which Q/DQ pairs cost most accuracy: of ``tuned``, a model quantized by any tool, or of the known winner.

        The ``most`` noisiest are ranked, or all where it is ``None``. Nothing is timed; a winner that is not known is
        searched.
        """
        work = self.work(self.case(model, asked))
        if tuned is None:
            return culprits_of(work.bench, work.finder.pairs, most=most)
        imported = import_placement(load_model(Path(tuned)), work.bench.given)
        return culprits_of(work.bench, imported.pairs, most=most)

    def probe(
        self,
        model: PathLike,
        tuned: PathLike,
        file: PathLike,
        limits: ParityParams | None = None,
        *,
        values: Mapping[str, Any] | None = None,
    ) -> Probe:
        """Try one input, as a parity check keeps it, on a model and its tuned one.

        It is held to ``limits``, else to those that the file says it broke. ``values`` are the inputs of the model that
        are fixed, which the tuned one does not have.
        """
        kept = read_probe(Path(file))
        shapes = {name: list(array.shape) for name, array in kept.feeds.items()}
        case = inline_case(model, {"shapes": shapes, "values": values or {}})
        work = self.work(case).bench
        with SideBySide(work.work, case.model, Path(tuned).absolute(), work.fixed) as models:
            return Prober(models, limits or kept.params, kept.typical).probe(kept.feeds, kept.inputs)

    def study(
        self,
        model: PathLike | Case,
        *,
        strategy: AnyStrategy | None = None,
        folder: PathLike | None = None,
        **asked: Unpack[Asked],
    ) -> Study:
        """The same search, to be stepped through; see `Study`.

        ``strategy`` is a name, an object with ask, tell and done, or what makes one of a `SearchSetup` and a
        random generator. In ``folder`` the study is kept from the beginning, and gone on with where it is there.
        """
        case = self._asked(model, asked)
        settings = {name: getattr(self.settings, name) for name in ("backend", "device", "threads", "seed")}
        return Study(
            self.work(case).bench,
            settings,
            strategy=strategy,
            folder=None if folder is None else Path(folder).absolute(),
        )

    def _asked(self, model: PathLike | Case, asked: Mapping[str, object]) -> Case:
        """The case that is meant, where the backend can do it."""
        case = self.case(model, asked)
        found = self.availability(case)
        if not found.usable:
            raise BackendUnavailableError(
                f"backend {self.settings.backend} is not usable here: {found.why}", cure=found.install or None
            )
        return case

    def case(self, model: PathLike | Case, asked: Mapping[str, Any]) -> Case:
        """A model with what is asked of it; ``spec.qdq.yaml::id`` is the case of a spec, which says it all.

        Only ``metrics`` may stand beside a spec: it names them, and holds no code.
        """
        words = {word: value for word, value in asked.items() if word != "metrics"}
        case = self._case(model, words)
        return replace(case, metrics=joined_metrics(case.metrics, asked.get("metrics", {})))

    def _case(self, model: PathLike | Case, asked: Mapping[str, object]) -> Case:
        if not isinstance(model, Case) and SPEC_SUFFIXES[0] not in str(model):
            return inline_case(model, asked)
        if asked:
            raise ConfigError(
                "a spec's case says what is asked of it", where=str(model), cure="change it there"
            )
        if isinstance(model, Case):
            return model
        return find_case(str(model), self.settings, Path.cwd())

    def model(self, case: Case) -> Model:
        """The user's model, loaded and checked."""
        return self.work(case).bench.given

    def regions(self, case: Case) -> tuple[Region, ...]:
        """The regions the model is cut into."""
        return self.work(case).bench.prepared.regions

    def search(self, case: Case) -> SearchResult:
        """Tune the case, or take the winner that is known and still holds."""
        return self.work(case).search

    def evidence(self, case: Case, needs: frozenset[EvidenceKind]) -> Evidence:
        """What is known of a case, with the parts asked for measured."""
        work = self.work(case)
        search = work.search
        self._needs.setdefault(_key(case), set()).update(needs)
        return Evidence(
            case=case,
            backend=self.backend.name,
            target=self.backend.target,
            device=self._device,
            model_sha256=work.bench.given.sha256,
            search=search,
            pairs=work.finder.pairs,
            latency=work.latency if "latency" in needs else None,
            parity=work.parity if "parity" in needs else None,
            culprits=work.culprits if "parity" in needs else None,
            parity_search=work.parity_search if "parity" in needs else {},
            accuracy=work.accuracy if "accuracy" in needs else {},
            size_bytes=work.sizes if "size" in needs else {},
            regression=work.gate.evidence if "regression" in needs else {},
            survival=work.survival if "survival" in needs else {},
            lint=work.lint if "lint" in needs else {},
            node_ops={node.name: node.op_type for node in work.bench.given.nodes},
            output=work.bench.output,
            warnings=work.warnings,
        )

    def judge(self, case: Case, check: CheckSpec) -> CheckResult:
        """Measure what the check needs, judge it, and enter the verdict into the record.

        An error is entered as a failed check, and raised.
        """
        judged = self._results.setdefault(_key(case), {})
        raised = self._raised.setdefault(_key(case), set())
        if check.id not in judged or check.id in raised:
            try:
                verdict = self._verdict(case, check)
            except Exception as error:
                raised.add(check.id)
                judged[check.id] = _result(check, raised_verdict(error))
                raise
            raised.discard(check.id)
            judged[check.id] = _result(check, verdict)
        return judged[check.id]

    def _verdict(self, case: Case, check: CheckSpec) -> Verdict:
        """What a check comes to; what the time limit of the run leaves undecided is inconclusive."""
        kind, work = cast("Check", resolve("check", check.kind)), self.work(case)
        limit = seconds_text(self.settings.time_limit or 0.0)
        if self._seconds_left() == 0 and not work.finder.is_found:
            return timed_out(limit)
        work.require(check)
        work.look_into(check)
        verdict = kind.judge(check.params, self.evidence(case, kind.needs | {"parity"}))
        if verdict.outcome == "fail" and work.finder.is_cut_short:
            return timed_out(limit, verdict)
        return verdict

    def skip(self, case: Case, why: str) -> None:
        """Enter a case that cannot run here into the record, with the reason."""
        self._skipped[_key(case)] = skipped_record(case, self.settings.backend, why)

    def plan(self, case: Case) -> str:
        """What a search would try and what it would cost at most, without building anything."""
        return plan_text(self.work(case).bench.prepared, case.tune)

    def output(self, case: Case) -> Path:
        """The folder of the case's files."""
        return self.work(case).bench.output

    def record(self) -> RunRecord:
        """Every case that was judged, searched or skipped so far, with all evidence that was gathered for it."""
        found = (
            CaseRecord(evidence=self._gathered(key), results=tuple(self._results.get(key, {}).values()))
            for key, work in self._works.items()
            if self._results.get(key) or work.finder.is_found
        )
        return self._run_record((*found, *self._skipped.values()))

    def _run_record(self, cases: Iterable[CaseRecord]) -> RunRecord:
        started, clock = self._started
        found = tuple(cases)
        return RunRecord(version=__version__, started=started, seconds=time.monotonic() - clock, cases=found)

    def renewals(self) -> tuple[Renewal, ...]:
        """Baseline entries that ``update`` asked for and that were measured; the caller writes them."""
        return tuple(renewal for work in self._works.values() for renewal in work.renewals)

    def close(self) -> None:
        """End the child processes."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gathered(self, key: _Key) -> Evidence:
        """What is known of a case. Nothing is searched or measured for what was never found or has raised."""
        work, raised = self._works[key], self._raised.get(key, set())
        if not work.finder.is_found:
            return work.unsearched
        needs: set[EvidenceKind] = {"latency", "parity"}  # of every case, whatever its checks
        needs |= self._needs.get(key, set())
        for result in self._results.get(key, {}).values():
            needs |= cast("Check", resolve("check", result.kind)).needs if result.id not in raised else set()
        try:
            return self.evidence(work.bench.case, frozenset(needs))
        except QdqspecError:
            if not raised:
                raise
            return self.evidence(work.bench.case, frozenset())

    @cached_property
    def _device(self) -> DeviceKey:
        return self.backend.device(self._options)

    def work(self, case: Case) -> CaseWork:
        """Everything that is known of a case, each thing found when first asked for."""
        key = _key(case)
        if key not in self._works:
            case = replace(case, metrics=joined_metrics(self.metrics, case.metrics))
            self._works[key] = CaseWork(case, self._workbench(case.name), self._store, self._device)
        return self._works[key]

    def _workbench(self, name: str = "") -> Workbench:
        report = partial(self._report_wait, name)
        return Workbench(
            backend=self.backend,
            options=self._options,
            settings=self.settings,
            exclusive=lambda: DeviceLock(f"{self.settings.device}-{self._device.key}", report=report),
            report_wait=report,
            watch=self._tell,
            seconds_left=self._seconds_left,
        )

    def _seconds_left(self) -> float | None:
        """What is left of the time limit, which holds for the whole run; later cases get less."""
        limit = self.settings.time_limit
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._started[1]))

    def _tell(self, progress: Progress) -> None:
        if self.watch is not None:
            self.watch(progress)

    def _report_wait(self, name: str, text: str) -> None:
        if self.watch is None:
            log_wait(f"{name}: {text}")
        else:
            self.watch(Progress(case=name, phase="waiting", done=0, total=0, waiting=text))


def _result(check: CheckSpec, verdict: Verdict) -> CheckResult:
    return CheckResult(id=check.id, kind=check.kind, severity=check.severity, verdict=verdict)


def _key(case: Case) -> _Key:
    """What makes two cases the same work: a fixture may have replaced model or data, a caller the rules.

    A model that was written anew is another one. Data and ``start_from`` go by their paths: a search may itself
    write what the next one starts from.
    """
    asked = repr((case.inputs, case.patterns, case.regions, case.quantize, case.tune))
    try:
        written = case.model.stat()
    except OSError:  # reported when the model is loaded
        return str(case.spec), case.name, str(case.model), 0, 0, asked
    return str(case.spec), case.name, str(case.model), written.st_mtime_ns, written.st_size, asked
