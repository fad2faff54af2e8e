"""The regression gate: compares a case with its committed baseline, and renews the baseline.

A measurement that does not pass is repeated once with twice the builds and rounds, and the second alone decides.
Baselines are recorded with the same precision, because every later run is compared with them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from qdqspec import __version__
from qdqspec._core.config import Settings
from qdqspec.app.evidence.baselines import (
    Conditions,
    Entry,
    Name,
    Renewal,
    RoleTimes,
    baseline_file,
    figures_elsewhere,
    read_baseline,
    rules_of,
)
from qdqspec.app.evidence.timing import Measure
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.checks import judge_change, requested
from qdqspec.errors import StateError
from qdqspec.timing import (
    CONFIRM_BUILDS,
    CONFIRM_ROUNDS,
    BuildTimes,
    builds_of,
)
from qdqspec.types import Case, Clock, DeviceKey, LatencyEvidence, RegressionEvidence, Samples, TimeChange
from qdqspec.types.requests import BaselineRequest

CLOSE_BUILDS, CLOSE_ROUNDS = 6, 48


@dataclass
class Gate:
    """Compares a case with its baseline, or renews it, by the ``first`` measurement and more by ``measure``.

    ``evidence`` is that of all baseline requests of the case by entry, without a verdict. ``renewals`` are the entries
    to write when the run ends.
    """

    case: Case
    settings: Settings
    device: DeviceKey
    conditions: Conditions
    first: LatencyEvidence
    measure: Measure
    note: Callable[[str], None]
    evidence: dict[str, RegressionEvidence] = field(default_factory=dict, init=False)
    renewals: list[Renewal] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        allowances: dict[str, list[float]] = {}
        for request in requested(self.case.checks, BaselineRequest):
            allowances.setdefault(request.key, []).append(request.allowed)
        self.evidence = {name: self._evidence_of(name, min(allowed)) for name, allowed in allowances.items()}

    def _evidence_of(self, name: str, allowed: float) -> RegressionEvidence:
        settings, update, file = self.settings, self.settings.update, baseline_file(self.case, self.device)
        if file is None or (settings.baseline == "off" and update is None):
            return RegressionEvidence(state="off", reason="" if file else "a case without a spec has none")
        known, reason = self._known(file, (self.case.id, name))
        blank = RegressionEvidence(
            state="missing",
            file=_shown(self.case, file),
            command=self._command(name, "changed"),
            baseline=known.ratio if known else None,
            elsewhere=figures_elsewhere(file, (self.case.id, name)),
        )
        if known is None or reason:
            if update is None or (update == "new" and reason):
                return replace(
                    blank,
                    state="unlike" if reason else "missing",
                    command=self._command(name, "changed" if reason else "new"),
                    reason=reason,
                    required=settings.baseline == "require",
                    ratio=BuildTimes.of(self.first).interval if known else None,
                )
        elif update != "all":
            first = self.first
            if first.builds < CONFIRM_BUILDS and not BuildTimes.of(first).alone:
                first = self.measure(CONFIRM_BUILDS, CONFIRM_ROUNDS)
            looks, latency, change = 1, first, change_from(known, first)
            if judge_change(change, allowed) in ("fail", "inconclusive"):
                # the more precise measurement alone decides
                looks, latency, change = 2, self._close, change_from(known, self._close)
            judged = judge_change(change, allowed)
            if update != "changed" or judged == "pass":
                if judged == "stale":
                    self.note(
                        f"the baseline of {self.case.id}::{name} is stale, the model became faster: {blank.command}"
                    )
                return replace(
                    blank,
                    state="compared",
                    ratio=BuildTimes.of(latency).interval,
                    change=change,
                    looks=looks,
                    builds=latency.builds,
                    recorded=known.recorded,
                    notes=known.differences(self.conditions),
                    history=known.figures(self.device.key),
                )
        # the entry is written when the run ends; several processes may have entries for one file
        entry = entry_from(self._close, self.conditions)
        if known is not None:
            entry = entry.after(known)
        renewal = Renewal(
            file=file,
            device=self.device.key,
            name=(self.case.id, name),
            old=known.ratio.median if known else None,
            entry=entry,
            nodes=self.conditions.nodes,
        )
        self.renewals.append(renewal)
        return replace(
            blank,
            state="written",
            ratio=entry.ratio,
            builds=self._close.builds,
            recorded=known.recorded if known else "",
            notes=entry.changed,
            history=entry.figures(self.device.key),
        )

    def _known(self, file: Path, name: Name) -> tuple[Entry | None, str]:
        """The entry of a name, and why it cannot be compared with."""
        try:
            baseline = read_baseline(file)
        except StateError as error:  # reported by `damaged_baselines`, unless the file is rewritten
            return None, error.what
        if baseline is not None and baseline.device != self.device.key:
            return None, f"the file is of device {baseline.device}"
        entry = None if baseline is None else baseline.entry(name)
        return entry, "" if entry is None else entry.why_incomparable(self.conditions)

    @cached_property
    def _close(self) -> LatencyEvidence:
        """The more precise measurement, taken once; not needed if the reference itself is selected."""
        alone = BuildTimes.of(self.first).alone
        return self.first if alone else self.measure(CLOSE_BUILDS, CLOSE_ROUNDS)

    def _command(self, name: str, update: str) -> str:
        """The command that writes the entry, with the options that choose the device."""
        file = os.path.relpath(self.case.spec) if self.case.spec is not None else ""
        asking = (
            check
            for check in self.case.checks
            if any(request.key == name for request in requested([check], BaselineRequest))
        )
        words = ["pytest", f"{file}::{self.case.id}::{next(asking).id}", *self.settings.device_words]
        in_ci = ["--qdq-update-in-ci"] if self.settings.in_ci else []
        return shlex.join([*words, f"--qdq-update={update}", *in_ci])


def damaged_baselines(case: Case, settings: Settings, device: DeviceKey) -> dict[str, RegressionEvidence]:
    """The case's entries if its baseline file is damaged: a failure in every mode, until the file is renewed."""
    file = baseline_file(case, device)
    if file is None or settings.update in ("changed", "all") or settings.baseline == "off":
        return {}
    try:
        read_baseline(file)
    except StateError as error:
        found = RegressionEvidence(
            state="damaged",
            file=_shown(case, file),
            command=error.cure or "",
            reason=error.what,
            required=True,
        )
        return {request.key: found for request in requested(case.checks, BaselineRequest)}
    return {}


def gate_of(case: Case, prepared: Prepared, scheme: str, latency: LatencyEvidence, measure: Measure) -> Gate:
    """The gate of a case whose selected model has this scheme and latency. Times the model if necessary."""
    # those of data too, which the spec does not state
    timed = [{name: list(array.shape) for name, array in load.feeds.items()} for load in prepared.loads]
    conditions = Conditions(
        clock=latency.clock,
        model_sha256=prepared.given.sha256,
        nodes=prepared.node_digests,
        rules={**rules_of(case), "inputs.timed": timed},
        scheme=scheme,
        environment={"qdqspec": __version__, **prepared.resources.device.details},
        recorded=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    settings, device, note = prepared.settings, prepared.resources.device, prepared.note_once
    return Gate(case, settings, device, conditions, latency, measure, note)


def change_from(known: Entry, latency: LatencyEvidence) -> TimeChange:
    """The change of a measurement from a baseline entry."""
    tuned, reference = (known.samples[role] for role in ("tuned", "reference"))
    before = BuildTimes(tuned=tuned.between(known.clock), reference=reference.between(known.clock))
    return BuildTimes.of(latency).change_from(before)


def entry_from(latency: LatencyEvidence, conditions: Conditions) -> Entry:
    """A measurement as a baseline entry."""
    return Entry(
        **dict(conditions),
        ratio=BuildTimes.of(latency).interval,
        samples={role: _times(latency.samples[role], latency.builds) for role in ("tuned", "reference")},
    )


def _shown(case: Case, file: Path) -> str:
    return file.relative_to(case.spec.parent).as_posix() if case.spec is not None else file.name


def _times(samples: Samples, builds: int) -> RoleTimes:
    """Times rounded to the nanosecond; further digits are noise and enlarge the diff."""

    def rounded(clock: Clock) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(round(ms, 6) for ms in build) for build in builds_of(samples.on(clock), builds))

    return RoleTimes(
        wall_ms=rounded("wall"),
        cpu_ms=rounded("cpu") if samples.cpu_ms else (),
        first=_times(samples.first, builds) if samples.first else None,
    )
