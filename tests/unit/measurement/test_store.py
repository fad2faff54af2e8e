"""The cache: an entry is complete or missing, and errors of the cache never stop a run."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qdqspec._core import store as store_module
from qdqspec._core.store import Store, cache_key
from qdqspec.errors import OutputError

KEY = cache_key(model="ab12", options={"threads": 1})


def fill(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / "regions").mkdir()
    (folder / "regions" / "a.json").write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".qdqspec" / "cache")


def test_a_stored_entry_is_found_by_another_run(store: Store) -> None:
    assert store.get(KEY) is None
    put = store.put(KEY, fill)
    again = Store(store.folder)
    assert again.get(KEY) == put
    assert (put / "regions" / "a.json").read_text() == "{}"
    assert not again.warnings
    assert put.stat().st_mode == (put / "regions").stat().st_mode, "other users may share the cache"
    assert (store.folder / ".gitignore").read_text() == "*\n"
    tag = (store.folder / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55")


@pytest.mark.parametrize("error", [ValueError("stopped"), OSError(errno.ENOSPC, "No space left on device")])
def test_no_file_remains_of_an_entry_whose_creation_failed(store: Store, error: Exception) -> None:
    def broken(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises((ValueError, OutputError), match=r"stopped|No space left on device"):
        store.put(KEY, broken)
    assert store.get(KEY) is None
    assert sorted(p.name for p in store.folder.iterdir()) == [".gitignore", "CACHEDIR.TAG"]


def test_the_age_of_an_entry_is_never_negative(tmp_path: Path) -> None:
    now = 1000.0
    store = Store(tmp_path, clock=lambda: now)
    entry = store.put(KEY, fill)
    now = 0.0
    assert store.age_seconds(entry) == 0.0, "the clock was set back"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a shorter file": lambda entry: (entry / "model.onnx").write_bytes(b"wei"),
    "a missing file": lambda entry: (entry / "regions" / "a.json").unlink(),
    "another file": lambda entry: (entry / "extra.txt").write_text(""),
    "another date": lambda entry: _change(entry, rb'"created": \d', b'"created": 9'),
}


def _change(entry: Path, what: bytes, by: bytes) -> None:
    text = (entry / "entry.json").read_bytes()
    (entry / "entry.json").write_bytes(re.sub(what, by, text))
    assert (entry / "entry.json").read_bytes() != text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_ignored_reported_and_replaced(store: Store, damage: str) -> None:
    DAMAGES[damage](store.put(KEY, fill))
    assert store.get(KEY) is None
    assert store.get(KEY) is None
    assert len(store.warnings) == 1
    assert KEY in store.warnings[0]
    assert store.put(KEY, fill) == store.get(KEY)


def test_a_folder_that_cannot_be_written_is_reported_once_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    store = Store(tmp_path / "cache")
    first = store.put(KEY, fill)
    store.put(cache_key(model="other"), fill)
    assert store.get(KEY) == first
    assert len(store.warnings) == 1
    assert "this run goes on without it" in store.warnings[0]
    assert (tmp_path / "cache").read_text().startswith("a file")


@pytest.mark.parametrize("created", ["NaN", "1e300", '"now"'])
def test_any_time_in_an_entry_gives_an_age_that_can_be_shown(tmp_path: Path, created: str) -> None:
    store = Store(tmp_path)
    entry = store.put(KEY, fill)
    _change(entry, rb'"created": [\d.]+', b'"created": ' + created.encode())
    (found,) = store.entries()
    assert found.damage
    assert 0 <= found.age_seconds < 60, "the modification time of the folder is used then"


def test_the_key_depends_on_the_parts_and_not_on_their_order() -> None:
    assert cache_key(a=1, b={"x": 1, "y": 2}) == cache_key(b={"y": 2, "x": 1}, a=1)
    assert cache_key(a=1) != cache_key(a="1")
    with pytest.raises(TypeError):
        cache_key(path=Path("x"))


def test_a_removal_never_leaves_a_partial_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two files that are removed, another run finds no entry, and reports no damage."""
    rmtree, seen = shutil.rmtree, []

    def slow(folder: Path, **how: object) -> None:
        other = Store(store.folder)
        seen.append((other.get(KEY), other.warnings))
        rmtree(folder, **how)

    for remove in (lambda: store.prune(0), lambda: store.discard(KEY)):
        store.put(KEY, fill)
        seen.clear()
        monkeypatch.setattr(shutil, "rmtree", slow)
        remove()
        monkeypatch.undo()
        assert seen == [(None, [])]
        assert not [path for path in store.folder.iterdir() if path.is_dir()]


@pytest.fixture
def three(store: Store) -> Store:
    """A store of `KEY` and two other entries."""
    for key in (KEY, *(cache_key(number=number) for number in range(2))):
        store.put(key, fill)
    return store


def test_an_entry_that_another_run_removes_is_missing_and_not_damaged(
    three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read, or after the entries were listed."""
    digest, listing = store_module.file_digest, Store._entries

    def removed(path: Path) -> str:
        Store(three.folder).discard(KEY)
        return digest(path)

    def entries(self: Store) -> list[Path]:
        found = listing(self)
        shutil.rmtree(three.folder / KEY, ignore_errors=True)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "file_digest", removed)
        assert three.get(KEY) is None
    three.put(KEY, fill)
    monkeypatch.setattr(Store, "_entries", entries)
    assert KEY not in {each.folder.name for each in three.entries()}
    assert len(three.entries()) == 2
    assert not three.warnings


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_an_entry_that_changes_during_its_export_is_omitted(
    three: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    copytree = shutil.copytree

    def meanwhile(entry: Path, copy: Path, *more: object) -> None:
        if entry == three.folder / KEY and change == "removed":
            three.discard(KEY)
        copytree(entry, copy, *more)
        if Path(copy).name == KEY:
            (copy / "model.onnx").write_bytes(b"of another result")

    monkeypatch.setattr(shutil, "copytree", meanwhile)
    assert three.export(tmp_path / "a.zip") == 2
    assert Store(tmp_path / "other").take(tmp_path / "a.zip") == (2, 0)
