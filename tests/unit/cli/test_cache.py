"""``qdqspec cache``: its list, prune, clear, info, export and import."""

from __future__ import annotations

import json
import zipfile

import pytest

from qdqspec.timing.store import Store


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


def test_list_shows_each_search_with_age_and_case(verb, kept):
    result = verb("cache")
    head, first, second = result.out.splitlines()
    assert result.code == 0
    assert head.startswith(f"{kept}: 2 finished searches, ")
    assert first.split()[0] == "old"
    assert second.split()[0] == "new"
    assert first.endswith("net::default on a device")


def test_json_has_each_search_with_age_and_case(verb, kept):
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


def test_prune_removes_old_entries(verb, kept):
    assert verb("cache", "prune", "--older-than", "50d").out == f"{kept}: 0 entries removed\n"
    assert verb("cache", "prune").out == f"{kept}: 1 entry removed\n"
    assert {path.name for path in kept.iterdir() if path.is_dir()} == {"new"}
    assert verb("cache").out.startswith(f"{kept}: 1 finished search, ")


def test_clear_removes_all_entries(verb, kept):
    assert verb("cache", "clear", "--json").json["removed"] == 2
    assert verb("cache").out == f"{kept}: 0 finished searches, 0 B\n"


def test_a_missing_cache_is_empty_and_not_created(verb, tmp_path):
    assert verb("cache", "--cache-dir", "none").out == f"{tmp_path / 'none'}: 0 finished searches, 0 B\n"
    assert not (tmp_path / "none").exists()


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
    with (
        zipfile.ZipFile(tmp_path / "cache.zip") as good,
        zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad,
    ):
        for member in good.infolist():
            content = b"{}" if member.filename == "new/search.json" else good.read(member)
            bad.writestr(member.filename, content)
    result = verb("cache", "import", str(tmp_path / "bad.zip"), "--cache-dir", str(tmp_path / "other"))
    assert result.code == 2
    assert "'search.json' was changed" in result.err
    assert not (tmp_path / "other" / "new").exists()
