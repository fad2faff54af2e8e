"""Two runs in one folder, and two timings on one device, stay apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qdqspec.errors import OutputError, StateError
from qdqspec.measure.lock import DeviceLock, RunLock

HOLDER = """
import sys
from pathlib import Path
from qdqspec.measure.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_told_which_process_has_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateError, match=rf"another run is writing here \(process {holder.pid}\)"):
            RunLock(tmp_path).__enter__()
        holder.kill()
        holder.wait()
    with RunLock(tmp_path):  # a killed run holds nothing
        pass


def test_a_folder_is_locked_within_one_process_too(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"), pytest.raises(StateError, match=f"process {os.getpid()}"):
        RunLock(tmp_path / "new").__enter__()
    with RunLock(tmp_path / "new"):
        pass


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        RunLock(tmp_path / "file" / "run").__enter__()


def test_timed_sections_on_one_device_follow_each_other(tmp_path: Path) -> None:
    order: list[str] = []
    second = threading.Thread(target=lambda: _enter(tmp_path, "a cpu", order))
    with DeviceLock("a cpu", folder=tmp_path), DeviceLock("another cpu", folder=tmp_path):
        second.start()
        second.join(0.2)
        order.append("first")
    second.join(20)
    assert order == ["first", "second"]


def test_a_timed_section_may_stand_in_itself(tmp_path: Path) -> None:
    lock = DeviceLock("Some CPU / int8: VNNI", folder=tmp_path)
    with lock, lock:
        assert [path.name for path in tmp_path.iterdir()] == ["Some-CPU-int8-VNNI.lock"]


def _enter(folder: Path, key: str, order: list[str]) -> None:
    with DeviceLock(key, folder=folder):
        order.append("second")
