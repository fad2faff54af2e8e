"""``qdqspec cache``: what is kept, and making room."""

from __future__ import annotations

import json

import pytest

from qdqspec.measurement.store import Store


@pytest.fixture
def kept(tmp_path):
    """Two finished searches: one of now, and one of forty days ago."""

    def fill(folder):
        said = {"about": {"case": "net::default", "device": "a device"}}
        (folder / "search.json").write_text(json.dumps(said))

    now = Store(tmp_path / ".qdqspec/cache")
    now.put("new", fill)
    Store(now.folder, clock=lambda: now._clock() - 40 * 86400).put("old", fill)
    return now.folder


def test_list(verb, kept):
    result = verb("cache")
    head, first, second = result.out.splitlines()
    assert result.code == 0
    assert head.startswith(f"{kept}: 2 finished searches, ")
    assert first.split()[0] == "old"
    assert second.split()[0] == "new"
    assert first.endswith("net::default on a device")


def test_list_as_json(verb, kept):
    old, new = verb("cache", "list", "--json").json["entries"]
    assert (old["key"], new["key"]) == ("old", "new")
    assert old["age_seconds"] == pytest.approx(40 * 86400, abs=60)
    assert old["case"] == "net::default"
    assert old["bytes"] > 0


def test_a_damaged_entry_is_found_wanting(verb, kept):
    (kept / "old" / "search.json").write_text("{")
    result = verb("cache")
    assert result.code == 1
    assert "'search.json' is not what was put there" in result.err
    assert [entry["damage"] for entry in verb("cache", "--json").json["entries"]] == [
        "'search.json' is not what was put there",
        "",
    ]


def test_prune_removes_what_is_old(verb, kept):
    assert verb("cache", "prune", "--older-than", "50d").out == f"{kept}: 0 entries removed\n"
    assert verb("cache", "prune").out == f"{kept}: 1 entry removed\n"
    assert {path.name for path in kept.iterdir() if path.is_dir()} == {"new"}


def test_clear_removes_all(verb, kept):
    assert verb("cache", "clear", "--json").json["removed"] == 2
    assert verb("cache").out == f"{kept}: 0 finished searches, 0 B\n"


def test_no_cache_yet(verb, tmp_path):
    assert verb("cache", "--cache-dir", "none").out == f"{tmp_path / 'none'}: 0 finished searches, 0 B\n"
    assert not (tmp_path / "none").exists()


def test_an_age_needs_its_unit(verb):
    result = verb("cache", "prune", "--older-than", "30")
    assert result.code == 2
    assert "a time with its unit is expected" in result.err
