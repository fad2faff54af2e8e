"""Modules loaded by imports and commands; those of the plugin are tested in tests/plugin/test_collect_only.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qdqspec._core import registry


def third_party_after(code: str) -> list[str]:
    """Top-level modules outside the standard library that a fresh interpreter has after ``code``."""
    program = (
        "import sys; before = set(sys.modules)\n"
        f"{code}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(' '.join(sorted(new - set(sys.stdlib_module_names) - {'qdqspec'})))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.split("\n")[-2].split()


def test_importing_the_package_loads_no_third_party_module():
    assert third_party_after("import qdqspec") == []


def test_the_measurement_lists_the_loaded_modules():
    assert "numpy" in third_party_after("import qdqspec.graph.model")


@pytest.mark.parametrize("words", [["--help"], ["tune", "--help"]])
def test_help_loads_no_third_party_module(words):
    code = f"from qdqspec.app.cli import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass"
    assert third_party_after(code) == []


def test_settings_load_no_third_party_module():
    assert third_party_after("from qdqspec.app.cli import main; main(['config'])") == []


@pytest.mark.parametrize("backend", registry.names("backend"))
def test_declarations_of_backends_load_no_third_party_module(backend):
    """Specs are validated against declarations when pytest collects."""
    assert (
        third_party_after(f"from qdqspec._core.config import hooks; hooks.declaration_of({backend!r})") == []
    )


def test_a_session_loads_no_hypothesis():
    """Only the search for inputs that fail parity needs hypothesis."""
    assert "hypothesis" not in third_party_after("import qdqspec.app.session")


def test_a_session_loads_no_scipy():
    """Only tests of timings need it, and most of what a session does is no test."""
    assert "scipy" not in third_party_after("import qdqspec.app.session")


def test_a_confidence_interval_loads_a_part_of_scipy():
    """A run that measures a cached model needs Student's t only, which has a third of the price of scipy.stats."""
    code = "from qdqspec.timing.stats import student_t; student_t(0.95, 3)"
    assert "scipy" in third_party_after(f"{code}; assert 'scipy.stats' not in sys.modules")
