"""For the repository's own tests only: golden files, Hypothesis profiles, where the shared models are."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# Workers side by side: the threads of OpenBLAS wait for each other, and would take the other workers' processors.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).parent
MODELS = ROOT / "specs" / "models"

# In CI the same examples every time: a new one that fails is found by people who run the tests, and by `soak`.
settings.register_profile(
    "ci",
    max_examples=30,
    deadline=None,
    derandomize=os.environ.get("CI", "false") != "false",
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Rewrite the golden files with what was seen."
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("room/name.txt", text)`` compares text with tests/golden/room/name.txt."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {path}; make it with --update-golden and read it"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs; renew it with --update-golden if meant"
        )

    return compare


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of the example models."""
    return MODELS


@pytest.fixture
def processes() -> None:
    """Every engine has a process of its own, as outside the tests: against ``engine_threads`` of a module."""


@pytest.fixture
def engine_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are threads of this process, for tests that are not about processes and would start hundreds."""
    if "processes" not in request.fixturenames:
        from engine_threads import Threads

        isolate = importlib.import_module("qdqspec.measurement.isolate")
        monkeypatch.setattr(isolate, "open_launcher", lambda backend, **_: Threads(backend))
