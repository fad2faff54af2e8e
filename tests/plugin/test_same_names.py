"""Two specs of one file name in different folders have separate results, baselines and names in tables."""

from __future__ import annotations

import json
import shutil

import pytest

SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
title: {folder}
tune: {{trials: 1}}
checks: [{{kind: size, max_ratio: 2}}, {{kind: regression, max: 50%}}]
"""
REPORTS = ("--qdq-json=record.json", "--qdq-report=page.html", "--qdq-report=page.md")


@pytest.fixture
def twins(pytester, models):
    """``a/net.qdq.yaml`` and ``b/net.qdq.yaml`` on the simulated device."""
    (pytester.path / "pyproject.toml").write_text('[tool.qdqspec]\nbackend = "fake"\n')
    for folder in ("a", "b"):
        (pytester.path / folder).mkdir()
        shutil.copy(models / "digits_resnet.onnx", pytester.path / folder)
        (pytester.path / folder / "net.qdq.yaml").write_text(SPEC.format(folder=f"of {folder}"))
    return pytester


def titles(project):
    """The title in ``result.json`` of each report folder."""
    return {
        file.parent.parent.name: json.loads(file.read_text())["title"]
        for file in (project.path / "reports").rglob("result.json")
    }


@pytest.mark.usefixtures("engine_threads")
def test_specs_of_one_name_have_separate_results_and_baselines(twins):
    result = twins.runpytest_inprocess("a", "b", "--qdq-update=new", *REPORTS)
    result.assert_outcomes(passed=4)
    assert titles(twins) == {"net": "of a", "net.b": "of b"}
    result.stdout.fnmatch_lines(["a/net::default *", "b/net::default *"])
    record = json.loads((twins.path / "record.json").read_text())
    assert [case["spec"] for case in record["cases"]] == ["a/net.qdq.yaml", "b/net.qdq.yaml"]
    for folder in ("a", "b"):
        assert (twins.path / folder / "__baselines__" / "net" / "fake.json").is_file()
    # A run of one spec writes to its folder and uses its cached winner.
    twins.runpytest_inprocess("b").assert_outcomes(passed=2)
    assert titles(twins) == {"net": "of a", "net.b": "of b"}

    assert "<h2>b/net::default</h2>" in (twins.path / "page.html").read_text()
    assert "## b/net::default" in (twins.path / "page.md").read_text()
