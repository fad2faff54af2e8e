"""Files are written completely or not at all, temporary ones are removed, and JSON is read or refused."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from qdqspec._core.files import (
    PartialFolder,
    TemporaryFolder,
    copy_whole,
    create_file,
    shared_folder,
    write_whole,
)
from qdqspec._core.records import TooLargeError, parse_json, read_json
from qdqspec.errors import OutputError

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from qdqspec._core.files import PartialFolder
with PartialFolder(Path(sys.argv[1])) as folder:
    (folder / "whole").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_replace_the_file_with_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    write_whole(tmp_path / "a", b"\x00")
    assert (tmp_path / "a").read_bytes() == b"\x00"
    copy_whole(tmp_path / "a", tmp_path / ("n" * 255))
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert names(tmp_path) == ["a", "n" * 255, "usual"]


def test_a_new_file_never_replaces_one_and_is_complete(tmp_path, monkeypatch) -> None:
    create_file(tmp_path / "a", "one")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "a", "two")

    def without_links(*_: object) -> None:
        raise OSError(errno.EPERM, "this disk has no links")

    monkeypatch.setattr(os, "link", without_links)
    create_file(tmp_path / "b", "three")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "b", "four")
    assert [(tmp_path / name).read_text() for name in names(tmp_path)] == ["one", "three"]


@pytest.mark.parametrize(
    ("number", "call", "cure"),
    [(errno.ENOSPC, "fsync", "free some space"), (errno.EROFS, "rename", "choose another folder")],
)
def test_a_failed_write_keeps_the_old_file_and_states_the_cure(
    tmp_path, monkeypatch, number, call, cure
) -> None:
    write_whole(tmp_path / "a", "old")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((os, "fsync", refuse) if call == "fsync" else (Path, "replace", refuse)))
    with pytest.raises(OutputError, match="the report cannot be written") as caught:
        write_whole(tmp_path / "a", "new", what="the report")
    monkeypatch.undo()
    assert caught.value.where == str(tmp_path / "a")
    assert os.strerror(number) in caught.value.what
    assert cure in str(caught.value.cure)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_changed_clock_removes_no_file_in_use(tmp_path, monkeypatch, hours) -> None:
    real = time.time
    elsewhere = tmp_path / ".qdqspec-00000000-1-x.part"  # of another machine
    elsewhere.mkdir()
    with PartialFolder(tmp_path) as mine:
        (mine / "half").touch()
        monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
        write_whole(tmp_path / "a", "")
        assert (mine / "half").exists()
    assert elsewhere.exists()


def test_a_writer_removes_abandoned_files_and_keeps_those_possibly_in_use(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    prefix, _, rest = left.name.removeprefix(".qdqspec-").partition("-")
    elsewhere = left.with_name(f".qdqspec-{prefix[::-1]}-{rest}")
    elsewhere.mkdir()
    with PartialFolder(tmp_path) as mine:
        write_whole(tmp_path / "a", "")
        assert names(tmp_path) == sorted([mine.name, elsewhere.name, "a"]), (
            "on a shared disk, the process may run on another machine"
        )
    os.utime(elsewhere, (time.time() - 3 * 86400,) * 2)
    write_whole(tmp_path / "a", "")
    assert names(tmp_path) == ["a"]


def test_a_process_of_another_container_is_not_judged_by_its_number(tmp_path: Path, monkeypatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with monkeypatch.context() as there:
        there.setattr(Path, "readlink", lambda _: Path("pid:[1]"))
        there.setattr(os, "getpid", lambda: ended.pid)
        theirs = PartialFolder(tmp_path)
    with PartialFolder(tmp_path):
        assert theirs.path.exists()


HOLDER = """
import sys
from qdqspec._core.files import TemporaryFolder
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
        assert left() == [mine.name]


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_folder("runs")
    uid = os.getuid()
    (tmp_path / f"qdqspec-{uid}").rename(tmp_path / f"qdqspec-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(OutputError, match="belongs to another user") as caught:
        TemporaryFolder()
    assert "TMPDIR" in str(caught.value)


BAD = {
    '{"a": 1, "b": 2, "a": 3}': "the key 'a' occurs twice",
    "[NaN]": "NaN is no number",
    '{"a": -Infinity}': "-Infinity is no number",
    "[1e999]": "1e999 is no number of JSON or too large",
    '"\\ud800"': "a text in it is no Unicode",
    "[" * 100_000: "it nests too deep",
    "9" * 5000: "limit",
    "": "Expecting value",
    b'"\xff"': "not UTF-8",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: str(text[:20]) or "nothing")
def test_ambiguous_or_invalid_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=BAD[text]):
        parse_json(text if isinstance(text, bytes) else text.encode())


def test_a_file_above_the_limits_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1, 2]")
    assert read_json(tmp_path / "a.json", most_bytes=6) == [1, 2]
    with pytest.raises(TooLargeError, match="it has 6 bytes, and at most 5"):
        read_json(tmp_path / "a.json", most_bytes=5)
    with pytest.raises(TooLargeError, match="more than 5,000,000 parts"):
        parse_json(b"[" + b"[]," * 5_000_001 + b"[]]")
