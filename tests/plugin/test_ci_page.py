"""The workflow of docs/how-to/ci.md is valid, and its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "ci.md").read_text(encoding="utf-8")
SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 1}
checks: [{kind: speedup, min: 1.01}, {kind: speedup, min: 40}]
"""


def workflow():
    (text,) = re.findall(r"<!-- workflow -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    return yaml.safe_load(text)


def commands():
    return [step["run"] for step in workflow()["jobs"]["gate"]["steps"] if "run" in step]


def test_the_workflow_of_the_page_is_valid():
    found = workflow()
    assert found[True] == ["push", "pull_request"]  # YAML 1.1 reads the key `on` as true
    steps = found["jobs"]["gate"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+(/[\w-]+)?@v\d+", step["uses"]) for step in steps if "uses" in step
    )
    names = {step["id"] for step in steps if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.", str(found))) <= names
    restored, saved = (step for step in steps if "/cache" in step.get("uses", ""))
    assert saved["if"] == "always()"  # the next run after a failure must not search again
    for step in (restored, saved):
        assert step["with"]["path"] == ".qdqspec/cache"
        assert step["with"]["key"] == restored["with"]["key"]


@pytest.mark.parametrize(
    ("words", "spec", "code"),
    [
        ("--qdq-mode=plan", SPEC, 0),
        ("", SPEC, 1),
        ("", SPEC.replace("checks", "cheks"), 2),
        ("--qdq-mode=mesure", SPEC, 4),
        ("-k nothing", SPEC, 5),
        ("-m 'not tune'", SPEC, 5),
    ],
)
def test_the_exit_codes_of_the_page(simulated, words, spec, code):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(spec)
    assert simulated.runpytest_inprocess("specs", *shlex.split(words)).ret == code


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_the_commands_of_the_workflow_run(simulated, monkeypatch, tmp_path, workers):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(SPEC)
    for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    install, key, gate = commands()
    assert install == "pip install qdqspec"  # the package is installed already
    subprocess.run(key, shell=True, check=True, timeout=120, cwd=simulated.path)
    assert re.fullmatch(r"key=[0-9a-f]{16}\n", (tmp_path / "GITHUB_OUTPUT").read_text())
    _, *words = shlex.split(gate)
    run = simulated.runpytest_subprocess(*words, *workers)
    run.assert_outcomes(passed=1, failed=1)
    run.stdout.fnmatch_lines(
        ["::error file=specs/net.qdq.yaml,line=4,title=net%3A%3Adefault%3A%3Aspeedup-2::*"]
    )
    assert "# Quantized models" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert (simulated.path / "run.json").is_file()
