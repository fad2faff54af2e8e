"""Temporary folders are removed at the end of their process, or at the latest by the next run."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qdqspec._core.temporary import TemporaryFolder, shared_folder
from qdqspec.errors import OutputError

HOLDER = """
import sys
from qdqspec._core.temporary import TemporaryFolder
with TemporaryFolder() as folder:
    (folder / "weights.bin").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left() -> list[str]:
    return sorted(path.name for path in shared_folder("runs").iterdir())


def test_a_folder_is_removed_when_closed_or_collected() -> None:
    with TemporaryFolder() as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    kept = TemporaryFolder()
    kept.close()
    kept.close()
    TemporaryFolder()
    gc.collect()
    assert left() == []


def test_the_folder_of_a_killed_run_is_removed_by_the_next_one() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        theirs = Path(holder.stdout.readline().strip())
        with TemporaryFolder():
            assert (theirs / "weights.bin").exists(), "the folder of a running process is kept"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert theirs.exists()
    with TemporaryFolder() as mine:
        assert left() == sorted([mine.name, f"{mine.name}.lock"])


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_folder("runs")
    uid = os.getuid()
    (tmp_path / f"qdqspec-{uid}").rename(tmp_path / f"qdqspec-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(OutputError, match="belongs to another user") as caught:
        TemporaryFolder()
    assert "TMPDIR" in str(caught.value)
