"""The fixtures, and overriding them in a conftest."""

from __future__ import annotations

import json

import pytest

CHECK = "specs/a.qdq.yaml::int8-b8::parity"
OVERRIDES = """

from pathlib import Path
from types import SimpleNamespace


@pytest.fixture
def qdq_calibration():
    return "mine.npz"


@pytest.fixture
def qdq_metrics():
    return {"recall": lambda outputs, labels: 1.0}


@pytest.fixture
def qdq_model(qdq_session):
    return SimpleNamespace(path=Path("other.onnx"))
"""


def test_overridden_fixtures_change_the_judged_case(project):
    project.add_to_conftest(OVERRIDES)
    project.run(CHECK).assert_outcomes(passed=1)
    assert project.calls()[0] == "judge int8-b8::parity mine.npz other.onnx"
    assert (project.path / "metrics.txt").read_text() == "recall"


@pytest.mark.parametrize(
    ("body", "headline"),
    [
        ("raise OSError('no network')", "not judged: OSError: no network"),
        ("pytest.fail('old labels')", "not judged: Failed: old labels"),  # no Exception
        ("return {'x': [1.0]}", "not judged: fixture 'qdq_calibration' returned dict"),
    ],
)
def test_an_error_in_a_fixture_is_a_failed_check_of_the_record(project, body, headline):
    project.add_to_conftest(f"\n\n@pytest.fixture\ndef qdq_calibration():\n    {body}\n")
    result = project.run(CHECK, "--qdq-json=record.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["a::int8-b8 *parity FAIL"])
    (case,) = json.loads((project.path / "record.json").read_text())["cases"]
    assert [check["headline"] for check in case["checks"]] == [headline]


def test_plain_tests_about_a_case_have_the_model_and_data_of_overridden_fixtures(project):
    project.add_to_conftest(OVERRIDES)
    test = (
        f"import pytest\n\n@pytest.mark.qdq('{CHECK.rpartition('::')[0]}')\ndef test_it(qdq_latency): pass\n"
    )
    (project.path / "test_plain.py").write_text(test)
    project.run("test_plain.py").assert_outcomes(passed=1)
    assert project.calls()[0] == "evidence int8-b8 latency mine.npz other.onnx"


PLAIN_TESTS = """
import pytest


def test_budget(qdq_case):
    case = qdq_case("specs/a.qdq.yaml::int8-b8")
    assert case.latency.median_ms == 2.0
    assert case.latency.reference_ms == 3.0
    assert case.latency.speedup == 1.5
    assert case.parity.sqnr_db > 30
    assert case.search.strategy == "attribution"
    assert case.evidence.target == "fake-cpu"
    assert case.case.id == "int8-b8"


@pytest.mark.qdq("specs/a.qdq.yaml::int8-b8")
def test_all(qdq_model, qdq_regions, qdq_calibration, qdq_tuned, qdq_parity, qdq_latency, qdq_backend):
    assert qdq_model.path.name == "squeezenet.onnx"
    assert qdq_regions == ()
    assert qdq_calibration is None
    assert qdq_tuned.strategy == "attribution"
    assert qdq_parity.cosine > 0.99
    assert qdq_latency.median_ms("tuned") == 2.0
    assert qdq_backend == "onnxruntime"


def test_report(qdq_report):
    assert '"int8-b8"' in qdq_report("json")
"""


def test_fixtures_give_plain_tests_the_measurements_of_a_case(project):
    (project.path / "test_plain.py").write_text(PLAIN_TESTS)
    project.run("test_plain.py").assert_outcomes(passed=3)
    assert project.calls()[:2] == ["evidence int8-b8 latency"] * 2


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("qdq_case): qdq_case('specs/a.qdq.yaml::int-b8')", "*no case 'int-b8' (did you mean 'int8-b8'?)"),
        ("qdq_case): qdq_case('specs/a.qdq.yaml')", "*this spec has 2 cases, and one is wanted"),
        ("qdq_tuned): pass", '*mark it @pytest.mark.qdq("specs/a.qdq.yaml::case")*'),
        ("qdq_report): qdq_report('jsn')", "*unknown format 'jsn' (did you mean 'json'?)"),
    ],
)
def test_a_wrong_use_of_a_fixture_is_an_error(project, test, message):
    (project.path / "test_budget.py").write_text(f"def test_budget({test}\n")
    result = project.run("test_budget.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([message])
