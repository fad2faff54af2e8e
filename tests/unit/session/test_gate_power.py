"""The error rates of the gate on the simulated device with few seeds; `benchmarks/gate.py` uses 1,000."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SEEDS = 100


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "gate.py"
    spec = importlib.util.spec_from_file_location("benchmarks_gate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(gate: ModuleType, tmp_path: Path) -> Path:
    gate.write_models(tmp_path)
    return tmp_path


def test_an_unchanged_model_passes_the_gate(gate: ModuleType, folder: Path) -> None:
    found, twice = gate.rates(folder, SEEDS, 0.0)
    assert found["fail"] <= 1
    assert found["pass"] >= 0.95 * SEEDS
    assert twice < 0.25


def test_a_slowdown_of_ten_per_cent_fails_the_gate(gate: ModuleType, folder: Path) -> None:
    found, _ = gate.rates(folder, SEEDS, 0.10)
    assert found["fail"] >= 0.93 * SEEDS
    assert found["pass"] == 0
