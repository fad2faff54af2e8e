"""A whole search with the backend `trtexec`."""

from __future__ import annotations

import csv
import json
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from graph_text import kernels, saved

from qdqspec._core.config import Settings
from qdqspec.app.session import Session
from qdqspec.types import Case, RegionRules, TuneRules

pytestmark = pytest.mark.usefixtures("hasty")


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


@pytest.mark.usefixtures("trtexec_here")
@pytest.mark.parametrize("version", ["10.16", "11.1"])
def test_a_search_finds_the_faster_placement(install_trtexec, case, settings, version):
    install_trtexec(version)
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
    if version == "10.16":
        assert all("unstable" in trial["samples"]["notes"][0] for trial in measured), "warnings are kept"


def test_without_layer_information_regions_are_structural(install_trtexec, case, settings):
    install_trtexec(without=["--exportLayerInfo"])
    with closing(Session(settings)) as session:
        nodes = {node for region in session.regions(case) for node in region.nodes}
        assert nodes == {"conv0", "relu0", "conv1"}
        assert "regions follow structure instead" in " ".join(session.work(case).warnings)


@pytest.mark.usefixtures("trtexec_here")
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
