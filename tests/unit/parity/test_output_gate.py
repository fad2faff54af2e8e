"""The SQNR of candidates on a few samples: `OutputGate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from qdqspec.parity.gate import FEW, KNOWN, SAMPLES, STEPS, OutputGate

SIGNAL = 100.0  # of the only value of each sample


@dataclass(slots=True)
class Noisy:
    """An engine with so many decibels on the first few samples, and so many on all others."""

    few_db: float
    others_db: float
    runs: int = 0

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        db = self.few_db if feeds["number"] < FEW else self.others_db
        return {"y": np.array([SIGNAL * (1 + 10 ** (-db / 20))])}


@pytest.fixture
def gate() -> OutputGate:
    return OutputGate(Noisy(400, 400), [{"number": np.array(number)} for number in range(SAMPLES)])


def runs(gate: OutputGate, few_db: float, others_db: float, limit_db: float) -> int:
    engine = Noisy(few_db, others_db)
    gate.near(engine, limit_db)
    return engine.runs


def test_only_what_is_far_from_the_limit_is_judged_on_few_samples(gate: OutputGate) -> None:
    distances = {number: far for number, (far, _) in STEPS.items()}
    for number, far in distances.items():
        assert runs(gate, 20, 20, 20 + far + 0.1) == number
    assert runs(gate, 20, 20, 20 + min(distances.values()) - 0.1) == SAMPLES


def test_what_is_far_is_learnt_from_those_on_all_samples(gate: OutputGate) -> None:
    for number in range(KNOWN):  # all samples are 3 dB worse than the first few, with little variation
        assert runs(gate, 23.2 + 0.1 * number, 20, 20) == SAMPLES
    engine = Noisy(27, 23)
    found, samples = gate.near(engine, 20)
    assert (samples, engine.runs) == (FEW, FEW)
    assert found == pytest.approx(27 - 2.5, abs=0.5)
    assert runs(gate, 22.8, 20, 20) == SAMPLES


def test_where_samples_differ_more_is_near(gate: OutputGate) -> None:
    for others_db in (18, 20, 22, 21):
        assert runs(gate, 20, others_db, 20) == SAMPLES
    assert runs(gate, 22.5, 22.5, 20) > FEW
