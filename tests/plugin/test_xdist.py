"""Runs with ``-n 2``: a case runs on one worker, and the controller shows and writes the results of all workers."""

from __future__ import annotations

import json

import pytest

from qdqspec._core.config import Settings
from qdqspec.app.plugin.state import chooses_runtimes, unit_of

pytest.importorskip("xdist", reason="pytest-xdist is not installed")


ONE_CHECK = "qdqspec: 1\nmodel: models/squeezenet.onnx\nchecks: [{kind: parity, min_sqnr_db: 25}]\n"
RUNTIMES = "qdqspec: 1\nmodel: net.onnx\nmatrix: {backend: [fake, onnxruntime]}\nchecks: [{kind: size, max_ratio: 9}]\n"


@pytest.mark.parametrize("dist", [(), ("--dist", "loadscope")], ids=["", "loadscope"])
def test_a_case_runs_on_one_worker_and_the_controller_reports_once(project, dist):
    """A spec with one check comes first, so that halves of the list of checks would divide a case."""
    project.spec("0.qdq.yaml", ONE_CHECK)
    project.pytester.makepyfile("def test_other(): pass")
    result = project.run_apart("-n", "2", *dist, "--qdq-json=record.json")
    result.assert_outcomes(passed=6)
    assert all(len(pids) == 1 for pids in project.processes().values())
    assert result.stdout.str().count("quantized models") == 1
    result.stdout.fnmatch_lines(["a::int8-b1 *1.50x*", "a::int8-b8 *1.50x*", "Report: record.json"])
    record = json.loads((project.path / "record.json").read_text())
    assert [len(case["checks"]) for case in record["cases"]] == [1, 2, 2]


def test_the_warning_of_a_worker_is_shown_by_the_controller(project):
    (project.path / "specs" / "a.qdq.yaml").unlink()
    project.spec("w.qdq.yaml", ONE_CHECK.replace("25}", "25, severity: warn}"))
    project.outcomes(**{"default::parity": "warn"})
    result = project.run_apart("-n", "1")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*specs?w.qdq.yaml:3: VerdictWarning: *"])


def test_a_spec_with_several_runtimes_is_one_scheduling_unit(tmp_path):
    (tmp_path / "several.qdq.yaml").write_text(RUNTIMES)
    (tmp_path / "one.qdq.yaml").write_text(ONE_CHECK)
    (tmp_path / "broken.qdq.yaml").write_text("qdqspec: {")

    def chooses(spec: str) -> bool:
        return chooses_runtimes(tmp_path / spec, Settings(root=tmp_path))

    assert [chooses(f"{name}.qdq.yaml") for name in ("several", "one", "broken")] == [True, False, False]
    units = {
        "several.qdq.yaml::fake::size": "several.qdq.yaml",
        "one.qdq.yaml::default::parity": "one.qdq.yaml::default",
        "test_a.py::Test::test_b[x::y]": "test_a.py::Test::test_b[x::y]",
        "broken.qdq.yaml": "broken.qdq.yaml",
    }
    assert {nodeid: unit_of(nodeid, chooses) for nodeid in units} == units


# Ctrl-C in the controller when the first test starts. Both inherit the environment of a worker that runs this test.
INTERRUPTED = """
class Interrupting:
    def pytest_runtest_logstart(self, nodeid, location):
        raise KeyboardInterrupt

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Interrupting())
"""


def test_ctrl_c_prints_how_to_resume(project):
    (project.path / "interrupting.py").write_text(INTERRUPTED)
    result = project.run_apart("-n", "2", "-p", "interrupting", "specs")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["  pytest *-n 2 -p interrupting specs"])


CRASHING = """
import os
from pathlib import Path

def pytest_runtest_setup(item):
    if item.nodeid == "specs/a.qdq.yaml::int8-b8::parity" and not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(1)
"""


def test_after_the_crash_of_a_worker_its_results_are_reported_and_the_last_check_runs(project):
    project.outcomes(**{"int8-b8::speedup": "fail"})
    project.add_to_conftest(CRASHING)
    words = ("-n", "1", "--qdq-json=record.json", "specs")
    result = project.pytester.runpytest_subprocess(*words, timeout=60)
    result.stdout.fnmatch_lines(["a::int8-b1 *2 passed", "a::int8-b8 *speedup FAIL, 1 passed"])
    record = json.loads((project.path / "record.json").read_text())
    assert [len(case["checks"]) for case in record["cases"]] == [2, 2]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
