"""Whole searches with the backend `trtexec`."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from graph_text import kernels, saved

from qdqspec._core.config import Settings
from qdqspec.app.cli import main
from qdqspec.app.session import Session
from qdqspec.types import Case, RegionRules, TuneRules

pytestmark = pytest.mark.usefixtures("trtexec_here", "hasty")


@pytest.fixture
def case(tmp_path) -> Case:
    """Two convolutions and operators that fuse with them."""
    text = """two (float[1,16,24,24] x) => (float[1,16,24,24] y) {
        [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)
        [relu0] b = Relu(a)
        [conv1] y = Conv<pads = [1, 1, 1, 1]>(b, w1)
    }"""
    path = saved(tmp_path / "two.onnx", text, **kernels(2, 16, 16, 3, 3))
    return Case(id="default", model=path, tune=TuneRules(trials=3), regions=RegionRules(by="fusion"))


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(root=tmp_path, backend="trtexec", output=Path("out"), cache_dir=Path("cache"), layout="")


def test_a_search_finds_the_faster_placement(install_trtexec, case, settings):
    install_trtexec("10.16")
    with closing(Session(settings)) as session:
        leaves = [region.nodes for region in session.regions(case) if region.type == "LEAF"]
        assert leaves == [("conv0", "relu0"), ("conv1",)], "regions are the fusions that trtexec reports"
        result = session.search(case)
    assert not result.unchanged
    assert result.winner.sites
    lines = (settings.root / "out" / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    measured = [trial for trial in trials if trial.get("samples", {}).get("wall_ms")]
    assert measured
    assert all("unstable" in trial["samples"]["notes"][0] for trial in measured), "warnings are kept"


def test_the_best_model_of_each_region_builds_with_trtexec_alone(install_trtexec, case, settings):
    tool = install_trtexec("11.1")
    rules = TuneRules(trials=5, strategy="region", region_models=True, min_sqnr_db="none")
    regions = RegionRules(by="manual", manual=(("conv0", "relu0"), ("conv1",)))
    asked = replace(case, tune=rules, regions=regions)
    with closing(Session(replace(settings, backend_option=("trtexec.args=--maxAuxStreams=0",)))) as session:
        session.search(asked)
    folder = settings.root / "out" / "regions"
    rows = list(csv.DictReader((folder / "regions.csv").read_text().splitlines()))
    assert rows
    for number, row in enumerate(rows, 1):
        assert row["file"] == f"{number}.onnx"
        pairs = [n for n in onnx.load(folder / row["file"]).graph.node if n.op_type == "DequantizeLinear"]
        assert bool(pairs) == (int(row["pairs"]) > 0)
        script = folder / f"{number}.sh"
        done = subprocess.run(["sh", script], cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        words = tool.calls()[-1]
        assert words[0] == f"--onnx={number}.onnx"
        assert {"--useCudaGraph", "--stronglyTyped", "--maxAuxStreams=0"} <= {*words}


# ---- strategy subgraph: groups, parts of dynamic shape, files, resume --------------------------------


SPEC = """\
qdqspec: 1
model: net.onnx
inputs:
  shapes: {x: {min: [1, 16, 24, 24], opt: [2, 16, 24, 24], max: [4, 16, 24, 24]}}
regions: {by: fusion, graph: engine.graph.json}
tune: {strategy: subgraph, trials: 12}
checks:
  - {kind: speedup, min: 1.1}
"""
GROUPS = [["conv0", "relu0"], ["conv1", "relu1"]]


def test_groups_of_a_file_are_timed_separately_and_combined(
    install_trtexec: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two convolutions for any number of images."""
    text = """net (float[batch,16,24,24] x) => (float[batch,16,12,12] y) {
        [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)
        [relu0] b = Relu(a)
        [conv1] c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(b, w1)
        [relu1] y = Relu(c)
    }"""
    saved(tmp_path / "net.onnx", text, **kernels(2, 16, 16, 3, 3))
    metadata = ["\x1e".join(f"[ONNX Layer: {name}]" for name in group) for group in GROUPS]
    layers = [{"Name": f"k{index}", "Metadata": told} for index, told in enumerate(metadata)]
    (tmp_path / "engine.graph.json").write_text(json.dumps({"Layers": layers, "Bindings": ["x", "y"]}))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.qdq.yaml").write_text(SPEC)
    tool = install_trtexec("10.16")
    assert main(["tune", "net.qdq.yaml", "--backend", "trtexec", "-o", "out", "--json", "--no-cache"]) == 0
    folder = tmp_path / "out" / "default"
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    parts = [tuple(line["subgraph"]) for line in trials if line.get("phase") == "isolated"]
    assert set(parts) == {tuple(group) for group in GROUPS}
    assert {line.get("phase") for line in trials} >= {"pure", "isolated", "confirm"}
    calls = [dict(word.partition("=")[::2] for word in words) for words in tool.calls()]
    builds = [(Path(words["--onnx"]).name, words) for words in calls if "--onnx" in words]
    assert "half.onnx" not in dict(builds), "the fusions were given"
    for name, words in builds:
        if not name.startswith("part-"):  # parts have the shapes of the first profile
            shapes = [words[f"--{which}Shapes"] for which in ("min", "opt", "max")]
            assert shapes == [f"x:{batch}x16x24x24" for batch in (1, 2, 4)], "the whole range of shapes"
    for model in (onnx.load(folder / name) for name in ("tuned_raw.onnx", "tuned.onnx")):
        onnx.checker.check_model(model, full_check=True)
        assert any(node.op_type == "QuantizeLinear" for node in model.graph.node)
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert json.loads((folder / "result.json").read_text())["speedup"]["ci95"][0] > 1.1
