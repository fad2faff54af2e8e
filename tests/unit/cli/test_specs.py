"""``qdqspec list``: the cases of specs, and all entries of a kind; ``qdqspec baseline``: list, show, prune."""

from __future__ import annotations

import pytest
from baseline_entries import entry_of

from qdqspec._core import registry
from qdqspec.app.evidence.baselines import read_baseline, update_baseline
from qdqspec.types import Interval

SPEC = """\
qdqspec: 1
model: m.onnx
title: Door camera
tags: [vision]
matrix: {quant: [int8], batch: [1, 8]}
tune: {trials: 12}
checks:
  - {kind: speedup, min: 1.1}
  - {kind: parity, min_sqnr_db: 25, severity: warn}
"""


@pytest.fixture
def specs(tmp_path):
    (tmp_path / "specs" / ".hidden").mkdir(parents=True)
    (tmp_path / "specs" / "a.qdq.yaml").write_text(SPEC)
    (tmp_path / "specs" / ".hidden" / "b.qdq.yaml").write_text(SPEC)
    (tmp_path / "specs" / "other.yaml").write_text("a: 1\n")
    return tmp_path / "specs"


@pytest.mark.parametrize("where", [[], ["specs", "specs/a.qdq.yaml"]])
def test_cases_are_listed_with_their_checks(verb, specs, where):
    result = verb("list", *where)
    assert result.code == 0
    assert result.out == (
        "specs/a.qdq.yaml::int8-b1  Door camera\n  speedup: {min: 1.1}\n  parity: {min_sqnr_db: 25.0}\n"
        "specs/a.qdq.yaml::int8-b8  Door camera\n  speedup: {min: 1.1}\n  parity: {min_sqnr_db: 25.0}\n"
    )


def test_a_budget_is_listed_as_a_spec_writes_it(verb, specs):
    (specs / "a.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: latency, max_ms: {fake: 9, tensorrt: {p50: 1, p99: 2}}}]\n"
    )
    assert "latency: {max_ms: {fake: 9.0, tensorrt: {p50: 1.0, p99: 2.0}}}" in verb("list", "specs").out


def test_json_has_cases_and_checks(verb, specs):
    found = verb("list", "specs", "--json").json
    case = found["cases"][1]
    assert (case["id"], case["model"]) == ("specs/a.qdq.yaml::int8-b8", "specs/m.onnx")
    assert (case["tags"], case["tune"]["trials"]) == (["vision"], 12)
    assert case["checks"][1] == {
        "id": "parity", "kind": "parity", "severity": "warn", "line": 9,
        "params": {"min_sqnr_db": 25.0, "severity": "warn"},
    }  # fmt: skip


def test_the_other_specs_are_listed_beside_a_wrong_one(verb, specs):
    (specs / "c.qdq.yaml").write_text("qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: speedupp}]\n")
    result = verb("list", "specs", "--json")
    assert result.code == 2
    assert len(result.json["cases"]) == 2
    assert "specs/c.qdq.yaml:3:17: unknown check kind 'speedupp'" in result.err


@pytest.mark.parametrize(
    ("word", "kind"),
    [("backends", "backend"), ("strategies", "strategy"), ("checks", "check"), ("formats", "format")],
)
def test_list_with_a_kind_prints_its_names(verb, word, kind):
    result = verb("list", word, "--json")
    assert result.code == 0
    known = [*registry.names(kind), *(["github"] if word == "formats" else [])]
    assert [entry["name"] for entry in result.json["entries"]] == known
    assert all(entry["about"] for entry in result.json["entries"])
    lines = verb("list", word).out.splitlines()
    assert [line.split()[0] for line in lines[: len(known)]] == known
    more = [line[:40] for line in lines[len(known) :]]
    assert more == (["number formats of --quant: int8, uint8, "] if word == "formats" else [])


# ---- baseline ------------------------------------------------------------------------------------

BASELINE_SPEC = """\
qdqspec: 1
model: net.onnx
checks:
  - {kind: regression, max: 5%}
  - {kind: regression, id: tight, max: 1%, severity: warn}
"""
ENTRY = entry_of()
IN_USE = {("default", "regression"): ENTRY, ("default", "tight"): ENTRY}


@pytest.fixture
def baselines(tmp_path):
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "net.qdq.yaml").write_text(BASELINE_SPEC)
    (folder / "result.json").touch()  # no baseline
    update_baseline(folder / "__baselines__" / "net" / "d.json", "device d", IN_USE)
    return folder


@pytest.fixture
def outdated(baselines):
    """Specs, and baselines with entries of a check, a case and a spec that do not exist."""
    file = baselines / "__baselines__" / "net" / "d.json"
    update_baseline(file, "device d", {("default", "loose"): ENTRY, ("b8", "regression"): ENTRY})
    update_baseline(baselines / "__baselines__" / "gone" / "d.json", "device d", IN_USE)
    return baselines


def test_list_shows_entries_in_use(verb, baselines):
    result = verb("baseline", "list")
    assert result.code == 0
    assert result.out.splitlines() == [
        "specs/__baselines__/net/d.json",
        "  device device d",
        "  default::regression  0.574 (0.564 to 0.584)  2026-01-08T14:00:00+00:00  in use",
        "  default::tight  0.574 (0.564 to 0.584)  2026-01-08T14:00:00+00:00  in use",
    ]


def test_show_prints_the_conditions_and_the_former_figures_of_an_entry(verb, baselines):
    changed = {"ratio": Interval(median=0.4, low=0.39, high=0.41), "recorded": "2026-02-09"}
    new = ENTRY.model_copy(update={**changed, "rules": {**ENTRY.rules, "tune.accuracy": None}})
    renewed = new.after(ENTRY.model_copy(update={"environment": {"onnxruntime": "1.30.2"}}))
    file = baselines / "__baselines__" / "net" / "d.json"
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
    assert {name: known.entry(name) for name in known.names()} == IN_USE
    assert not (outdated / "__baselines__" / "gone" / "d.json").exists()
    assert verb("baseline", "prune", "specs").out == "nothing is obsolete\n"


def test_a_damaged_file_is_reported_and_the_others_are_listed(verb, baselines):
    damaged = baselines / "__baselines__" / "net" / "e.json"
    damaged.write_text('{"schema_version": 1')
    result = verb("baseline", "list")
    assert result.code == 1
    assert "default::regression" in result.out
    assert "specs/__baselines__/net/e.json: this is not a baseline" in result.err
    verb("baseline", "prune")
    assert damaged.exists()


def test_entries_of_a_python_spec_are_not_reported_as_obsolete(verb, baselines):
    (baselines / "spec_net.py").write_text("raise RuntimeError('not to be run')")
    update_baseline(baselines / "__baselines__" / "spec_net" / "d.json", "device d", IN_USE)
    assert verb("baseline", "list", "specs").code == 0


def test_no_baseline_is_reported_with_the_option_that_writes_one(verb, tmp_path):
    assert verb("baseline", "list").out == "no baseline found; pytest --qdq-update=new writes them\n"
