"""A small model of a user's, with its data, and sessions on a simulated device that is nearly quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec.backends.base import BuildOptions
from qdqspec.session import Session
from qdqspec.types import Case, Inputs, Progress, TuneRules

Open = Callable[..., Session]
SHAPE = (1, 8, 12, 12)
QUIET = {"fake.run_noise": "0.005", "fake.wall_noise": "0.01", "fake.build_noise": "0.002"}


def chain_model(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions with an activation and a residual, big enough that integers pay."""
    random = np.random.default_rng(seed)
    weights = [random.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32) for _ in range(3)]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "conv0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu0"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"], "add"),
        helper.make_node("Conv", ["d", "w2"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


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
        tune=TuneRules(trials=4),
    )


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Open]:
    """``open_session({"fake.crash": "time"}, no_cache=True)``: words for the device, and settings."""
    sessions: list[Session] = []

    def open_it(words: dict[str, str] | None = None, **settings) -> Session:
        session = Session(**{"backend": "fake", "root": tmp_path / "root", **settings})
        session._options = BuildOptions(extra={**QUIET, **(words or {})})
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


@pytest.fixture
def interrupt() -> Callable[[Session, Case, int], None]:
    """``interrupt(session, case, 3)``: run the case until so many trials are done, and stop it as Ctrl-C does."""

    def run(session: Session, case: Case, after: int) -> None:
        def watch(progress: Progress) -> None:
            if progress.done == after:
                raise KeyboardInterrupt

        session.watch = watch
        with pytest.raises(KeyboardInterrupt):
            session.search(case)

    return run
