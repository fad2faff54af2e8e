"""The text of a failed check: verdict, limit, evidence, position in the spec, command; and of errors."""

from __future__ import annotations

import re

import pytest

from qdqspec._core.registry import names

SCHEME = "64d59378daa9680d"  # the scheme of the sample's winner

SPEC = """\
qdqspec: 1
model: models/squeezenet.onnx
inputs: {evaluation: evaluation.npz}
checks:
  - {kind: latency, max_ms: {onnxruntime-cpu: {p50: 4.5, p95: 5.2}}}
  - {kind: speedup, min: 2}
  - kind: parity
    min_cosine: 0.9999
  - {kind: accuracy, metric: top1, max_drop: 0.1%}
  - {kind: regression, max: 5%}
  - {kind: placement, require: {Conv: all}, forbid: ["fire1/*"], max_pairs: 10}
  - {kind: survival, through: [onnxscript, constant-folding]}
  - {kind: lint, target: [tensorrt-11, onnxruntime-cpu]}
  - {kind: size, max_bytes: 1MiB, max_ratio: 0.25}
  - {kind: builds, backend: tensorrt-rtx, for: SM86}
  - {kind: partition, max_cpu_nodes: 0}
"""

EVIDENCE = """\


from dataclasses import replace
from pathlib import Path
from qdqspec._core.registry import resolve
from qdqspec.testing.records import cached_case, faster_case
from sample_evidence import sample_builds, sample_lint, sample_survival
from qdqspec.testing.records import sample_regression

EVIDENCE = replace(
    faster_case().evidence,
    accuracy=cached_case().evidence.accuracy,
    survival=sample_survival(24),
    lint=sample_lint("tensorrt-11"),
    builds=sample_builds(),
    regression=sample_regression(0.098, looks=2),
    output=Path("reports/squeezenet/default"),
)
FakeSession.verdict = lambda _, check, __: resolve("check", check.kind).judge(check.params, EVIDENCE)
FakeSession._evidence = lambda _, case: replace(EVIDENCE, case=case)
"""


def failures(result: pytest.RunResult) -> dict[str, str]:
    """The text below each line of underscores, by the name in that line."""
    found = re.findall(r"\n_+ ([^\n]+) _+\n(.*?)(?=\n_{3,} |\n=====)", result.stdout.str(), re.DOTALL)
    return {name: f"{text}\n" for name, text in found}


def test_the_failure_text_of_every_kind_of_check(project, golden, monkeypatch) -> None:
    project.add_to_conftest(EVIDENCE)
    (project.path / "specs" / "a.qdq.yaml").unlink()
    project.spec("squeezenet.qdq.yaml", SPEC)
    monkeypatch.setenv("CI", "true")  # pytest does not truncate summary lines in CI
    shown = project.run("--qdq-seed=17")
    found = {name.removeprefix("squeezenet::default::"): text for name, text in failures(shown).items()}
    summary = dict(re.findall(r"FAILED \S+::default::([\w-]+) - (.*)", shown.stdout.str()))
    assert set(found) == set(names("check"))
    for kind, text in found.items():
        lines = text.splitlines()
        assert summary[kind] == lines[0], "the first line is the verdict"
        assert "Asked for in squeezenet.qdq.yaml:" in text
        assert re.search(r"^ +\d+ \|.*\n +\| +\^", text, re.MULTILINE), (
            "the position in the spec, with a caret"
        )
        command = f"  pytest specs/squeezenet.qdq.yaml::default::{kind} --qdq-scheme={SCHEME} --qdq-seed=17"
        assert lines[-2:] == ["Reproduce with:", command]
    golden("plugin/failures.txt", "\n".join(f"==== {kind}\n{text}" for kind, text in found.items()))


def test_only_an_internal_error_is_reported_with_its_traceback(project):
    project.outcomes(**{"int8-b8::speedup": "no model", "int8-b8::parity": "bug"})
    result = project.run()
    found = failures(result)
    assert found["a::int8-b8::speedup"] == "squeezenet.onnx: there is no such model file\n  check the path\n"
    assert "raise ZeroDivisionError" in found["a::int8-b8::parity"]
    result.stdout.fnmatch_lines(["E *ZeroDivisionError: a malfunction of ours"])


SETUP_FAILS = """
import pytest
from qdqspec.errors import ConfigError

@pytest.fixture(scope="session")
def qdq_session():
    raise ConfigError("no licence for this backend", cure="ask for one")
"""


def test_a_user_error_in_a_fixture_is_reported_without_a_traceback(project):
    (project.path / "conftest.py").write_text(SETUP_FAILS)
    result = project.run("specs/a.qdq.yaml::int8-b8::parity")
    result.assert_outcomes(errors=1)
    assert [*failures(result).values()] == ["no licence for this backend\n  ask for one\n"]


def test_the_location_of_a_failure_is_in_the_spec(project):
    project.outcomes(**{"int8-b8::parity": "fail"})
    report = project.pytester.inline_run().getfailures()[0]
    assert report.location == ("specs/a.qdq.yaml", 7, "a::int8-b8::parity")
