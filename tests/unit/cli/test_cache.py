"""``qdqspec cache``: its list, prune, clear, info, export and import."""

from __future__ import annotations

import json
import zipfile

import pytest

from qdqspec._core.store import Store


@pytest.fixture
def kept(tmp_path):
    """Two finished searches: a new one, and one of forty days ago."""

    def fill(folder):
        said = {"about": {"case": "net::default", "device": "a device"}}
        (folder / "search.json").write_text(json.dumps(said))

    now = Store(tmp_path / ".qdqspec/cache")
    now.put("new", fill)
    Store(now.folder, clock=lambda: now._clock() - 40 * 86400).put("old", fill)
    return now.folder


def test_searches_are_listed_with_age_and_case(verb, kept):
    head, *lines = verb("cache").out.splitlines()
    assert head.startswith(f"{kept}: 2 finished searches, ")
    assert [line.split()[0] for line in lines] == ["old", "new"]
    assert lines[0].endswith("net::default on a device")
    old, new = verb("cache", "list", "--json").json["entries"]
    assert (old["key"], new["key"]) == ("old", "new")
    assert old["age_seconds"] == pytest.approx(40 * 86400, abs=60)
    assert old["case"] == "net::default"
    assert old["bytes"] > 0
    found = verb("cache", "info", "--json").json
    assert (found["entries"], found["folder"]) == (2, str(kept))
    assert found["oldest_seconds"] == pytest.approx(40 * 86400, abs=60)


def test_a_damaged_entry_gives_exit_code_1_and_is_not_exported(verb, kept):
    (kept / "old" / "search.json").write_text("{")
    result = verb("cache")
    assert result.code == 1
    assert "'search.json' was changed" in result.err
    damages = [entry["damage"] for entry in verb("cache", "--json").json["entries"]]
    assert damages == ["'search.json' was changed", ""]
    assert verb("cache", "export", "cache.zip", "--json").json["exported"] == 1


def test_prune_removes_old_entries_and_clear_all(verb, kept):
    assert verb("cache", "prune", "--older-than", "50d").out == f"{kept}: 0 entries removed\n"
    assert verb("cache", "prune").out == f"{kept}: 1 entry removed\n"
    assert {path.name for path in kept.iterdir() if path.is_dir()} == {"new"}
    assert verb("cache").out.startswith(f"{kept}: 1 finished search, ")
    assert verb("cache", "clear", "--json").json["removed"] == 1
    assert verb("cache").out == f"{kept}: 0 finished searches, 0 B\n"


def test_imported_entries_keep_their_age(verb, kept, tmp_path):
    archive = tmp_path / "cache.zip"
    assert verb("cache", "export", str(archive), "--json").json["exported"] == 2
    other = ["--cache-dir", str(tmp_path / "other")]
    assert verb("cache", "import", str(archive), *other, "--json").json["added"] == 2
    again = verb("cache", "import", str(archive), *other, "--json").json
    assert (again["added"], again["present"]) == (0, 2)
    old, _ = verb("cache", "--json", *other).json["entries"]
    assert (old["key"], old["damage"]) == ("old", "")
    assert old["age_seconds"] == pytest.approx(40 * 86400, abs=60)


@pytest.mark.parametrize("name", ["../evil/x", "/evil/x", "new/a\\..\\b", ".git/x", ""])
def test_an_archive_with_other_files_is_refused(verb, tmp_path, name):
    with zipfile.ZipFile(tmp_path / "cache.zip", "w") as file:
        file.writestr(zipfile.ZipInfo(name), b"x")
    result = verb("cache", "import", str(tmp_path / "cache.zip"), "--cache-dir", str(tmp_path / "other"))
    assert result.code == 2
    assert "cannot be imported" in result.err
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_an_entry_changed_after_export_is_not_imported(verb, kept, tmp_path):
    verb("cache", "export", str(tmp_path / "cache.zip"))
    with zipfile.ZipFile(tmp_path / "cache.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for member in good.infolist():
            content = b"{}" if member.filename == "new/search.json" else good.read(member)
            bad.writestr(member.filename, content)
    result = verb("cache", "import", str(tmp_path / "bad.zip"), "--cache-dir", str(tmp_path / "other"))
    assert result.code == 2
    assert "'search.json' was changed" in result.err
    assert not (tmp_path / "other" / "new").exists()
