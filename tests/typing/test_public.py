"""Runs mypy on `public.py`: the revealed type or error of each line must be that of its comment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

FILE = Path(__file__).with_name("public.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    Version(np.__version__) < Version("2"), reason="numpy 1.26 has no types for some functions"
)
def test_revealed_types_and_errors_are_those_of_the_comments() -> None:
    options = ["--strict", "--no-error-summary", "--no-pretty", "--config-file", "pyproject.toml"]
    command = [sys.executable, "-m", "mypy", *options, str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found_types: dict[int, str] = {}
    for line in done.stdout.splitlines():
        found = re.match(r".*public\.py:(\d+): (error|note): (.*)", line)
        assert found, f"output of mypy: {line}{done.stderr}"
        found_types.setdefault(int(found[1]), found[3])
    expected = {
        number: line.split("  # ", 1)[1]
        for number, line in enumerate(FILE.read_text(encoding="utf-8").splitlines(), 1)
        if "  # " in line
    }
    assert found_types.keys() == expected.keys()
    for number, comment in expected.items():
        is_error, found_type = comment.startswith("error: "), found_types[number].replace("builtins.", "")
        kind = comment.removeprefix("error: ") if is_error else f'Revealed type is "{comment}"'
        assert found_type.startswith(kind), f"line {number}: {found_type}"
