"""``--qdq-build-limit`` ends the build of every backend, and the next build is not affected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec._core.config import Settings
from qdqspec.backends.base import BuildOptions
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


@pytest.mark.parametrize(
    ("name", "limit", "extra"),
    [
        ("onnxruntime", 1e-4, {}),  # no build takes so little time
        ("onnxruntime-web", 1e-4, {}),
        ("fake", 1.0, {"fake.hang": "build"}),
    ],
)
def test_a_build_is_ended_at_its_limit(name: str, limit: float, extra: dict[str, str], model: Path) -> None:
    with Isolated(name) as backend:
        found = backend.probe()
        if not found.usable:
            pytest.skip(found.why)
        error = ended(backend, model, replace(BuildOptions.of(Settings(build_limit=limit)), extra=extra))
        assert f"gave no answer to 'build' for {limit:g} s and was ended" in error.what
        backend.build(model, BuildOptions()).close()


def test_a_build_that_hangs_is_ended_on_trtexec(install_trtexec: Callable[..., object], model: Path) -> None:
    install_trtexec(fault={"build": "hang"})
    with Isolated("trtexec") as backend:
        error = ended(backend, model, BuildOptions(build_seconds=4.0))
    assert "was ended after 3.8 s" in error.what, (
        "slightly less than the limit, so that the reason is reported"
    )
