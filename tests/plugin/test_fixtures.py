"""The fixtures, and overriding them in a conftest."""

from __future__ import annotations

import pytest

CHECK = "specs/a.qdq.yaml::int8-b8::parity"


def test_overriding_calibration_changes_the_judged_case(project):
    project.add_to_conftest("\n\n@pytest.fixture\ndef qdq_calibration():\n    return 'mine.npz'\n")
    project.run(CHECK).assert_outcomes(passed=1)
    assert project.calls()[0] == "judge int8-b8::parity mine.npz squeezenet.onnx"


METRICS = """

@pytest.fixture
def qdq_metrics():
    return {"recall": lambda outputs, labels: 1.0}
"""


def test_overriding_the_metrics_applies_to_specs_and_plain_tests(project):
    project.add_to_conftest(METRICS)
    (project.path / "test_case.py").write_text(
        "def test_case(qdq_case):\n"
        "    assert list(qdq_case('specs/a.qdq.yaml::int8-b8').case.metrics) == ['recall']\n"
    )
    project.run(CHECK, "test_case.py").assert_outcomes(passed=2)
    assert (project.path / "metrics.txt").read_text() == "recall"


OTHER_MODEL = """

from pathlib import Path
from types import SimpleNamespace


@pytest.fixture
def qdq_model(qdq_session):
    return SimpleNamespace(path={path})
"""


@pytest.mark.parametrize("path", ["Path('other.onnx')", "None"])
def test_overriding_the_model_changes_the_judged_case(project, path):
    project.add_to_conftest(OTHER_MODEL.format(path=path))
    result = project.run(CHECK)
    if path == "None":
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["a::int8-b8: the model that fixture 'qdq_model' gave has no file"])
    else:
        result.assert_outcomes(passed=1)
        assert project.calls()[0] == "judge int8-b8::parity - other.onnx"


CASE_TEST = """
def test_budget(qdq_case):
    case = qdq_case("specs/a.qdq.yaml::int8-b8")
    assert case.latency.median_ms == 2.0
    assert case.latency.reference_ms == 3.0
    assert case.latency.speedup == 1.5
    assert case.parity.sqnr_db > 30
    assert case.search.strategy == "attribution"
    assert case.evidence.target == "fake-cpu"
    assert case.case.id == "int8-b8"
"""


def test_qdq_case_in_a_plain_test(project):
    (project.path / "test_budget.py").write_text(CASE_TEST)
    project.run("test_budget.py").assert_outcomes(passed=1)
    assert project.calls()[:2] == ["evidence int8-b8 latency"] * 2


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("qdq_case): qdq_case('specs/a.qdq.yaml::int-b8')", "*no case 'int-b8' (did you mean 'int8-b8'?)"),
        ("qdq_case): qdq_case('specs/a.qdq.yaml')", "*means 2 cases, and one is wanted"),
        ("qdq_tuned): pass", '*mark it @pytest.mark.qdq("specs/a.qdq.yaml::case")*'),
    ],
)
def test_a_fixture_without_one_case_is_an_error(project, test, message):
    (project.path / "test_budget.py").write_text(f"def test_budget({test}\n")
    result = project.run("test_budget.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([message])


MARKED_TEST = """
import pytest


@pytest.mark.qdq("specs/a.qdq.yaml::int8-b8")
def test_all(qdq_model, qdq_regions, qdq_calibration, qdq_tuned, qdq_parity, qdq_latency, qdq_backend):
    assert qdq_model.path.name == "squeezenet.onnx"
    assert qdq_regions == ()
    assert qdq_calibration is None
    assert qdq_tuned.strategy == "attribution"
    assert qdq_parity.cosine > 0.99
    assert qdq_latency.median_ms("tuned") == 2.0
    assert qdq_backend == "onnxruntime"
"""


def test_case_fixtures_in_a_marked_test(project):
    (project.path / "test_marked.py").write_text(MARKED_TEST)
    project.run("test_marked.py").assert_outcomes(passed=1)


def test_qdq_report_renders_the_judged_cases(project):
    (project.path / "test_report.py").write_text(
        "def test_report(qdq_report):\n    assert '\"int8-b8\"' in qdq_report('json')\n"
        "def test_wrong(qdq_report):\n    qdq_report('jsn')\n"
    )
    result = project.run(CHECK, "test_report.py")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*unknown format 'jsn' (did you mean 'json'?)"])
