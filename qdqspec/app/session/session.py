"""A session: the cases of a run, with the backends, cache, device lock, time limit and record that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Unpack, cast

import numpy as np

from qdqspec import __version__
from qdqspec._core.config import Settings, read_overrides
from qdqspec._core.files import Closing
from qdqspec._core.options import check_option
from qdqspec._core.store import Store
from qdqspec.accuracy import SavedProbe, all_files
from qdqspec.app.cases import SPEC_SUFFIXES, find_case
from qdqspec.app.evidence.baselines import Renewal
from qdqspec.app.evidence.parity import MOST, both_models, culprits_of
from qdqspec.app.evidence.regression import damaged_baselines
from qdqspec.app.evidence.timing import Models, compare_runtimes, models_of
from qdqspec.app.given_data import GivenFiles
from qdqspec.app.preparation.prepare import output_of
from qdqspec.app.preparation.runtimes import Resources, lock_of, log_progress, resources_of
from qdqspec.app.session.result import Plan, Result, plan_of, scheme_sum
from qdqspec.app.session.study import Study
from qdqspec.app.session.tuning import AnyStrategy
from qdqspec.app.session.work import CaseWork
from qdqspec.backends import Availability, Isolated
from qdqspec.checks import raised, requests_of
from qdqspec.errors import ConfigError, DataError, QdqspecError, StateError
from qdqspec.graph import Model, load_model
from qdqspec.qdq import import_placement
from qdqspec.spec import Asked, AskedWithStrategy, GivenModel, PathLike, inline_case
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    CulpritEvidence,
    DeviceKey,
    Evidence,
    EvidenceKind,
    Loader,
    Metric,
    Probe,
    Progress,
    Region,
    RunRecord,
    RuntimeComparison,
    SearchResult,
)
from qdqspec.types.requests import InputLimits

_Key = tuple[str, str, str, tuple[tuple[str, int, int], ...], frozenset[tuple[str, object]], str]


class Session(Closing):
    """Tunes, measures and checks cases. Errors of the input or the machine are raised as `QdqspecError`.

    ``overrides`` are fields of `Settings`, such as ``threads=4`` or ``seed=7``. ``watch`` is called with
    the progress of a search. ``metrics`` are task metrics and ``loaders`` data loaders by the names used in specs; see
    `Metric` and `Loader`. ``device_key`` determines the key of the device for baselines and caches, by default the
    backend's. Close a session after use: it holds child processes.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        watch: Callable[[Progress], None] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        loaders: Mapping[str, Loader] | None = None,
        device_key: Callable[[DeviceKey], str] | None = None,
        **overrides: Any,
    ) -> None:
        overrides = read_overrides(overrides)
        self.settings = Settings(**overrides) if settings is None else replace(settings, **overrides)
        for option in self.settings.backend_option:
            check_option(option, "backend_option", command_line=True)
        self.watch = watch
        self.metrics = _joined(metrics or {})
        self.loaders = dict(loaders or {})
        self._files = GivenFiles()
        self._backends: dict[str, Resources] = {}
        self._device_key = device_key
        self._runtimes: tuple[RuntimeComparison, ...] = ()
        self._store = Store(self.settings.cache_dir)
        self._works: dict[_Key, CaseWork] = {}
        self._waits: list[float] = []  # seconds of each wait for other runs on the device
        self._skipped: dict[_Key, CaseRecord] = {}
        self._started = (datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic())

    def runtime(self, case: Case | None = None) -> Resources:
        """The backend of a case, by default that of the run. Raises `ConfigError` if there is none of that name."""
        name = (case and case.backend) or self.settings.backend
        if name not in self._backends:
            self._backends[name] = resources_of(replace(self.settings, backend=name), self._device_key)
        return self._backends[name]

    def availability(self, case: Case) -> Availability:
        """Whether the backend is usable here and has one of the case's number formats; if not, why not."""
        runtime = self.runtime(case)
        found = runtime.backend.probe(runtime.options)
        if not found.usable:
            return found
        here, words = runtime.backend.capabilities(runtime.options), ("on this device", "another backend")
        return found.with_formats(case, here.formats, here.lacking, (runtime.backend.name, *words))

    def target(self, case: Case) -> str:
        """The backend of a case and its variant."""
        return self.runtime(case).backend.target

    def tune(self, model: GivenModel | Case, **asked: Unpack[AskedWithStrategy]) -> Result:
        """Search for the fastest placement of a model, or of a case of a spec; `Asked` lists the options.

        A cached winner that passes its recheck is reused. Raises `QdqspecError` for errors of input or machine.
        """
        case = self._asked(model, asked)
        evidence = self.evidence(case, frozenset({"latency", "parity"}))
        record = self._run_record([CaseRecord(evidence=evidence)])
        kept = self.work(case).find()
        given, own = self.model(case), scheme_sum(kept.folder)
        return Result(record=record, kept=kept, given=given, files=self._files, scheme_sum=own)

    def find_culprits(
        self,
        model: GivenModel | Case,
        tuned: GivenModel | None = None,
        *,
        most: int | None = MOST,
        **asked: Unpack[AskedWithStrategy],
    ) -> CulpritEvidence:
        """Rank the Q/DQ pairs of a quantized model by the accuracy they cost.

        The model is ``tuned``, from any tool, or else the winner. Returns the ``most`` pairs with the largest error,
        all for ``None``. Nothing is timed, except by the search that runs first
        if there is neither ``tuned`` nor a cached winner.
        """
        work = self.work(self.case(model, asked))
        if tuned is None:
            return work.find_culprits(most=most)
        quantized = load_model(Path(cast("PathLike", self.file(tuned))))
        imported = import_placement(quantized, work.prepared.given)
        return culprits_of(work.prepared, imported, quantized=quantized, most=most)

    def probe(
        self,
        model: PathLike,
        tuned: PathLike,
        file: PathLike,
        limits: InputLimits | None = None,
        *,
        values: Mapping[str, Any] | None = None,
    ) -> Probe:
        """Run one input, saved by a parity check, on a model and its tuned model.

        The outputs are checked against ``limits``, by default those saved in the file. ``values`` are the inputs of the
        model that are fixed, which the tuned model does not have.
        """
        kept = SavedProbe.read(Path(file))
        shapes = {name: list(array.shape) for name, array in kept.feeds.items()}
        case = inline_case(model, {"shapes": shapes, "values": values or {}})
        with both_models(self.work(case).as_given, Path(tuned).absolute()) as models:
            return kept.probe(models, limits)

    def study(
        self,
        model: GivenModel | Case,
        *,
        strategy: AnyStrategy | None = None,
        folder: PathLike | None = None,
        **asked: Unpack[Asked],
    ) -> Study:
        """The same search, step by step; see `Study`.

        ``strategy`` is a name, an object with ask, tell and done, or a callable that makes one from a `SearchSetup` and
        a random generator. With ``folder`` the study is saved there from the start, and resumed if it already exists.
        """
        own = None if folder is None else Path(folder).absolute()
        return Study(self.work(self._asked(model, asked)).prepared, strategy=strategy, folder=own)

    def _asked(self, model: GivenModel | Case, asked: Mapping[str, object]) -> Case:
        """The requested case; raises `BackendUnavailableError` if the backend cannot run it."""
        case = self.case(model, asked)
        found = self.availability(case)
        if not found.usable:
            raise found.error(case.backend or self.settings.backend)
        return case

    def case(self, model: GivenModel | Case, asked: Mapping[str, Any]) -> Case:
        """A model with its options as a case; ``spec.qdq.yaml::id`` selects a case of a spec.

        A case of a spec accepts ``metrics`` only: a spec names metrics and holds no code.
        """
        given = self.file(model)
        words = self._files.asked({word: value for word, value in asked.items() if word != "metrics"})
        if not isinstance(given, Case) and not any(suffix in str(given) for suffix in SPEC_SUFFIXES):
            case = inline_case(given, words)
        elif words:
            raise ConfigError(
                "a case of a spec has its options in the spec", where=str(given), cure="change them there"
            )
        else:
            case = given if isinstance(given, Case) else find_case(str(given), self.settings, Path.cwd())
        return replace(case, metrics=_joined(case.metrics, asked.get("metrics", {})))

    def file(self, model: GivenModel | Case) -> PathLike | Case:
        """A model in memory as a file; anything else as it is."""
        return cast("PathLike | Case", self._files.model(model))

    def model(self, case: Case) -> Model:
        """The user's model, loaded and validated."""
        return self.work(case).prepared.given

    def regions(self, case: Case) -> tuple[Region, ...]:
        """The regions of the model."""
        return self.work(case).prepared.regions

    def search(self, case: Case) -> SearchResult:
        """Tune the case, or return the cached winner if it passes its recheck."""
        return self.work(case).search

    def evidence(self, case: Case, needs: frozenset[EvidenceKind]) -> Evidence:
        """The evidence of a case; the requested kinds are measured, as its checks request them."""
        work = self.work(case)
        for check in case.checks:
            if (needs - {"parity"}).intersection(request.kind for request in requests_of(check)):
                work.gather(check)
        return work.evidence(needs)

    def judge(self, case: Case, check: CheckSpec) -> CheckResult:
        """Measure the evidence of the check, judge it, and add the verdict to the record.

        An error is recorded as a failed check, and raised.
        """
        try:
            work = self.work(case)
            if check.id not in work.results or check.id in work.raised:
                verdict = work.judge(check)
                work.raised.discard(check.id)
                work.add(check, verdict)
        except Exception as error:
            self.fail(case, check, error)
            raise
        return work.results[check.id]

    def fail(self, case: Case, check: CheckSpec, error: Exception) -> None:
        """Record a check that could not be judged as failed, with the error."""
        work = self.work(case)
        work.raised.add(check.id)
        work.add(check, raised(error))

    def skip(self, case: Case, why: str) -> None:
        """Record a case that cannot run here, with the reason."""
        name, device = case.backend or self.settings.backend, DeviceKey(key="")
        skipped = Evidence(case=case, backend=name, target=name, device=device, model_sha256="", skipped=why)
        self._skipped[case_key(case, self.settings.output)] = CaseRecord(evidence=skipped)

    def planned(self, case: Case) -> Plan:
        """The size of the search and an upper bound of its cost, or that its result is in the cache. Builds nothing.

        Raises if the data is missing or does not fit the model. With ``tune.accuracy`` the cache is not consulted: its
        key contains the score of the reference, which would have to be run.
        """
        work = self.work(case)
        for found in damaged_baselines(case, work.resources.settings, work.resources.device).values():
            raise StateError(found.reason, where=found.file, cure=found.command)
        planned = plan_of(work.prepared)
        if self.settings.no_cache or self.settings.retune or case.tune.accuracy is not None:
            return planned
        return replace(planned, cached=self._store.get(work.prepared.key) is not None)

    def compare_runtimes(self) -> tuple[RuntimeComparison, ...]:
        """Time the models of cases that differ in the runtime only, interleaved; see `RuntimeComparison`.

        Cases that were not searched are left out. The result is part of the record.
        """
        if self.settings.mode not in ("run", "measure") or self._seconds_left() == 0:
            return self._runtimes
        groups: dict[tuple[str, ...], list[CaseWork]] = {}
        for work in self._works.values():
            case, found = work.case, work.found
            if case.backend is not None and found is not None and found.result.coverage is None:
                rest = {axis: value for axis, value in case.matrix.items() if axis != "backend"}
                name = "-".join([case.spec_name, *(str(value) for value in rest.values())])
                groups.setdefault((str(case.spec), str(case.model), repr(rest), name), []).append(work)

        def models(work: CaseWork) -> Models:
            kept = work.find()
            sqnr_db = None if kept.model is None else work.parity.sqnr_db
            return models_of(work.prepared, kept.model, kept.result.winner, sqnr_db)

        self._runtimes = tuple(
            compare_runtimes(key[-1], map(models, works), self._tell)
            for key, works in groups.items()
            if len({work.case.backend for work in works}) > 1
        )
        return self._runtimes

    def output(self, case: Case) -> Path:
        """The output folder of the case."""
        work = self.work(case)
        return output_of(work.case, work.resources)

    def record(self) -> RunRecord:
        """The record of all cases judged, searched or skipped so far, with all their evidence."""
        works = self._works.values()
        found = (work.record for work in works if work.results or work.found is not None)
        return self._run_record((*found, *self._skipped.values()), self._runtimes)

    def _run_record(
        self, cases: Iterable[CaseRecord], runtimes: tuple[RuntimeComparison, ...] = ()
    ) -> RunRecord:
        started, clock = self._started
        return RunRecord(
            version=__version__,
            started=started,
            seconds=time.monotonic() - clock,
            cases=tuple(cases),
            runtimes=runtimes,
        )

    def renewals(self) -> tuple[Renewal, ...]:
        """Measured baseline entries that ``update`` requests; the caller writes them."""
        return tuple(renewal for work in self._works.values() for renewal in work.renewals)

    def close(self) -> None:
        """Stop the child processes."""
        for runtime in self._backends.values():
            cast("Isolated", runtime.backend).close()

    def work(self, case: Case) -> CaseWork:
        """The work of a case, shared by all its checks. Raises `ConfigError` if the device has no valid key."""
        key = case_key(case, self.settings.output)
        if key not in self._works:
            case = replace(case, metrics=_joined(self.metrics, case.metrics))
            runtime = self.runtime(case)
            resources = replace(
                runtime,
                watch=self._tell,
                case=case.name,
                lock=lock_of(runtime),
                waits=self._waits,
                seconds_left=self._seconds_left,
            )
            _ = resources.device  # a work without a device has no record
            load = partial(self._files.loaded, loaders=self.loaders)
            self._works[key] = CaseWork(case, resources, self._store, load)
        return self._works[key]

    def _seconds_left(self) -> float | None:
        """Seconds left of the time limit, which applies to the whole run."""
        limit = self.settings.time_limit
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._started[1]))

    def _tell(self, progress: Progress) -> None:
        (self.watch or log_progress)(progress)


def judge_case(session: Session, case: Case) -> dict[str, QdqspecError]:
    """Judge the checks of a case, or search and measure if it has none; returns the errors of checks by id."""
    errors: dict[str, QdqspecError] = {}
    for check in case.checks:
        try:
            session.judge(case, check)
        except QdqspecError as error:
            errors[check.id] = error
    if not case.checks:
        session.evidence(case, frozenset({"latency", "parity"}))
    return errors


def _joined(*given: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of several sources; later ones win. Raises `ConfigError` for a value that is not a metric."""
    for metrics in given:
        # A fixture may return anything, whatever its annotation.
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise ConfigError(
                f"metrics are a mapping of names to functions, and these are {metrics!r:.60}",
                cure="return {'name': function} from fixture qdq_metrics, or give metrics={...} to the session",
            )
    return {name: metric for metrics in given for name, metric in metrics.items()}


def case_key(case: Case, output: Path) -> _Key:
    """The identity of a case's work; a fixture may have replaced model or data, a caller the rules or the checks.

    A rewritten file is a different one, and so is a metric of other code. Files of ``start_from`` below the ``output``
    folder are identified by path: the search itself may write them.
    """
    files = [case.model, case.inputs.scales, case.regions.graph]
    files += [file for file in case.tune.start_from if not file.is_relative_to(output)]
    with suppress(DataError, OSError):  # reported when the data is read
        for source in (case.inputs.calibration, case.inputs.evaluation):
            files += [] if source is None else all_files(source)
    written = list[tuple[str, int, int]]()
    for file in files:
        with suppress(OSError):
            if file is not None and file.is_file():
                found = file.stat()
                written.append((str(file), found.st_mtime_ns, found.st_size))
    metrics = frozenset((name, _identity(metric)) for name, metric in case.metrics.items())
    rules = case.patterns, case.regions, case.quantize, case.tune
    asked = repr((case.backend, case.inputs, *rules, case.checks))
    return str(case.spec), case.name, str(case.model), tuple(written), metrics, asked


def _identity(value: Any, within: tuple[object, ...] = ()) -> object:
    """Equal for functions of the same code and values, as a fixture makes them for each test.

    Values are compared if they are builtin ones, or arrays of up to 16 MiB: each check would be searched for anew if
    its metric held another copy of the same list.
    """
    for depth, outer in enumerate(within):
        if value is outer:  # a function that calls itself
            return depth
    held: Iterable[object] | None = None
    if isinstance(value, partial):
        held = value.func, value.args, value.keywords
    elif isinstance(value, FunctionType | MethodType):
        held = [getattr(value, name, None) for name in ("__self__", "__defaults__", "__kwdefaults__")]
        held += [value.__code__, *(cell.cell_contents for cell in value.__closure__ or ())]
    elif isinstance(value, dict):
        held = chain.from_iterable(value.items())
    elif isinstance(value, list | tuple):
        held = value
    if held is not None:
        return type(value), *(_identity(one, (*within, value)) for one in held)
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= 1 << 24 and not value.dtype.hasobject:
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, str | bytes | int | float | complex | set | frozenset | CodeType):
        return type(value), repr(value) if isinstance(value, float | complex | set) else value
    return id(value)
