"""Fixtures of the tests of this repository: golden files, Hypothesis profiles, the shared models."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# With parallel workers, threads of OpenBLAS would use the processors of other workers while waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).parent
MODELS = ROOT / "specs" / "models"

# A run always has the same examples: HYPOTHESIS_PROFILE=soak draws others, and more.
settings.register_profile(
    "same",
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Rewrite the golden files with the actual texts."
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Import scipy before the fixture `pytester`, which removes later imports from ``sys.modules`` at its end.

    Some modules that scipy imports cannot be imported twice in a process.
    """
    if "pytester" in getattr(item, "fixturenames", ()):
        importlib.import_module("scipy.stats")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden: ``golden("folder/name.txt", text)``."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {path}; write it with --update-golden and review it"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs; renew it with --update-golden if intended"
        )

    return compare


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of the example models."""
    return MODELS


@pytest.fixture
def processes() -> None:
    """Each engine has a separate process, as outside of tests; overrides ``engine_threads`` of a module."""


@pytest.fixture
def engine_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are threads of this process, for tests that would otherwise start hundreds of processes."""
    if "processes" not in request.fixturenames:
        from engine_threads import Threads

        isolated = importlib.import_module("qdqspec.backends.isolation.isolated")
        monkeypatch.setattr(isolated, "open_launcher", lambda backend, **_: Threads(backend))
