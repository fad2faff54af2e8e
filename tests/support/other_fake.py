"""A second simulated device with other fast kernels, registered as the backend ``other``.

Its engines are threads of this process (see ``engine_threads``), because the name is not registered in other processes.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec._core import registry
from qdqspec._core.hooks import Declaration
from qdqspec._core.options import BackendOptions
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.types import DeviceKey

SEED = 7  # seed of kernel times; that of `fake` is 0
declaration = Declaration(targets=("other",))


class OtherDevice(FakeDevice):
    name = "other"
    target = "other"
    options = BackendOptions(backend="other")
    scale = 1.0  # factor on all kernel times; set by tests

    def device(self, options: BuildOptions) -> DeviceKey:
        return DeviceKey(key="other")

    def build(self, model: Path, options: BuildOptions) -> FakeEngine:
        words = {**options.extra, "fake.seed": str(SEED), "fake.scale": str(OtherDevice.scale)}
        return super().build(model, replace(options, extra=words))


backend = OtherDevice


def install(monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> None:
    """Register the backend ``other``."""
    register(monkeypatch, "backend", "other", "other_fake:backend")
    monkeypatch.setattr(OtherDevice, "scale", scale)


def register(monkeypatch: pytest.MonkeyPatch, kind: registry.RegistryKind, name: str, value: str) -> None:
    """Register an object under this name, as an installed package would."""
    point = importlib.metadata.EntryPoint(name, value, f"qdqspec.{kind}s")
    known = registry._entry_points
    more = lambda asked: {name: point} if asked == kind else {}  # noqa: E731 - short
    monkeypatch.setattr(registry, "_entry_points", lambda asked: known(asked) | more(asked))
