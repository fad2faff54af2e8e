"""Benchmarks: an audit of a real model, and continuing after an interruption (`benchmarks/resumed.py`)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_audit_of_a_real_model_has_no_fault(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    audit = importlib.import_module("audit")
    results = dict(
        zip(audit.STEPS, [*audit.row(models / "digits_resnet.onnx", 1, {})][-len(audit.STEPS) :], strict=True)
    )
    assert [text for text in results.values() if text != audit.NOTHING and not text.endswith("ok")] == []
    assert results["strips"] == audit.OK


SCRIPT = """\
import json, sys
name, made = sys.argv[1], sys.argv[3]
with open("ran.txt", "a") as log:
    log.write(name + "\\n")
if name == "broken":
    sys.exit("no such model")
if name == "slow":
    import time
    time.sleep(60)
with open(made, "w") as file:
    json.dump({"name": name}, file)
"""


def test_a_benchmark_continues_with_missing_rows_and_stops_slow_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.chdir(tmp_path)
    resumed = importlib.import_module("resumed")
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*names: str, limit_s: float = 30.0) -> list[dict[str, str]]:
        how = {"failed": lambda key, why: {"name": key, "failed": why}, "table": str, "limit_s": limit_s}
        calls, adapter = {name: [name] for name in names}, TypeAdapter(dict[str, str])
        return resumed.run_rows(tmp_path / "script.py", calls, tmp_path / "rows.json", adapter, **how)

    assert run("a") == [{"name": "a"}]
    rows = run("b", "broken", "a")
    assert rows == [{"name": "b"}, {"name": "broken", "failed": "exit 1: no such model"}, {"name": "a"}]
    assert (tmp_path / "ran.txt").read_text().split() == ["a", "b", "broken"]
    assert resumed.kept_rows(tmp_path / "rows.json").keys() == {"a", "b", "broken"}
    (slow,) = run("slow", limit_s=1.0)
    assert slow["failed"].startswith("stopped after")


# of PyTorch, NNCF, AMD Quark and ModelOpt, which are not dependencies
OWN_ENVIRONMENTS = ("architectures", "nncf_run", "peer", "quark_run")
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in OWN_ENVIRONMENTS)


def test_each_benchmark_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other checks do not cover the parts of the package that benchmarks use."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in NAMES:
        importlib.import_module(name)
