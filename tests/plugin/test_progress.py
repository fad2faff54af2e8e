"""A progress bar on a terminal and one line per minute otherwise; both are written despite output capture."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LINE = "[[]qdqspec[]] a::int8-b8: compose, trial 3 of 12, best 2.00x, 2 kept, 1 dropped"
HEARTBEAT = "\n\nfrom qdqspec._core import progress\n\nprogress.HEARTBEAT_SECONDS = 0\n"
CHECK = "specs/a.qdq.yaml::int8-b8::speedup"


def test_progress_without_a_terminal_is_a_line_a_minute_except_at_qq(project):
    assert "[qdqspec]" not in project.run_apart(CHECK).stdout.str()
    project.add_to_conftest(HEARTBEAT)
    for capture in ("fd", "no"):
        project.run_apart("-q", f"--capture={capture}", CHECK).stdout.fnmatch_lines([LINE])
    lines = [line for line in project.run_apart("-q", "specs/a.qdq.yaml").outlines if "[qdqspec]" in line]
    assert lines
    assert all(line.startswith("[qdqspec]") for line in lines)  # not behind dots
    assert "[qdqspec]" not in project.run_apart("-qq", CHECK).stdout.str()
    project.run_apart("-n", "1", CHECK).stderr.fnmatch_lines([LINE])


def on_a_terminal(project, *arguments: str) -> str:
    """The output of a pytest run on a pseudo-terminal."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments], cwd=project.path, stdout=terminal, env=environment
    )
    os.close(terminal)
    received = b""
    try:
        while chunk := os.read(controller, 65536):
            received += chunk
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        pass
    os.close(controller)
    assert child.wait() == 0
    return received.decode()


def test_progress_on_a_terminal_is_a_bar_that_is_erased(project):
    shown = on_a_terminal(project, CHECK)
    assert "a::int8-b8 compose" in shown
    assert "best 2.00x, 2 kept, 1 dropped" in shown
    after = shown[shown.rindex("a::int8-b8 compose") :]
    erased = after[after.rindex("\x1b[2K") + 4 :]
    assert re.match(r"specs/a\.qdq\.yaml (\x1b\[32m)?\.", erased), (
        "pytest's line is restored in place of the bar"
    )
    assert len(re.findall(r"^(?:\r|\x1b\[[0-9;]*[mK])*specs/a", shown, re.MULTILINE)) == 1
    assert "[qdqspec]" not in shown
    assert "compose" not in on_a_terminal(project, "-q", CHECK)
