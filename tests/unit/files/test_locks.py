"""Locks: two runs in one folder, and two timings on one device, exclude each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from qdqspec._core import locks
from qdqspec._core.locks import DeviceLock, RunLock
from qdqspec.errors import OutputError, StateError

HOLDER = """
import sys
from pathlib import Path
from qdqspec._core.locks import DeviceLock, RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
DEVICE_HOLDER = HOLDER.replace("RunLock(Path", "DeviceLock('a cpu', folder=Path")


@pytest.fixture(autouse=True)
def no_wait_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_REPORTED", set())


@contextmanager
def held_elsewhere(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock until its input ends."""
    command, pipe = [sys.executable, "-c", program, str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


@pytest.mark.parametrize(
    ("program", "kind", "what"),
    [
        (HOLDER, RunLock, "the run that writes to {folder}"),
        (DEVICE_HOLDER, partial(DeviceLock, "a cpu"), "a measurement of another run on a cpu"),
    ],
    ids=["folder", "device"],
)
def test_a_second_run_waits_and_reports_the_process_that_holds_the_lock(
    tmp_path: Path, program: str, kind: Callable[..., RunLock | DeviceLock], what: str
) -> None:
    reports: list[str] = []
    with (
        held_elsewhere(program, tmp_path) as holder,
        # a killed run holds no lock
        kind(folder=tmp_path, report=lambda text: reports.append(text) or holder.kill()),
    ):
        pass
    (report,) = reports
    since = rf"\(process {holder.pid}, since 20\d\d-\S+ \d+:\d+:\d+\)"
    assert re.fullmatch(f"waits for {what.format(folder=tmp_path)} {since}", report)


@pytest.mark.parametrize("note", ["", '{"pid": "x", "since": 3}', "[" * 9000])
def test_a_damaged_note_of_a_lock_is_reported_as_another_process(tmp_path: Path, note: str) -> None:
    reports: list[str] = []
    with held_elsewhere(HOLDER, tmp_path) as holder:
        (tmp_path / ".lock.owner").write_text(note)
        with RunLock(tmp_path, lambda text: reports.append(text) or holder.kill()):
            pass
    assert reports == [f"waits for the run that writes to {tmp_path} (another process)"]


def test_a_process_never_waits_for_itself(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"), pytest.raises(StateError, match=f"process {os.getpid()}"):
        RunLock(tmp_path / "new").__enter__()
    with RunLock(tmp_path / "new"):
        pass


def test_the_lock_of_a_device_is_in_the_users_folder() -> None:
    with DeviceLock("a cpu") as held:
        own = held.path.parent.parent
        assert str(os.getuid()) in own.name
        assert own.stat().st_mode & 0o077 == 0


def test_a_lock_that_cannot_be_made_or_taken_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        RunLock(tmp_path / "file" / "run").__enter__()
    (tmp_path / "a-cpu.lock").mkdir()
    with pytest.raises(OutputError, match="cannot be taken") as caught:
        DeviceLock("a cpu", folder=tmp_path).__enter__()
    assert "TMPDIR" in (caught.value.cure or "")


def test_timed_sections_on_one_device_follow_each_other(tmp_path: Path) -> None:
    order: list[str] = []

    def enter() -> None:
        with DeviceLock("a cpu", folder=tmp_path):
            order.append("second")

    second = threading.Thread(target=enter)
    with DeviceLock("a cpu", folder=tmp_path), DeviceLock("another cpu", folder=tmp_path):
        second.start()
        second.join(0.2)
        order.append("first")
    second.join(20)
    assert order == ["first", "second"]


def test_a_thread_does_not_wait_for_its_own_timed_section(tmp_path: Path) -> None:
    waits: list[float] = []
    key = "Some GPU / int8: VNNI"
    with DeviceLock(key, folder=tmp_path), DeviceLock(key, folder=tmp_path, waited=waits.append):
        assert waits[0] < locks._PATIENCE
        assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"Some-GPU-int8-VNNI"}
    with DeviceLock(key, folder=tmp_path):
        pass
