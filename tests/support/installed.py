"""Skips tests of runtimes that are not usable on this machine."""

from __future__ import annotations

import pytest

from qdqspec.backends.base import PLAIN, BuildOptions, backend_named


def require_openvino() -> None:
    """Skip the calling test, with the reason, if OpenVINO is not usable."""
    _require("openvino", PLAIN)


def require_web(options: BuildOptions = PLAIN) -> None:
    """Skip the calling test, with the reason, if Node, a package or the requested browser is missing."""
    _require("onnxruntime-web", options)


def require_rtx() -> None:
    """Skip the calling test, with the command that installs it, if TensorRT for RTX cannot be used."""
    from qdqspec.backends.tensorrt.device import RTX, look

    if (found := look(RTX)).why:
        pytest.skip(f"{found.why}; {found.install or RTX.install}")


def _require(backend: str, options: BuildOptions) -> None:
    availability = backend_named(backend).probe(options)
    if not availability.usable:
        pytest.skip(f"{availability.why}; {availability.install}")
