"""The hooks that a conftest or another plugin implements, and errors in hooks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FINISHED = """

def pytest_qdq_case_finished(config, record):
    import os
    case, results = record.evidence.case, [f"{one.id} {one.verdict.outcome}" for one in record.results]
    with (config.rootpath / "finished.txt").open("a") as file:
        file.write(f"{case.id} {os.getpid()} {', '.join(results)}\\n")
"""
KEY = """

def pytest_qdq_device_key(config, device):
    assert device.key
    return "pool-7"
"""
BROKEN = """

def pytest_qdq_{hook}(config):
    {body}
"""


def finished(project) -> dict[str, str]:
    """The results passed to the hook, by case; each case once."""
    lines = [line.split(" ", 2) for line in (project.path / "finished.txt").read_text().splitlines()]
    assert len({case for case, _, _ in lines}) == len(lines)
    return {case: results for case, _, results in lines}


def test_a_case_is_finished_after_its_last_selected_check(project):
    project.add_to_conftest(FINISHED)
    (project.path / "specs" / "test_z.py").write_text(
        "from pathlib import Path\n"
        "def test_after():\n"
        "    assert Path('finished.txt').read_text().count('\\n') == 2\n"
    )
    project.outcomes(**{"int8-b1::speedup": "fail"})
    project.run("specs").assert_outcomes(passed=4, failed=1)
    assert finished(project) == {
        "int8-b1": "speedup fail, parity pass",
        "int8-b8": "speedup pass, parity pass",
    }
    (project.path / "finished.txt").unlink()
    project.run("specs", "-x").assert_outcomes(failed=1)
    assert finished(project) == {"int8-b1": "speedup fail"}, (
        "an incomplete case is finished at the end of the run"
    )


@pytest.mark.parametrize(
    ("hook", "body", "message", "workers"),
    [
        ("case_finished", 'raise ValueError("no host")', "raised ValueError: no host", ("-n", "2")),
        ("modify_record", 'raise ValueError("no host")', "raised ValueError: no host", ()),
        ("modify_record", "return {}", "returned {}", ()),
    ],
)
def test_an_error_in_a_hook_names_hook_and_plugin_and_keeps_results(project, hook, body, message, workers):
    project.add_to_conftest(BROKEN.format(hook=hook, body=body))
    result = project.run_apart("specs", "--qdq-json=run.json", *workers)
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines([f"*conftest.py: hook pytest_qdq_{hook} {message}"])
    assert len(json.loads((project.path / "run.json").read_text())["cases"]) == 2


@pytest.fixture
def measured(simulated):
    """A project with the simulated device and a baseline check."""
    (simulated.path / "specs" / "a.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: digits_resnet.onnx\ntune: {trials: 2}\nchecks:\n  - {kind: regression, max: 50%}\n"
    )
    return simulated


def test_the_device_key_of_a_hook_is_used_by_baselines_and_records(measured):
    (measured.path / "conftest.py").write_text(KEY)
    measured.runpytest_subprocess("--qdq-update=new", "--qdq-json=run.json").assert_outcomes(passed=1)
    assert [file.name for file in measured.path.glob("specs/__baselines__/*/*")] == ["pool-7.json"]
    (case,) = json.loads((measured.path / "run.json").read_text())["cases"]
    assert case["device"]["key"] == "pool-7"
    assert case["device"]["details"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('raise OSError("no inventory")', "raised OSError: no inventory"),
        ('return "my pool"', "returned 'my pool'"),
    ],
)
def test_an_error_in_the_device_key_hook_fails_each_check(measured, body, message):
    (measured.path / "conftest.py").write_text(BROKEN.format(hook="device_key", body=body))
    result = measured.runpytest_subprocess("specs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*conftest.py: hook pytest_qdq_device_key {message}*"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_the_hooks_of_the_page_run(project, monkeypatch, workers):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "ci.md"
    (text,) = re.findall(r"<!-- hooks -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    project.add_to_conftest(f"\n\n{text}")
    monkeypatch.setenv("GITHUB_SHA", "5ac1f00d")
    run = project.run_apart("specs", "--qdq-json=run.json", "--qdq-report=run.md", *workers)
    run.assert_outcomes(passed=4)
    lines = (project.path / "finished.log").read_text().splitlines()
    assert sorted(line.split()[:2] for line in lines) == [["a", "int8-b1"], ["a", "int8-b8"]]
    assert "5ac1f00d" in (project.path / "run.md").read_text()
    cases = json.loads((project.path / "run.json").read_text())["cases"]
    assert {case["device"]["details"]["commit"] for case in cases} == {"5ac1f00d"}
