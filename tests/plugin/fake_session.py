"""A session for tests of the plugin: the real interface, constant numbers, no model.

A conftest of the project uses it by overriding the fixture ``qdq_session``. Outcomes of checks are read from
``outcomes.json``: ``{"default::speedup": "fail"}``; all others pass. Every call is appended to ``calls.txt``.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from qdqspec.backends.base import Availability
from qdqspec.errors import ModelError
from qdqspec.testing.records import sample_parity, sample_search
from qdqspec.types import (
    CaseRecord,
    CheckResult,
    DeviceKey,
    Evidence,
    Interval,
    LatencyEvidence,
    Progress,
    RunRecord,
    Samples,
    Section,
    Verdict,
)

HERE = Path(__file__).parent
HEADLINES = {
    "pass": "speed-up 1.50",
    "fail": "speed-up 1.02 < 1.10 asked for",
    "warn": "speed-up 1.02 < 1.10 asked for",
    "inconclusive": "speed-up 1.08..1.13 straddles 1.10",
}


class FakeSession:
    backend_usable = True

    def __init__(self):
        self.watch = None
        self.backend = SimpleNamespace(target="onnxruntime-cpu")
        self.results = {}
        self.cases = {}
        self.skipped = {}

    def _call(self, *words):
        with (HERE / "calls.txt").open("a") as file:
            file.write(" ".join((str(os.getpid()), *map(str, words))) + "\n")

    def target(self, case):
        return self.backend.target

    def compare_runtimes(self):
        return ()

    def availability(self, case):
        if self.backend_usable:
            return Availability(usable=True)
        return Availability(usable=False, why="no runtime found", install="pip install runtime")

    def model(self, case):
        return SimpleNamespace(path=case.model)

    def regions(self, case):
        return ()

    def planned(self, case):
        return SimpleNamespace(text="12 candidates, about 3 min")

    def search(self, case):
        return self.evidence(case, ("search",)).search

    def evidence(self, case, needs):
        data = case.inputs.calibration
        self._call("evidence", case.id, ",".join(sorted(needs)), *((data, case.model.name) if data else ()))
        self.cases[case.name] = case
        self.results.setdefault(case.name, {})
        return self._evidence(case)

    def judge(self, case, check):
        self._call("judge", f"{case.id}::{check.id}", case.inputs.calibration or "-", case.model.name)
        if self.watch is not None:
            progress = Progress(
                case=case.name, phase="compose", done=3, total=12, best=0.5, kept=2, dropped=1
            )
            self.watch(progress)
        (HERE / "metrics.txt").write_text(",".join(case.metrics))
        file = HERE / "outcomes.json"
        outcomes = json.loads(file.read_text()) if file.exists() else {}
        outcome = outcomes.get(f"{case.id}::{check.id}", "pass")
        if outcome == "bug":
            raise ZeroDivisionError("a malfunction of ours")
        if outcome == "interrupt":
            raise KeyboardInterrupt
        if outcome == "no model":
            raise ModelError("there is no such model file", where=case.model.name, cure="check the path")
        verdict = self.verdict(check, outcome)
        result = CheckResult(id=check.id, kind=check.kind, severity=check.severity, verdict=verdict)
        self.cases[case.name] = case
        self.results.setdefault(case.name, {})[check.id] = result
        return result

    def verdict(self, check, outcome):
        verdict = Verdict(outcome="pass", headline=HEADLINES[outcome], numbers={"speedup": 1.5})
        if outcome == "pass":
            return verdict
        return replace(
            verdict,
            outcome="fail" if outcome == "warn" else outcome,
            sections=(Section(title="Latency", headers=("model", "median"), rows=(("tuned", "2.0 ms"),)),),
            advice="Give the search more trials.",
        )

    def _evidence(self, case):
        samples = {"reference": Samples(wall_ms=(3.0, 3.0)), "tuned": Samples(wall_ms=(2.0, 2.0))}
        speedup = Interval(median=1.5, low=1.4, high=1.6)
        return Evidence(
            case=case,
            backend="fake",
            target="fake-cpu",
            device=DeviceKey(key="simulated"),
            model_sha256="0" * 64,
            search=sample_search((), (1.0,)),
            latency=LatencyEvidence(clock="wall", samples=samples, ratios={}, builds=3, speedup=speedup),
            parity=sample_parity(("y", 31.5)),
        )

    def record(self):
        cases = tuple(
            CaseRecord(evidence=self._evidence(case), results=tuple(self.results[name].values()))
            for name, case in self.cases.items()
        )
        cases += tuple(self.skipped.values())
        return RunRecord(version="0.1.0", started="2026-01-01T00:00:00Z", seconds=1.0, cases=cases)

    def skip(self, case, why):
        evidence = Evidence(
            case=case, backend="fake", target="fake", device=DeviceKey(key=""), model_sha256="", skipped=why
        )
        self.skipped[case.name] = CaseRecord(evidence=evidence)

    def fail(self, case, check, error):
        """Record a check that could not be judged; the plugin raises the error."""

    def renewals(self):
        return ()

    def close(self):
        self._call("close")
