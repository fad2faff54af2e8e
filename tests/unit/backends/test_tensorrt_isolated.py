"""Engines in child processes: a crash of one is a failed candidate, and the next one builds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.memory import has_memory
from qdqspec.errors import BackendError

FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}


@pytest.fixture(params=["10.9.0.34", "11.4.0.106"])
def version(request: pytest.FixtureRequest, install_tensorrt: Callable[[str], None]) -> Iterator[str]:
    install_tensorrt(request.param)
    yield request.param
    assert "tensorrt" not in sys.modules, "the parent process can no longer be forked"


@pytest.mark.parametrize(
    ("fault", "said"), [("crash-in-run", "SIGSEGV during 'bind'"), ("out-of-memory", "Error Code 1")]
)
def test_a_candidate_builds_after_a_failed_one(
    model: Path, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
):
    options = BuildOptions(state=tmp_path / "state")
    with Isolated("tensorrt") as backend:
        monkeypatch.setenv("FAKE_TRT", fault)
        with pytest.raises(BackendError, match=said):
            backend.build(model, options).bind(FEEDS)
        backend.close()  # child processes started from here on get the current environment
        monkeypatch.delenv("FAKE_TRT")
        engine = backend.build(model, options)
        engine.bind(FEEDS)
        assert len(engine.time(3).wall_ms) == 3
        engine.close()


def test_memory_of_the_gpu_is_reported_and_grows_with_bound_inputs(model: Path, version: str) -> None:
    with Isolated("tensorrt") as backend:
        engine = backend.build(model, BuildOptions())
        used, free = engine.device_memory()
        assert has_memory([engine], 20)  # half a GiB is added to each for its CUDA context; 40 GiB are free
        assert not has_memory([engine], 100)
        engine.bind(FEEDS)
        more, less = engine.device_memory()
        assert min(more - used, free - less) >= FEEDS["x"].nbytes + 5 * 4
        engine.close()
