"""The options ``--qdq-*``, the variables ``QDQSPEC_*`` and the table ``[tool.qdqspec]`` in pytest runs."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--qdq-mode=rum", "*--qdq-mode: 'rum' does not fit: *did you mean 'run'?*"),
        ("--qdq-time-limit=20", "*--qdq-time-limit: '20' does not fit: a time with its unit*"),
        ("--qdq-bakend=fake", "*unknown option '--qdq-bakend' (did you mean '--qdq-backend'?)*"),
        ("--qdq-report=out.xyz", "*no report format is known by the suffix '.xyz'"),
    ],
)
def test_an_invalid_option_is_a_usage_error(project, option, message):
    result = project.run(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert project.calls() == []
    assert "Traceback" not in result.stderr.str()


@pytest.mark.parametrize(
    "option",
    [
        "--qdq-plugin=evil.so",
        "--qdq-trtexec-args=--dynamicPlugins=evil.so",
        "--qdq-backend-option=onnxruntime.plugins=evil.so",
        "--qdq-cluster=tls://evil:8786",
    ],
)
@pytest.mark.parametrize("place", ["file", "variable"])
def test_options_that_load_native_code_are_an_error_in_addopts(project, monkeypatch, option, place):
    if place == "file":
        (project.path / "pyproject.toml").write_text(f'[tool.pytest]\naddopts = ["{option}"]\n')
    else:
        monkeypatch.setenv("PYTEST_ADDOPTS", option)
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*of addopts: *command line*"])


def test_the_header_shows_the_settings_of_the_file_and_of_flags(project):
    with (project.path / "pyproject.toml").open("a") as file:
        file.write('[tool.qdqspec]\nthreads = 3\ncache_dir = "kept"\n')
    project.run().stdout.fnmatch_lines(["qdqspec: onnxruntime, 3 threads, mode run, cache kept"])
    shown = project.run("--qdq-threads=5", "--qdq-no-cache").stdout
    shown.fnmatch_lines(["qdqspec: onnxruntime, 5 threads, mode run, no cache"])


def test_an_unknown_variable_is_an_error_if_specs_are_collected(project, monkeypatch):
    monkeypatch.setenv("QDQSPEC_THREDS", "4")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*unknown environment variable QDQSPEC_THREDS (did you mean 'QDQSPEC_THREADS'?)*"]
    )
