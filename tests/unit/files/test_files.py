"""Files are written completely or not at all, and temporary files of a killed process are removed by the next
writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qdqspec._core.files import copy_whole, create_file, partial_folder, write_whole
from qdqspec.errors import OutputError

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from qdqspec._core.files import partial_folder
with partial_folder(Path(sys.argv[1])) as folder:
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


def test_a_new_file_never_replaces_one_and_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("number", "call"), [(errno.ENOSPC, "fsync"), (errno.EROFS, "rename")])
def test_a_failed_write_keeps_the_old_file_and_states_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
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
    assert ("free some space" in str(caught.value.cure)) == (number == errno.ENOSPC)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_changed_clock_removes_no_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real = time.time
    elsewhere = tmp_path / ".qdqspec-00000000-1-x.part"  # of another machine
    elsewhere.mkdir()
    with partial_folder(tmp_path) as mine:
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
    with partial_folder(tmp_path) as mine:
        write_whole(tmp_path / "a", "")
        assert names(tmp_path) == sorted([mine.name, elsewhere.name, "a"]), (
            "on a shared disk, the process may run on another machine"
        )
    os.utime(elsewhere, (time.time() - 3 * 86400,) * 2)
    write_whole(tmp_path / "a", "")
    assert names(tmp_path) == ["a"]
