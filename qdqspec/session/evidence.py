"""The work of one case: all evidence about it, each part computed once."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path

from qdqspec.baseline.store import Renewal
from qdqspec.checks.parity import culpable_output
from qdqspec.errors import QdqspecError
from qdqspec.graph.model import Model, load_model, require_path
from qdqspec.lint import lint_model
from qdqspec.measurement.race import MIXED_LAUNCHES
from qdqspec.measurement.store import Store
from qdqspec.parity.scores import accuracy_evidence
from qdqspec.placement.survival import check_survival
from qdqspec.session.case import CaseSetup
from qdqspec.session.culprits import culprits_of
from qdqspec.session.gate import Gate, Gatekeeper, conditions_of, damaged_baselines
from qdqspec.session.parity import compare_models
from qdqspec.session.pipeline import Finder
from qdqspec.session.probes import search_parity
from qdqspec.session.resources import Resources
from qdqspec.types import (
    AccuracyEvidence,
    Case,
    CaseRecord,
    CheckSpec,
    CulpritEvidence,
    DeviceKey,
    Evidence,
    Finding,
    LatencyEvidence,
    LintTarget,
    Optimizer,
    ParityEvidence,
    ParitySearch,
    SearchResult,
    SurvivalEvidence,
)

_COMPARED = ("reference", "tuned")
DRIFT = 0.05  # relative change of speed from which it is reported
CULPRIT_SECONDS = 30.0  # time limit of error attribution after a failed check


class CaseWork:
    """The evidence of one case in one session. Each attribute is computed once, on first access."""

    def __init__(self, case: Case, resources: Resources, store: Store, device: DeviceKey) -> None:
        self.setup = CaseSetup(case, resources, device)
        self.finder = Finder(self.setup, store, self.validate)
        self.store = store
        self.culprits: CulpritEvidence | None = None
        self._parity: ParityEvidence | None = None
        self._gate: Gate | None = None
        self.parity_search: dict[str, ParitySearch] = {}

    @property
    def search(self) -> SearchResult:
        """The search's result."""
        return self.finder.kept.result

    @property
    def unsearched(self) -> Evidence:
        """The evidence of a case without a search, ended by an error or the time limit."""
        setup = self.setup
        try:
            sha256 = setup.given.sha256
        except QdqspecError:  # the error of the check states it
            sha256 = ""
        return Evidence(
            case=setup.case,
            backend=setup.backend.name,
            target=setup.target,
            device=setup.device,
            model_sha256=sha256,
            regression={} if self._gate is None else self._gate.evidence,
            output=None if setup.settings.mode == "plan" else setup.output,
            warnings=self.warnings,
        )

    @property
    def latency(self) -> LatencyEvidence | None:
        """Reference and tuned model timed against each other; ``None`` for a run without timing."""
        if self.setup.settings.mode == "verify":
            return None
        kept = self.finder.kept
        if self.finder.latency is None:
            self.finder.latency = self.finder.measured(kept)
        return self.finder.latency

    @property
    def parity(self) -> ParityEvidence:
        """Outputs of the tuned model compared with the reference's, on evaluation data if available.

        The errors of quantization and of the runtime are measured separately if a parity check may need it, and if
        there are no checks.
        """
        if self._parity is None:
            checks = self.setup.case.checks
            divided = not checks or any(check.kind == "parity" for check in checks)
            self._parity = compare_models(self.setup, self.finder.tuned_path, divided=divided)
        return self._parity

    def parity_with(self, tuned: Path) -> ParityEvidence:
        """Outputs of another model that takes the same inputs, compared with those of the given model."""
        return compare_models(self.setup, tuned)

    def look_into(self, check: CheckSpec) -> None:
        """Gather the evidence specific to a check, once; raises if its metric fails on the tuned model.

        If quantization contributes to a parity failure, that is the pairs that cost most; if the data breaks no limit
        and the check requests a search, it is an input that does. Both are stored with the case.
        """
        if check.kind == "accuracy":
            own = check.params
            self.setup.prepared.scores.of_file(self.finder.tuned_path, own.metric, own.output)
        if check.kind != "parity":
            return
        params, outputs = check.params, self.parity.outputs
        output = culpable_output(params, self.parity)
        if output is not None and self.culprits is None:
            self.culprits = culprits_of(self.setup, self.finder.pairs, output, seconds=CULPRIT_SECONDS)
        unsearched = params.search is not None and params.evidence_key not in self.parity_search
        if unsearched and not params.broken_by(outputs, whole=True):
            found = search_parity(self.setup, self.finder.tuned_path, params, check.id)
            self.parity_search[params.evidence_key] = found

    def validate(self) -> None:
        """Raise before a search if evaluation data, labels or a metric of a check cannot be used."""
        checks = [check for check in self.setup.case.checks if check.kind == "accuracy"]
        for check in checks:
            self.require(check)
        evaluation = self.setup.prepared.evaluation
        if evaluation is not None and not checks:  # computing the reference's metric has read all of it
            for _ in evaluation:
                pass

    def require(self, check: CheckSpec) -> None:
        """Raise before a search if a check can never be judged."""
        if check.kind == "accuracy":
            scores, params = self.setup.prepared.scores, check.params
            scores.require(params.metric, line=check.line)
            scores.of_reference(params.metric, params.output)

    @cached_property
    def accuracy(self) -> dict[str, AccuracyEvidence]:
        """The task metrics of the case's checks, for reference and tuned model.

        A metric that raises is omitted; `require` and `look_into` raise its error for the check.
        """
        scores, found = self.setup.prepared.scores, {}
        for check in self.setup.case.checks:
            if check.kind == "accuracy":
                metric, output = check.params.metric, check.params.output
                try:
                    reference = scores.of_reference(metric, output)
                    tuned = scores.of_file(self.finder.tuned_path, metric, output)
                except QdqspecError:
                    continue
                found[check.params.evidence_key] = accuracy_evidence(metric, reference, tuned)
        return found

    @cached_property
    def lint(self) -> dict[LintTarget, tuple[Finding, ...]]:
        """Lint findings on the tuned model, for the targets named by the case's checks."""
        asked = [check.params.target for check in self.setup.case.checks if check.kind == "lint"]
        targets = dict.fromkeys(target for targets in asked for target in targets)
        tuned = load_model(self.finder.tuned_path) if targets else self.setup.given
        return {target: lint_model(tuned, target) for target in targets}

    @cached_property
    def survival(self) -> dict[Optimizer, SurvivalEvidence]:
        """The pairs of the tuned model that survive each optimizer named by the case's checks."""
        asked = [check.params.through for check in self.setup.case.checks if check.kind == "survival"]
        names = dict.fromkeys(name for through in asked for name in through)
        return {found.optimizer: found for found in check_survival(self.finder.tuned_path, tuple(names))}

    @property
    def gate(self) -> Gate:
        """The comparison with the committed baseline; without timing, only whether the baseline is damaged."""
        if self._gate is None:
            self._gate = self._compared_with_baseline()
        return self._gate

    def _compared_with_baseline(self) -> Gate:
        damaged = damaged_baselines(self.setup.case, self.setup.settings, self.setup.device)
        if damaged:
            return Gate(evidence=damaged)
        latency = self.latency
        if latency is None:
            return Gate()
        now = conditions_of(
            self.setup.case, self.setup.device, self.setup.given.sha256, self.search.winner.digest, latency
        )
        measure, note = partial(self.finder.measured, self.finder.kept), self.setup.prepared.warnings.append
        return Gatekeeper(
            self.setup.case, self.setup.settings, self.setup.device, now, latency, measure, note
        ).gate()

    @property
    def renewals(self) -> tuple[Renewal, ...]:
        """Baseline entries measured in this session and not yet written."""
        return () if self._gate is None else self._gate.renewals

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the model files, including external data."""
        return {
            "reference": _size(require_path(self.setup.given), self.setup.given),
            "tuned": _size(self.finder.tuned_path),
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this case so far."""
        return (
            *self.setup.warnings,
            *self._drift_warning(),
            *self._sample_warnings(),
            *self._limit_warning(),
            *self._output_warning(),
            *self.store.warnings,
        )

    def _output_warning(self) -> tuple[str, ...]:
        """Warn of graph outputs that hold rounded values, if the spec leaves that to the search."""
        if self.setup.case.quantize.outputs != "auto" or self.finder.found is None:
            return ()
        sites = (pair.site for pair in self.finder.pairs)
        names = sorted(site.tensor for site in sites if any(end.is_output for end in site.consumers))
        if not names:
            return ()
        said = f"graph output {', '.join(names)} is quantized, so that the operator that makes it runs in integers"
        return (
            f"{said}: its values are rounded; `quantize: {{outputs: false}}` keeps outputs in floating point",
        )

    def _drift_warning(self) -> tuple[str, ...]:
        measured = self.finder.latency
        if measured is None or abs(measured.drift) <= DRIFT:
            return ()
        changed = f"CPU speed changed by {measured.drift:+.0%} during measurement"
        return (f"{changed}: trust the ratio, not the milliseconds",)

    def _sample_warnings(self) -> tuple[str, ...]:
        """Notes of the runtime about the samples of the compared models, each once."""
        measured = self.finder.latency
        if measured is None:
            return ()
        roles: dict[str, list[str]] = {}
        samples = {role: measured.samples[role] for role in _COMPARED if role in measured.samples}
        for role, taken in samples.items():
            for note in taken.notes:
                roles.setdefault(note, []).append(role)
        if len({taken.launched_singly for taken in samples.values()}) > 1:
            roles[MIXED_LAUNCHES] = list(samples)
        return tuple(f"latency of {' and '.join(names)}: {note}" for note, names in roles.items())

    def _limit_warning(self) -> tuple[str, ...]:
        """Warn if the tuned model is below the limit: its scheme was requested, or data or runtime changed since."""
        parity, least = self._parity, self.setup.case.tune.limits.min_sqnr_db
        if parity is None or least is None or parity.sqnr_db >= least:
            return ()
        found = f"on all {parity.data} data the tuned model has {parity.sqnr_db:.1f} dB"
        return (f"{found}, below the limit of {least:g} dB (tune.min_sqnr_db)",)


def skipped_record(case: Case, backend: str, why: str) -> CaseRecord:
    """The record of a case that cannot run on this machine, which holds only the reason."""
    evidence = Evidence(
        case=case, backend=backend, target=backend, device=DeviceKey(key=""), model_sha256="", skipped=why
    )
    return CaseRecord(evidence=evidence)


def _size(path: Path, model: Model | None = None) -> int:
    data = path.with_name(path.name + ".data")
    named = model.external_files() if model is not None else (data,) if data.is_file() else ()
    return path.stat().st_size + sum(file.stat().st_size for file in named)
