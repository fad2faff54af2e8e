"""Sessions whose engines are threads, except in tests with the fixture ``processes``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from chains import SHAPE, chain_model
from sessions import Open, quiet_session
from stand_ins import simulate_times

from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, TuneRules


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads: None) -> None:
    """A session starts dozens of engines, and few of these tests need engines in separate processes."""


@pytest.fixture
def fast_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are simulated, so that integer kernels are faster than float ones on any machine."""
    simulate_times(monkeypatch)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a small model that is faster in integers, and four samples with labels."""
    folder = tmp_path / "project"
    folder.mkdir()
    onnx.save(chain_model(), folder / "chain.onnx")
    images = np.random.default_rng(1).normal(size=(4, *SHAPE[1:])).astype(np.float32)
    np.savez(folder / "data.npz", x=images, labels=np.zeros(4, np.int64))
    return folder


@pytest.fixture
def case(project: Path) -> Case:
    data = Inputs(calibration=project / "data.npz")
    return Case(id="default", model=project / "chain.onnx", inputs=data, tune=TuneRules(trials=6))


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Open]:
    """Opens sessions on a simulated device with little noise: ``open_session(mode="verify")``."""
    sessions: list[Session] = []

    def open_it(words: dict[str, str] | None = None, **settings) -> Session:
        sessions.append(quiet_session(tmp_path / "root", words, **settings))
        return sessions[-1]

    yield open_it
    for session in sessions:
        session.close()
