"""CUDA through cuda-bindings, on a fake runtime; tests of the device run on it too: see test_tensorrt_session.py."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from qdqspec.backends._nvidia import cuda
from qdqspec.errors import BackendUnavailableError

pytestmark = pytest.mark.usefixtures("newest")


def test_without_cuda_bindings_the_error_states_how_to_install_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailableError, match="cuda-bindings cannot be imported"):
        cuda.runtime()


@pytest.mark.parametrize("runs", [0, 64, 65])
def test_each_run_has_its_own_time(runs: int):
    from fake_gpu import gpu

    lasting = iter(range(1, runs + 1))

    def work() -> None:
        gpu.now_ms += next(lasting)

    with closing(cuda.Stream()) as stream:
        assert cuda.time_runs(stream, work, runs).device_ms == tuple(range(1, runs + 1))


def test_the_launch_time_of_each_run_is_measured_on_the_host():
    ticks = iter(range(100))
    with closing(cuda.Stream()) as stream:
        timed = cuda.time_runs(stream, lambda: None, 3, clock=lambda: 1e-3 * next(ticks))
    assert timed.host_ms == pytest.approx((1.0, 1.0, 1.0))


def test_warm_up_lasts_for_the_given_runs_or_time():
    with closing(cuda.Stream()) as stream:
        assert cuda.warm_up(stream, lambda: None, 0, 0) == 0
        assert cuda.warm_up(stream, lambda: None, 7, 0) == 7
        assert cuda.warm_up(stream, lambda: None, 1, 5) > 1
