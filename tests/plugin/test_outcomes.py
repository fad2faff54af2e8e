"""Outcomes of checks as pass, failure, skip and warning."""

from __future__ import annotations

import pytest

from qdqspec.app.plugin.run import fulfils

BARE = "qdqspec: 1\nmodel: m.onnx\nchecks: [{{kind: speedup, min: 1.1{check}}}]\n{rest}\n"


@pytest.fixture
def bare(project):
    """A function that writes a spec of one check with additional keys."""
    (project.path / "specs" / "a.qdq.yaml").unlink()

    def write(rest: str = "", check: str = "") -> None:
        project.spec("b.qdq.yaml", BARE.format(rest=rest, check=check))

    return write


def test_an_inconclusive_check_is_a_skip_or_a_failure_if_conclusive_is_required(project):
    project.outcomes(**{"int8-b1::speedup": "inconclusive"})
    result = project.run("-rs")
    result.assert_outcomes(passed=3, skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED [[]1[]] specs/a.qdq.yaml:7: inconclusive: speed-up 1.08..1.13 straddles*"]
    )
    result = project.run("--qdq-require=conclusive")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["FAILED specs/a.qdq.yaml::int8-b1::speedup - inconclusive: speed-up 1.08*"])


def test_a_missing_backend_is_a_skip_or_a_failure_if_the_device_is_required(project):
    project.add_to_conftest("\n\nFakeSession.backend_usable = False\n")
    result = project.run("-rs")
    result.assert_outcomes(skipped=4)
    reason = "backend onnxruntime is not usable here: no runtime found; pip install runtime"
    result.stdout.fnmatch_lines([f"SKIPPED*{reason}"])
    result.stdout.re_match_lines(
        [r"=+ quantized models =+", r"a::int8-b1 +skipped$", rf"a::int8-b1 skipped: {reason}$"]
    )
    assert project.calls() == ["close"]
    result = project.run("--qdq-require=device", "specs/a.qdq.yaml::int8-b1::parity")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*no runtime found; pip install runtime", "It fails because of --qdq-require=device."]
    )


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("skip: waits for the new camera", "SKIPPED*waits for the new camera"),
        ("skip_unless: {backend: tensorrt}", "SKIPPED*for backend tensorrt, and this run uses onnxruntime*"),
        (
            "skip_unless: {backend: onnxruntime-cuda}",
            "*for target onnxruntime-cuda, and this run is on onnxruntime-cpu*",
        ),
        ("skip_unless: {compute_capability: '>=8.9'}", "SKIPPED*for a GPU of compute capability >=8.9*"),
    ],
)
def test_keys_of_a_spec_skip_with_the_reason(project, bare, key, reason):
    bare(key)
    result = project.run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([reason])


@pytest.mark.parametrize(
    ("value", "comparison", "holds"),
    [
        ("10.0", ">= 8.9", True),  # compared as numbers, not as text
        ("8.9", ">8.9", False),
        (None, ">=0.0", False),
    ],
)
def test_compute_capabilities_compare_as_versions(value, comparison, holds):
    assert fulfils(value, comparison) is holds


@pytest.mark.parametrize(
    ("outcome", "counts"),
    [("fail", {"xfailed": 1}), ("pass", {"failed": 1}), ("no model", {"failed": 1}), ("bug", {"failed": 1})],
)
def test_xfail_is_strict_and_applies_to_failed_checks_only(project, bare, outcome, counts):
    bare("xfail: the head is too small")
    project.outcomes(**{"default::speedup": outcome})
    result = project.run()
    result.assert_outcomes(**counts)
    if outcome == "pass":
        result.stdout.fnmatch_lines(["*XPASS(strict)*the head is too small*"])


def test_severity_warn_passes_with_a_warning_and_fails_if_warnings_are_errors(project, bare):
    bare(check=", severity: warn")
    project.outcomes(**{"default::speedup": "warn"})
    result = project.run_apart()  # in this process warnings are errors
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*specs?b.qdq.yaml:3: VerdictWarning: speed-up 1.02 < 1.10 asked for*"])
    result = project.run("-W", "error")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["speed-up 1.02 < 1.10 asked for", "*an error by filterwarnings*"])
    assert "Traceback" not in result.stdout.str()


def test_checks_not_decided_within_the_time_limit_are_inconclusive(simulated):
    (simulated.path / "specs" / "a.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: digits_resnet.onnx\nchecks: [{kind: size, max_ratio: 2}, {kind: speedup, min: 1.1}]\n"
    )
    options = ("specs", "--qdq-time-limit=0s", "-rs")
    result = simulated.runpytest_inprocess(*options)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["a::default *size inconclusive, speedup inconclusive"])
    result.stdout.fnmatch_lines(["SKIPPED*inconclusive: not decided within the time limit of 0.0 s"])
    assert not (simulated.path / "reports" / "a" / "default" / "tuned.onnx").exists()
    simulated.runpytest_inprocess(*options, "--qdq-require=conclusive").assert_outcomes(failed=2)
