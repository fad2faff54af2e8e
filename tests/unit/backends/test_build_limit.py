"""``--qdq-build-limit`` ends the build of every backend, and the next build is not affected."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qdqspec._core.config import Settings
from qdqspec.backends.base import BUILD_SECONDS, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError

SOON = 30.0  # seconds, on a busy machine


def ended(backend: Isolated, model: Path, options: BuildOptions) -> BackendError:
    begun = time.monotonic()
    with pytest.raises(BackendError) as caught:
        backend.build(model, options)
    assert time.monotonic() - begun < SOON
    assert "--qdq-build-limit" in str(caught.value.cure)
    return caught.value


def test_the_build_limit_of_the_settings_applies_to_each_build() -> None:
    assert BuildOptions.of(Settings(build_limit=2.5)).build_seconds == 2.5
    assert BuildOptions.of(Settings()).build_seconds == BUILD_SECONDS


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-web"])
def test_a_build_is_ended_at_its_limit(name: str, model: Path) -> None:
    with Isolated(name) as backend:
        found = backend.probe()
        if not found.usable:
            pytest.skip(found.why)
        error = ended(backend, model, BuildOptions(build_seconds=1e-4))  # no build takes so little time
        assert "gave no answer to 'build' for 0.0001 s and was ended" in error.what
        backend.build(model, BuildOptions()).close()


def test_a_build_that_hangs_is_ended_on_the_simulated_device(model: Path) -> None:
    with Isolated("fake") as backend:
        error = ended(backend, model, BuildOptions(build_seconds=1.0, extra={"fake.hang": "build"}))
        assert "gave no answer to 'build' for 1 s and was ended" in error.what
        backend.build(model, BuildOptions()).close()


def test_a_build_that_hangs_is_ended_on_trtexec(install_trtexec: Callable[..., object], model: Path) -> None:
    install_trtexec(fault={"build": "hang"})
    with Isolated("trtexec") as backend:
        error = ended(backend, model, BuildOptions(build_seconds=4.0))
    assert "was ended after 3.8 s" in error.what, (
        "slightly less than the limit, so that the reason is reported"
    )
