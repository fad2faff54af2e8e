"""The files and the command of a parity failure: Polygraphy alone repeats the failure."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph_text import saved
from written_cases import written_case

from qdqspec._core import hooks
from qdqspec.app.evidence.parity import both_models
from qdqspec.app.evidence.probes import replay_failure, save_replay
from qdqspec.app.session import Session
from qdqspec.testing.records import params_of
from qdqspec.types import Case

FLOAT = """net (float[batch,4] x) => (float[batch,4] y, float[batch,4] same) { y = Relu(x)  same = Neg(x) }"""
# Saturates at 1: the third sample below is outside.
TUNED = """net (float[batch,4] x) => (float[batch,4] y, float[batch,4] same) {
  q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Relu(d)  same = Neg(x) }"""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    data = np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32)
    data[2] = 3
    return written_case(tmp_path, FLOAT, {"x": data})


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    numbers = {"s": np.float32(1 / 127), "z": np.int8(0)}
    return saved(tmp_path / "tuned.onnx", TUNED, opset=17, ir_version=8, **numbers)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    with Session(root=tmp_path) as opened:
        yield opened


def _verdict(commands: str) -> int:
    """The exit code of the last command; those before must succeed."""
    *before, last = [
        subprocess.run(
            [str(Path(sys.executable).with_name("polygraphy")), *shlex.split(line)[1:]],
            capture_output=True, text=True, timeout=300, check=False,
        )
        for line in commands.splitlines()
    ]  # fmt: skip
    assert all(done.returncode == 0 for done in before), before
    assert "Pass Rate" in last.stdout, last
    return last.returncode


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ({"min_sqnr_db": 30}, {"min_sqnr_db": 3}),
        ({"max_steps": 10, "outputs": ["y"]}, {"max_steps": 200}),
        ({"min_sqnr_db": 30, "min_cosine": 0.5}, {"min_sqnr_db": 3, "min_cosine": 0.5}),
    ],
    ids=["sqnr", "steps", "two limits"],
)
def test_polygraphy_repeats_the_failure_of_the_worst_sample(
    session: Session, case: Case, tuned: Path, broken: dict[str, object], kept: dict[str, object]
) -> None:
    prepared = session.work(case).prepared
    command = replay_failure(prepared, tuned, params_of("parity", **broken), "parity")
    assert "--onnxrt" in command
    assert _verdict(command) == 1

    feeds, _ = prepared.comparison_data()
    worst = list(feeds)[2]
    limits = params_of("parity", **kept)
    with both_models(prepared, tuned) as models:
        looser = save_replay(prepared, tuned, limits, "parity", worst, models.run(worst))
    assert _verdict(looser) == 0


def test_nothing_is_written_if_no_sample_breaks_a_limit(session: Session, case: Case, tuned: Path) -> None:
    prepared = session.work(case).prepared
    assert replay_failure(prepared, tuned, params_of("parity", min_sqnr_db=3), "parity") == ""
    assert not (prepared.output / "parity" / "parity").exists()


def test_a_backend_without_a_runner_compares_the_outputs_that_were_saved(
    session: Session, case: Case, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = session.work(case).prepared
    without = replace(hooks.declaration_of(prepared.backend.name), polygraphy=())
    monkeypatch.setattr(hooks, "declaration_of", lambda _: without)
    command = replay_failure(prepared, tuned, params_of("parity", min_sqnr_db=30), "parity")
    assert "--onnxrt" not in command
    assert _verdict(command) == 1
