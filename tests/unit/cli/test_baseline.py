"""``qdqspec baseline``: list, show, prune."""

from __future__ import annotations

import pytest
from baseline_entries import entry_of

from qdqspec.checks.baselines import read_baseline, update_baseline
from qdqspec.types import Interval

SPEC = """\
qdqspec: 1
model: net.onnx
checks:
  - {kind: regression, max: 5%}
  - {kind: regression, id: tight, max: 1%, severity: warn}
"""
ENTRY = entry_of()
IN_USE = {("default", "regression"): ENTRY, ("default", "tight"): ENTRY}


@pytest.fixture
def specs(tmp_path):
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "net.qdq.yaml").write_text(SPEC)
    update_baseline(folder / "__baselines__" / "net" / "d.json", "device d", IN_USE)
    return folder


@pytest.fixture
def outdated(specs):
    """Specs, and baselines with entries of a check, a case and a spec that do not exist."""
    file = specs / "__baselines__" / "net" / "d.json"
    update_baseline(file, "device d", {("default", "loose"): ENTRY, ("b8", "regression"): ENTRY})
    update_baseline(specs / "__baselines__" / "gone" / "d.json", "device d", IN_USE)
    return specs


def test_list_shows_entries_in_use(verb, specs):
    result = verb("baseline", "list")
    assert result.code == 0
    assert result.out.splitlines() == [
        "specs/__baselines__/net/d.json",
        "  device device d",
        "  default::regression  0.574 (0.564 to 0.584)  2026-01-08T14:00:00+00:00  in use",
        "  default::tight  0.574 (0.564 to 0.584)  2026-01-08T14:00:00+00:00  in use",
    ]


def test_show_prints_the_conditions_and_the_former_figures_of_an_entry(verb, specs):
    changed = {"ratio": Interval(median=0.4, low=0.39, high=0.41), "recorded": "2026-02-09"}
    new = ENTRY.model_copy(update={**changed, "rules": {**ENTRY.rules, "tune.accuracy": None}})
    renewed = new.after(ENTRY, ("onnxruntime: was 1.30.2, is 1.31.1",))
    file = specs / "__baselines__" / "net" / "d.json"
    update_baseline(file, "device d", {("default", "regression"): renewed})
    assert verb("baseline", "show", "specs/net.qdq.yaml").out.splitlines()[2:11] == [
        "  default::regression  0.400 (0.390 to 0.410)  2026-02-09  in use",
        f"    model: {'a' * 64}",
        "    clock: wall",
        "    scheme: 0123",
        "    rule quantize.format: int8",
        "    rule tune.accuracy: none",
        "    onnxruntime: 1.31.1",
        "      changed: onnxruntime: was 1.30.2, is 1.31.1",
        "    before: 0.574 (0.564 to 0.584)  2026-01-08T14:00:00+00:00",
    ]


def test_obsolete_entries_give_exit_code_1(verb, outdated):
    result = verb("baseline", "list", "specs", "--json")
    assert result.code == 1
    assert {(row["case"], row["check"], row["state"]) for row in result.json["entries"]} == {
        ("default", "regression", "in use"),
        ("default", "tight", "in use"),
        ("default", "loose", "obsolete"),
        ("b8", "regression", "obsolete"),
        ("default", "regression", "obsolete"),  # of the spec that does not exist
        ("default", "tight", "obsolete"),
    }


def test_prune_removes_only_obsolete_entries(verb, outdated):
    result = verb("baseline", "prune", "specs")
    assert result.code == 0
    assert result.out.count("removed") == 4
    known = read_baseline(outdated / "__baselines__" / "net" / "d.json")
    assert known is not None
    assert {name: known.entry(name) for name in known.names()} == IN_USE
    assert not (outdated / "__baselines__" / "gone" / "d.json").exists()
    assert verb("baseline", "prune", "specs").out == "nothing is obsolete\n"


def test_a_damaged_file_is_reported_and_the_others_are_listed(verb, specs):
    damaged = specs / "__baselines__" / "net" / "e.json"
    damaged.write_text('{"schema_version": 1')
    result = verb("baseline", "list")
    assert result.code == 1
    assert "default::regression" in result.out
    assert "specs/__baselines__/net/e.json: this is not a baseline" in result.err
    verb("baseline", "prune")
    assert damaged.exists()


def test_entries_of_a_python_spec_are_not_reported_as_obsolete(verb, specs):
    (specs / "spec_net.py").write_text("raise RuntimeError('not to be run')")
    update_baseline(specs / "__baselines__" / "spec_net" / "d.json", "device d", IN_USE)
    assert verb("baseline", "list", "specs").code == 0


def test_no_baseline_is_reported_with_the_option_that_writes_one(verb, tmp_path):
    assert verb("baseline", "list").out == "no baseline found; pytest --qdq-update=new writes them\n"
    assert verb("baseline", "list", "nowhere").code == 2
