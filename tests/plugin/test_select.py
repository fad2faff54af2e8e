"""The options ``-k``, ``-m`` and ``--lf`` apply to checks."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("squeezenet", 4),  # the model's stem
        ("vision and smoke", 4),  # tags
        ("b8 and speedup", 1),
        ("not vision", 0),
    ],
)
def test_k_selects_by_model_format_tags_and_kind(project, expression, count):
    project.run("-k", expression).assert_outcomes(passed=count, deselected=4 - count)


@pytest.mark.parametrize("marker", ["qdq", "tune"])
def test_m_selects_checks_among_tests(project, marker):
    (project.path / "test_plain.py").write_text("def test_plain(): pass\n")
    project.run("-m", marker).assert_outcomes(passed=4, deselected=1)
    project.run("-m", f"not {marker}").assert_outcomes(passed=1, deselected=4)


def test_markers_are_registered(project):
    run = project.run("--markers")
    run.stdout.fnmatch_lines(["@pytest.mark.qdq(case): *", "@pytest.mark.tune: *"])
    run.stdout.no_fnmatch_line("@pytest.mark.gpu*")  # general names are left to the user's project
    run.stdout.no_fnmatch_line("@pytest.mark.slow*")


def test_lf_runs_the_failed_check_alone(project):
    project.outcomes(**{"int8-b8::speedup": "fail"})
    project.run().assert_outcomes(passed=3, failed=1)
    project.run("--lf").assert_outcomes(failed=1)
    project.outcomes()
    project.run("--lf").assert_outcomes(passed=1)
