"""A small model with data, and sessions on a simulated device with little noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from chains import SHAPE, chain_model
from sessions import Open, quiet_session

from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, Progress, TuneRules


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    onnx.save(chain_model(), folder / "chain.onnx")
    data = np.random.default_rng(1).normal(size=(4, *SHAPE[1:])).astype(np.float32)
    np.savez(folder / "data.npz", x=data)
    return folder


@pytest.fixture
def case(project: Path) -> Case:
    return Case(
        id="default",
        model=project / "chain.onnx",
        inputs=Inputs(calibration=project / "data.npz"),
        tune=TuneRules(trials=4, preset="extensive"),
    )


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Open]:
    """Opens sessions by backend options and settings: ``open_session({"fake.crash": "time"}, no_cache=True)``."""
    with ExitStack() as stack:
        yield lambda words=None, **settings: stack.enter_context(
            quiet_session(tmp_path / "root", words, **settings)
        )


@pytest.fixture
def interrupt() -> Callable[[Session, Case, int], None]:
    """Runs a case and interrupts it after a number of trials as Ctrl-C does: ``interrupt(session, case, 3)``."""

    def run(session: Session, case: Case, after: int) -> None:
        def watch(progress: Progress) -> None:
            if progress.done == after:
                raise KeyboardInterrupt

        session.watch = watch
        with pytest.raises(KeyboardInterrupt):
            session.search(case)

    return run


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads: None) -> None:
    """Engines in threads, except in tests with the fixture ``processes``."""
