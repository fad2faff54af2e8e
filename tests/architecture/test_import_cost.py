"""Modules loaded by imports and commands; those of the plugin are tested in tests/plugin/test_collect.py."""

from __future__ import annotations

import subprocess
import sys

import pytest


def third_party_after(code: str) -> list[str]:
    """Top-level modules outside the standard library that an interpreter has after ``code``, but for the loader."""
    program = (
        "import sys; before = set(sys.modules)\n"
        f"{code}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(' '.join(sorted(new - set(sys.stdlib_module_names) - {'qdqspec', 'lazy_loader'})))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.split("\n")[-2].split()


def test_importing_the_package_loads_no_third_party_module():
    assert third_party_after("import qdqspec") == []


def test_a_session_loads_neither_hypothesis_nor_scipy():
    """The search for inputs that fail parity needs the first, tests of timings the second."""
    loaded = third_party_after("import qdqspec.app.session")
    assert "numpy" in loaded
    assert not {"hypothesis", "scipy"} & set(loaded)


@pytest.mark.parametrize("words", [["tune", "--help"], ["config"]])
def test_help_and_settings_load_no_third_party_module(words):
    code = f"from qdqspec.app.cli import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass"
    assert third_party_after(code) == []


def test_a_confidence_interval_loads_a_part_of_scipy():
    """A run that measures a cached model needs Student's t only, which has a third of the price of scipy.stats."""
    code = "from qdqspec.timing.stats import student_half_width; student_half_width((1.0, 3))"
    assert "scipy" in third_party_after(f"{code}; assert 'scipy.stats' not in sys.modules")
