"""`CaseWork`: runs the search of one case once, collects the evidence that its checks need, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from qdqspec._core.locks import RunLock
from qdqspec._core.registry import resolve
from qdqspec._core.store import Store
from qdqspec._core.units import seconds_text
from qdqspec.app.evidence.baselines import Renewal
from qdqspec.app.evidence.builds import build_for, file_sizes, lint_and_load, quantized_work
from qdqspec.app.evidence.parity import BothModels, compare_models, culprits_of
from qdqspec.app.evidence.probes import find_input, replay_failure
from qdqspec.app.evidence.regression import damaged_baselines, gate_of
from qdqspec.app.evidence.timing import latency_warnings
from qdqspec.app.preparation.files import profiles_of
from qdqspec.app.preparation.prepare import Prepared, output_of, prepare
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.app.preparation.stored import SCHEME, FinishedSearch
from qdqspec.app.session.pipeline import find_winner, measure_winner
from qdqspec.checks import Check, needs_of, number_notes, requested, requests_of, slice_notes, timed_out
from qdqspec.errors import QdqspecError, StateError
from qdqspec.graph import load_model, require_path
from qdqspec.graph.regions import find_regions, fold_graph
from qdqspec.qdq import SchemeFile, check_survival
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    CulpritEvidence,
    Evidence,
    EvidenceKind,
    GraphPart,
    LatencyEvidence,
    LintTarget,
    ParityEvidence,
    QuantizedWork,
    RegressionEvidence,
    SearchResult,
    Verdict,
)
from qdqspec.types.requests import (
    BuildRequest,
    FigureRequest,
    InputRequest,
    LintRequest,
    ParityRequest,
    ScoreRequest,
    SurvivalRequest,
)


class CaseWork:
    """The evidence of one case in one session, and the verdicts on it. Each part is computed once, on first access.

    ``found`` is the finished search, or ``None`` before `find`, and ``measured`` the last latency: of a search, a
    recheck, or `latency`. ``raised`` are the checks whose result is an error, ``renewals`` the baseline entries
    measured in this session and not yet written.
    """

    def __init__(self, case: Case, resources: Resources, store: Store, load: Callable[[Case], Case]) -> None:
        self.case, self.resources, self.store = case, resources, store
        self._load = load  # the data of the case's loaders
        self.found: FinishedSearch | None = None
        self.measured: LatencyEvidence | None = None
        self.results: dict[str, CheckResult] = {}
        self.raised: set[str] = set()
        self.renewals: tuple[Renewal, ...] = ()
        self._culprits: CulpritEvidence | None = None
        self._whole: dict[str, Any] = {}  # fields of the evidence that kinds of checks need
        self._requested: dict[str, dict[str, Any]] = {}  # fields that checks request with parameters, by key
        self._failure: QdqspecError | None = None

    @cached_property
    def prepared(self) -> Prepared:
        """The case with its model, loaded on first access."""
        return prepare(self._load(self.case), self.resources)

    @cached_property
    def as_given(self) -> Prepared:
        """The case with its model unchanged, even if the model is quantized."""
        return prepare(self._load(self.case), self.resources, as_given=True)

    # ---- winner -----------------------------------------------------------------------------------------

    def find(self) -> FinishedSearch:
        """The finished search: from the cache if its winner passes the recheck, else run now; once in a session.

        A failure is not retried in this session: every check of the case raises the same error.
        """
        if self._failure is not None:
            raise self._failure
        if self.found is None:
            try:
                prepared = self.prepared
                with RunLock(prepared.output, prepared.resources.report_wait):
                    self.found, self.measured = find_winner(prepared, self.store, self.validate)
            except StateError:
                raise  # another run in the folder may have ended by the next attempt
            except QdqspecError as error:
                self._failure = error
                raise
        return self.found

    @property
    def search(self) -> SearchResult:
        """The search's result."""
        return self.find().result

    @cached_property
    def tuned_path(self) -> Path:
        """The file of the selected model: the tuned model, or the user's own if unchanged."""
        return self.find().model or require_path(self.prepared.given)

    @cached_property
    def scheme(self) -> SchemeFile:
        """The Q/DQ pairs of the selected model with their numbers, and the factors of its channels."""
        return SchemeFile.read(self.find().folder / SCHEME)

    # ---- evidence ---------------------------------------------------------------------------------------

    @property
    def unsearched(self) -> Evidence:
        """The evidence of a case without a search, ended by an error or the time limit."""
        try:
            sha256, nodes = self.prepared.given.sha256, self.prepared.node_digests
        except QdqspecError:  # the error of the check states it
            sha256 = nodes = ""
        resources = self.resources
        return Evidence(
            case=self.case,
            backend=resources.backend.name,
            target=resources.backend.target,
            device=resources.device,
            model_sha256=sha256,
            model_nodes=nodes,
            output=None if resources.settings.mode == "plan" else output_of(self.case, resources),
            warnings=self.warnings,
        )

    def evidence(self, needs: frozenset[EvidenceKind]) -> Evidence:
        """The evidence of a finished search so far; the kinds that ``needs`` has are measured."""
        search = self.search
        if "latency" in needs and "latency" not in self._whole:  # first, nearest to the search
            self._whole["latency"] = self.latency
        if "regression" in needs and "regression" not in self._whole:
            self._whole["regression"] = self._compare_baseline()
        if "parity" in needs:
            self._whole["parity"] = self.parity
        if "size" in needs:
            self._whole["size_bytes"] = file_sizes(self.prepared.given, self.tuned_path)
        asked: dict[str, Any] = {field: dict(known) for field, known in self._requested.items()}
        known, folder = self.unsearched, self.find().folder
        # the files of --qdq-scheme are in a folder below the winner's
        output = folder if folder.parent == known.output else known.output
        return replace(
            known,
            output=output,
            search=search,
            pairs=self.scheme.pairs,
            culprits=self._culprits,
            profiles=self.prepared.options.profiles,
            node_ops=self._node_ops,
            quantized=self._quantized,
            **self._whole,
            **asked,
            warnings=self.warnings,
        )

    @property
    def record(self) -> CaseRecord:
        """The record of the case with all its evidence; nothing is searched, or measured after a check raised."""
        evidence = self.unsearched
        if self.found is not None:
            try:  # latency and parity are of every case, whatever its checks
                evidence = replace(self.evidence(frozenset({"latency", "parity"})), graph=self._graph)
            except QdqspecError:
                if not self.raised:
                    raise
                evidence = self.evidence(frozenset())
        return CaseRecord(evidence=evidence, results=tuple(self.results.values()))

    def judge(self, check: CheckSpec) -> Verdict:
        """The verdict of a check; inconclusive if the time limit of the run left it undecided."""
        kind = cast("Check", resolve("check", check.kind))
        limit = seconds_text(self.resources.settings.time_limit or 0.0)
        if self.resources.seconds_left() == 0 and self.found is None:
            return timed_out(limit)
        self.require(check)  # prepare and probe: its data, labels and metric can be used
        winner = self.find()  # search and confirm, or a cached winner that passes its recheck
        self.gather(check)  # winner against reference
        verdict = kind.judge(check.params, self.evidence(needs_of(check) | {"parity"}))
        if verdict.outcome == "fail" and winner.is_cut_short:
            return timed_out(limit, verdict)
        return verdict

    def add(self, check: CheckSpec, verdict: Verdict) -> None:
        """Record the verdict of a check."""
        self.results[check.id] = CheckResult(
            id=check.id, kind=check.kind, severity=check.severity, verdict=verdict
        )

    @property
    def latency(self) -> LatencyEvidence | None:
        """Reference and tuned model timed against each other: by the search or the recheck, else now.

        ``None`` in mode ``verify``, and for a search for coverage, unless mode ``measure`` times it on a backend with a
        clock.
        """
        mode, kept = self.resources.settings.mode, self.find()
        may_time = mode == "measure" and self.prepared.capabilities.has_clock
        if mode == "verify" or (kept.result.coverage is not None and not may_time):
            return None
        if self.measured is None:
            self.measured = measure_winner(self.prepared, kept)
        return self.measured

    @cached_property
    def parity(self) -> ParityEvidence:
        """Outputs of the tuned model compared with the reference's, on evaluation data if available.

        The errors of quantization and of the runtime are measured separately if a check requests parity, and if there
        are no checks.
        """
        requests = requested(self.case.checks, ParityRequest)
        divided = not self.case.checks or bool(requests)
        parity = compare_models(self.prepared, self.tuned_path, divided=divided)
        is_limited = any(request.limits_slices for request in requests)
        for note in (*number_notes(parity.outputs), *(() if is_limited else slice_notes(parity.outputs))):
            self.prepared.note_once(note)
        return parity

    def parity_with(self, tuned: Path) -> ParityEvidence:
        """The outputs of another model with the same inputs, compared with the outputs of the given model.

        A quantized model that no spec names is itself the reference, not its float form.
        """
        return compare_models(self.prepared if self.case.spec is not None else self.as_given, tuned)

    def gather(self, check: CheckSpec) -> None:
        """Collect the evidence that a check requests with parameters, once; raises if it cannot be computed."""
        prepared, tuned = self.prepared, self.tuned_path
        for request in requests_of(check):
            match request:
                case ScoreRequest():
                    score = partial(prepared.scores.evidence, tuned, request.metric, request.output)
                    self._collect("accuracy", request.key, score)
                case FigureRequest():
                    self._collect("figures", request.key, partial(self._figures, request))
                case SurvivalRequest(optimizer=name):
                    self._collect("survival", name, lambda: check_survival(tuned, [name])[0])
                case BuildRequest():
                    self._collect("builds", request.key, partial(build_for, prepared, tuned, request))
                case LintRequest():
                    self._lint(request.target)
                case ParityRequest() | InputRequest():
                    self._explain_parity(request, check.id)

    def _explain_parity(
        self, request: ParityRequest | InputRequest, check: str, *, culprit_seconds: float = 30.0
    ) -> None:
        """What a parity check tells beyond the figures: culpable pairs, a command that repeats it, the worst input.

        The pairs that cost most are found if quantization contributes to a failure: they may take ``culprit_seconds``,
        less finds fewer pairs of a slow model. An input is searched for only if the data breaks no limit.
        """
        models, outputs, limits = (self.prepared, self.tuned_path), self.parity.outputs, request.limits
        is_broken = limits is not None and bool(limits.broken_by(outputs))
        if isinstance(request, InputRequest):
            if not is_broken:
                self._collect("parity_search", request.key, partial(find_input, *models, request, check))
            return
        output = request.culpable(self.parity)
        if output is not None and self._culprits is None:
            self._culprits = self.find_culprits(output, seconds=culprit_seconds)
        # the worst input is kept if the data breaks a limit that Polygraphy knows
        if is_broken and limits and not self.search.unchanged and limits.polygraphy_words(outputs):
            self._collect("replays", request.key, partial(replay_failure, *models, limits, check))

    def _collect(self, field: str, key: str, measure: Callable[[], Any]) -> None:
        """Measure an entry of a field of the evidence, unless it is known."""
        if key not in self._requested.get(field, {}):
            self._requested.setdefault(field, {})[key] = measure()

    def find_culprits(self, output: str | None = None, **limits: Any) -> CulpritEvidence:
        """The pairs of the selected model that cost most accuracy, at an output; see `culprits_of`."""
        return culprits_of(self.prepared, self.scheme, output, **limits)

    def _figures(self, request: FigureRequest) -> Mapping[str, float]:
        measured = request.measure(BothModels(prepared=self.prepared, tuned=self.tuned_path))
        return {name: float(value) for name, value in measured.items()}

    def _lint(self, target: LintTarget) -> None:
        """Lint findings on the tuned model for a target; its runtime loads the model if one of the checks asks so."""
        asked = any(one.load for one in requested(self.case.checks, LintRequest) if one.target == target)
        if target not in self._requested.get("lint", {}):
            options, feed = self.prepared.options, self.prepared.loads[0].feeds
            found = lint_and_load(
                load_model(self.tuned_path), target, options=options, feed=feed, loads=asked
            )
            self._collect("lint", target, lambda: found.findings)
            self._collect("lint_loads", target, lambda: found.note)

    def validate(self) -> None:
        """Raise before a search if evaluation data cannot be used, or if no check can be judged."""
        errors: list[QdqspecError] = []
        for check in self.case.checks:
            try:
                self.require(check)
            except QdqspecError as error:  # `judge` raises it for this check
                errors.append(error)
        if errors and len(errors) == len(self.case.checks):
            raise errors[0]
        evaluation = self.prepared.data.evaluation
        # computing the reference's metric has read all of it
        if evaluation is not None and (errors or not requested(self.case.checks, ScoreRequest)):
            for _ in evaluation:
                pass

    def require(self, check: CheckSpec) -> None:
        """Raise before a search if a check can never be judged."""
        for request in requested([check], ScoreRequest):
            self.prepared.scores.require(request.metric, line=check.line)
            self.prepared.scores.of_reference(request.metric, request.output)

    def _compare_baseline(self) -> Mapping[str, RegressionEvidence]:
        """The comparison with the committed baseline; without timing, only whether the baseline is damaged."""
        damaged = damaged_baselines(self.case, self.resources.settings, self.resources.device)
        latency = None if damaged else self.latency
        if latency is None:
            return damaged
        measure = partial(measure_winner, self.prepared, self.find())
        gate = gate_of(self.case, self.prepared, self.search.winner.digest, latency, measure)
        evidence, self.renewals = gate.evidence, tuple(gate.renewals)
        return evidence

    @cached_property
    def _quantized(self) -> QuantizedWork | None:
        """The nodes of the selected model that do quantized work; ``None`` if it is unchanged."""
        if self.search.unchanged:
            return None
        layers = profiles_of(self.search.trials, self.search.winner).get("tuned", ())
        return quantized_work(self.scheme.pairs, self._node_ops, layers)

    @property
    def _node_ops(self) -> Mapping[str, str]:
        return {node.name: node.op_type for node in self.prepared.given.nodes}

    @cached_property
    def _graph(self) -> tuple[GraphPart, ...]:
        """The model in a few parts with their times and errors, for reports."""
        prepared, search = self.prepared, self.search
        follows_kernels = self.case.regions.by == "fusion"  # these may need a build
        layers = profiles_of(search.trials, search.winner)
        return fold_graph(
            prepared.folded,
            find_regions(prepared.folded) if follows_kernels else prepared.regions,
            reference=layers["reference"],
            tuned=() if search.unchanged else layers.get("tuned", ()),
            pairs=self.scheme.pairs,
            errors=search.errors,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this case so far."""
        known = (vars(self)[name] for name in ("prepared", "as_given") if name in vars(self))
        noted = (warning for prepared in known for warning in prepared.warnings)
        return (*dict.fromkeys(noted), *self._own_warnings(), *self.store.warnings)

    def _own_warnings(self) -> Iterator[str]:
        """Warnings of the measurement, of a model below its limit and of quantized outputs."""
        if self.measured is not None:
            yield from latency_warnings(self.measured)
        parity: ParityEvidence | None = vars(self).get("parity")
        least = self.case.tune.limits.min_sqnr_db
        if parity is not None and least is not None and parity.sqnr_db < least:
            # its scheme was requested, or data or runtime changed since
            found = f"on all {parity.data} data the tuned model has {parity.sqnr_db:.1f} dB"
            yield f"{found}, below the limit of {least:g} dB (tune.min_sqnr_db)"
        if self.case.quantize.outputs == "auto" and self.found is not None:
            sites = (pair.site for pair in self.scheme.pairs)
            names = sorted(site.tensor for site in sites if any(end.is_output for end in site.consumers))
            if names:
                yield (
                    f"quantized graph outputs: {', '.join(names)}, so that the operators that make them run in "
                    "integers; their values are rounded; `quantize: {outputs: false}` keeps outputs in floating point"
                )
