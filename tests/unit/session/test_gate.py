"""The gate of one case: second measurements, rejected baselines and written files. Times are random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import check_of, normal, written_case

from qdqspec._core.config import Settings
from qdqspec.app.evidence.baselines import Conditions, rules_of, update_baseline
from qdqspec.app.evidence.regression import (
    CLOSE_BUILDS,
    CLOSE_ROUNDS,
    Gate,
    gate_of,
)
from qdqspec.app.session import Session
from qdqspec.checks.kinds.regression import check as regression_check
from qdqspec.testing.records import faster_case
from qdqspec.timing.bench import CONFIRM_BUILDS, CONFIRM_ROUNDS
from qdqspec.types import Case, DeviceKey, Interval, LatencyEvidence, RegressionEvidence, Samples, Verdict

DEVICE = DeviceKey(key="sample-device", details={"onnxruntime": "1.31.1"})
COMMAND = "specs/net.qdq.yaml::default::regression"


class Machine:
    """Random times of a bench; ``ratios`` are those of the tuned model's first and second measurement."""

    def __init__(
        self, *ratios: float, seed: int = 0, alone: bool = False, first: float | None = None
    ) -> None:
        self.ratios, self.alone = ratios or (0.6,), alone
        self.first = first  # the ratio of a first run; ``None`` for no first runs
        self.asked: list[tuple[int, int]] = []
        self._random = np.random.default_rng(seed)

    def measure(self, builds: int, rounds: int) -> LatencyEvidence:
        self.asked.append((builds, rounds))
        ratio = self.ratios[-1 if builds == CLOSE_BUILDS else 0]
        reference = self._role(1.0, builds, rounds)
        tuned = reference if self.alone else self._role(ratio, builds, rounds)
        if self.first is not None:
            reference = replace(reference, first=self._role(1.0, builds, rounds))
            tuned = replace(tuned, first=self._role(self.first, builds, rounds))
        one = Interval(median=1, low=1, high=1)
        return LatencyEvidence(
            clock="cpu",
            samples={"reference": reference, "tuned": tuned},
            ratios={"reference": one, "tuned": one},
            speedup=one,
            builds=builds,
        )

    def _role(self, level: float, builds: int, rounds: int) -> Samples:
        own = np.repeat(np.exp(0.008 * self._random.standard_normal(builds)), rounds)
        times = level * own * np.exp(0.02 * self._random.standard_normal(builds * rounds))
        return Samples(wall_ms=tuple(1.1 * times), cpu_ms=tuple(times))


class Bench:
    """A project with one case whose gate can be run repeatedly."""

    def __init__(self, root: Path) -> None:
        self.root, self.notes = root, list[str]()
        spec, checks = root / "specs" / "net.qdq.yaml", (check_of("regression"),)
        self.case = Case(id="default", model=root / "net.onnx", spec=spec, checks=checks)
        self.file = root / "specs" / "__baselines__" / "net" / "sample-device.json"

    def gate(
        self, machine: Machine, first: tuple[int, int] = (CONFIRM_BUILDS, CONFIRM_ROUNDS), **settings: object
    ) -> Gate:
        latency = machine.measure(*first)
        machine.asked.clear()
        conditions = Conditions(
            clock="cpu",
            model_sha256="a" * 64,
            rules=rules_of(self.case),
            scheme="0123",
            environment=dict(DEVICE.details),
            recorded="2026-01-08T14:00:00+00:00",
        )
        own, measure = Settings(root=self.root, **settings), machine.measure
        return Gate(self.case, own, DEVICE, conditions, latency, measure, self.notes.append)

    def renew(self, machine: Machine, update: str = "all") -> Gate:
        gate = self.gate(machine, update=update)
        for renewal in gate.renewals:
            update_baseline(renewal.file, renewal.device, {renewal.name: renewal.entry})
        return gate

    def found(self, machine: Machine, **more: object) -> RegressionEvidence:
        (found,) = self.gate(machine, **more).evidence.values()
        return found

    def verdict(self, found: RegressionEvidence) -> Verdict:
        evidence = replace(faster_case().evidence, regression={"regression": found})
        return regression_check.judge(self.case.checks[0].params, evidence)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


def unsigned(text: str) -> str:
    """A baseline with the changes of a manual edit: without its digest."""
    return re.sub(r',\n\s*"sum": "\w+"', "", text)


def test_without_a_baseline_nothing_is_timed_and_the_command_that_writes_it_is_reported(bench: Bench) -> None:
    machine = Machine()
    found = bench.found(machine)
    assert machine.asked == []
    assert (found.state, found.required) == ("missing", False)
    assert bench.found(machine, baseline="require").required
    assert bench.found(machine, baseline="off").state == "off"
    assert found.command == f"pytest {COMMAND} --qdq-update=new"
    origins = {"threads": "--qdq-threads", "seed": "--qdq-seed"}
    words = {"threads": 4, "seed": 3, "backend_option": ("fake.integer=1.3",), "origins": origins}
    device = "--qdq-threads=4 --qdq-backend-option=fake.integer=1.3"
    assert bench.found(machine, **words).command == f"pytest {COMMAND} {device} --qdq-update=new"
    in_ci = bench.found(machine, in_ci=True).command
    assert in_ci == f"pytest {COMMAND} --qdq-update=new --qdq-update-in-ci"


def test_a_ratio_at_another_shape_of_the_data_is_not_compared(tmp_path: Path) -> None:
    """The spec states no shape: the model is timed at that of its data."""
    text, reasons = "net (float[1,n] x) => (float[1,n] y) { y = Relu(x) }", []
    for length in (8, 8, 128):
        case = written_case(tmp_path, text, {"x": normal(4, length)})
        case = replace(case, spec=tmp_path / "net.qdq.yaml", checks=(check_of("regression"),))
        machine = Machine()
        with Session(root=tmp_path, backend="fake", update=None if reasons else "new") as session:
            prepared = session.work(case).prepared
            gate = gate_of(
                case, prepared, "0123", machine.measure(CONFIRM_BUILDS, CONFIRM_ROUNDS), machine.measure
            )
        for new in gate.renewals:
            update_baseline(new.file, new.device, {new.name: new.entry})
        reasons.append(gate.evidence["regression"].reason)
    assert reasons[:2] == ["", ""]
    assert reasons[2].startswith("inputs.timed was {'x': [1, 8]}, is {'x': [1, 128]}")


def test_a_slowdown_in_the_first_measurement_only_passes(bench: Bench) -> None:
    """Only the second measurement is judged, for example after a disturbance during the first."""
    bench.renew(Machine(seed=1))
    found = bench.found(Machine(0.72, 0.6, seed=2))
    assert found.looks == 2
    assert bench.verdict(found).outcome == "pass"


def test_an_unchanged_model_is_not_timed_and_fails_if_the_baseline_has_a_gain(bench: Bench) -> None:
    bench.renew(Machine(alone=True))
    machine = Machine(alone=True, seed=3)
    found = bench.found(machine, first=(2, 12))
    assert machine.asked == []
    assert found.change.builds == Interval(median=1, low=1, high=1)
    bench.renew(Machine(seed=1))
    assert bench.verdict(bench.found(Machine(alone=True, seed=2))).outcome == "fail"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: unsigned(text).replace("a" * 64, "b" * 64), "model was bbbbbbbbbbbb"),
        (lambda text: unsigned(text).replace('"int8"', '"fp8"'), "quantize.format was fp8, is int8"),
        (lambda text: unsigned(text).replace("sample-device", "other-device"), "of device other-device"),
        (lambda text: text.replace('"median": 0.', '"median": 1.'), "regression was changed since"),
        (lambda text: text[:200], "not a baseline"),
    ],
)
def test_baselines_of_other_conditions_are_rejected_with_the_command_to_renew_them(
    bench: Bench, spoil: Callable[[str], str], reason: str
) -> None:
    bench.renew(Machine())
    bench.file.write_text(spoil(bench.file.read_text()))
    machine = Machine()
    found = bench.found(machine)
    assert machine.asked == []
    assert found.state == "unlike"
    assert reason in found.reason
    assert found.command == f"pytest {COMMAND} --qdq-update=changed"
    assert bench.found(machine, update="new").state == "unlike"
    assert bench.renew(machine, "changed").renewals
    assert bench.found(machine).state == "compared"


TWICE = [(CLOSE_BUILDS, CLOSE_ROUNDS)]


@pytest.mark.parametrize(
    ("update", "ratio", "outcome", "asked"),
    [
        (None, 0.6, "pass", []),
        (None, 0.5, "pass", []),
        (None, 0.66, "fail", TWICE),
        ("new", 0.6, "pass", []),
        ("new", 0.72, "fail", TWICE),
        ("changed", 0.6, "pass", []),
        ("changed", 0.72, "written", TWICE),
        ("changed", 0.5, "written", TWICE),
        ("all", 0.6, "written", TWICE),
    ],
)
def test_a_model_that_does_not_pass_is_measured_again_and_each_update_mode_renews_baselines(
    bench: Bench, update: str | None, ratio: float, outcome: str, asked: list[tuple[int, int]]
) -> None:
    bench.renew(Machine(seed=1))
    machine = Machine(ratio, seed=2)
    gate = bench.gate(machine, update=update)
    assert machine.asked == asked
    assert bool(gate.renewals) is (outcome == "written")
    for renewal in gate.renewals:
        assert [len(each) for each in renewal.entry.samples["tuned"].cpu_ms] == [CLOSE_ROUNDS] * CLOSE_BUILDS
        assert renewal.old == pytest.approx(0.6, rel=0.03)
        assert renewal.entry.ratio.median == pytest.approx(ratio, rel=0.03)
    if outcome != "written":
        (found,) = gate.evidence.values()
        assert (found.state, found.looks) == ("compared", 1 + len(asked))
        assert bench.verdict(found).outcome == outcome
        assert ["is stale" in note for note in bench.notes] == [True] * (ratio == 0.5)


def test_figures_of_earlier_baselines_and_of_other_devices_are_in_the_evidence(bench: Bench) -> None:
    bench.renew(Machine(seed=1), "new")
    other = unsigned(bench.file.read_text()).replace("sample-device", "other-device")
    bench.file.with_name("other-device.json").write_text(other)
    bench.file.with_name("other-case.json").write_text(other.replace('"default"', '"b8"'))
    bench.file.with_name("torn.json").write_text("{")
    written, compared = bench.renew(Machine(0.5, seed=2)), bench.gate(Machine(0.5, seed=3))
    for found in (*written.evidence.values(), *compared.evidence.values()):
        assert [round(figure.ratio.median, 1) for figure in found.history] == [0.6, 0.5]
        assert all(figure.recorded == "2026-01-08T14:00:00+00:00" for figure in found.history)
    assert [(figure.device, round(figure.ratio.median, 1)) for figure in found.elsewhere] == [
        ("other-device", 0.6)
    ]


def test_first_runs_are_judged_too(bench: Bench) -> None:
    bench.renew(Machine(first=0.6))
    found = bench.found(Machine(seed=1, first=0.8))
    assert bench.verdict(found).outcome == "fail"
    assert found.ratio.median == pytest.approx((0.6 * 0.8) ** 0.5, rel=0.03)
