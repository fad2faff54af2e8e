"""Collected files, their nodes and ids, and their selection by ``-k`` and ``-m``."""

from __future__ import annotations

import pytest

IDS = [
    "specs/a.qdq.yaml::int8-b1::speedup",
    "specs/a.qdq.yaml::int8-b1::parity",
    "specs/a.qdq.yaml::int8-b8::speedup",
    "specs/a.qdq.yaml::int8-b8::parity",
]


def ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_tree_and_ids_are_file_case_check(project):
    assert ids(project.run("--collect-only", "-q")) == IDS
    project.run("--collect-only", "specs").stdout.fnmatch_lines(
        ["*<SpecFile a.qdq.yaml>", "*<CaseNode int8-b1>", "*<CheckItem speedup>", "*<CheckItem parity>"]
    )


@pytest.mark.parametrize("node", ["int8-b8", "int8-b8::parity"])
def test_a_case_or_check_is_selected_by_its_id(project, node):
    assert ids(project.run(f"specs/a.qdq.yaml::{node}", "--collect-only", "-q")) == [
        one for one in IDS if f"::{node}" in one
    ]


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("int8-b88", "there is no case 'int8-b88' (did you mean 'int8-b8'?)"),
        ("int8-b8::party", "has no check 'party' (did you mean 'parity'?): it has speedup, parity"),
    ],
)
def test_a_misspelt_id_lists_what_the_spec_has(project, node, said):
    result = project.run(f"specs/a.qdq.yaml::{node}")
    assert said in result.stdout.str()
    assert "no spec found" not in result.stdout.str()


ONE = "# by hand\nqdqspec: 1\nmodel: m.onnx\nchecks: [{kind: speedup, min: 1.1}]\n"


@pytest.mark.parametrize(
    ("name", "text", "argument", "is_collected"),
    [
        ("b.qdq.yml", ONE, "specs", True),
        ("b.yaml", ONE, "specs", False),
        ("b.yaml", ONE, "specs/b.yaml", False),
    ],
)
def test_specs_are_collected_by_suffix(project, name, text, argument, is_collected):
    project.spec(name, text)
    found = ids(project.run("--collect-only", "-q", argument))
    assert (f"specs/{name}::default::speedup" in found) is is_collected
    assert [one for one in found if one not in IDS][is_collected:] == []


def test_an_invalid_spec_is_an_error_of_that_file_only(project):
    project.spec("b.qdq.yaml", "qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: speedupp, min: 1.1}]\n")
    assert project.run().ret == pytest.ExitCode.INTERRUPTED
    assert project.calls() == []
    result = project.run("--continue-on-collection-errors")
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(
        ["ERROR specs/b.qdq.yaml - specs/b.qdq.yaml:3:17: unknown check kind 'speedupp'*"]
    )
    assert "Traceback" not in result.stdout.str()
    assert ".py:" not in result.stdout.str()


@pytest.mark.parametrize(
    "words",
    [
        'model="m.onnx", inputs={"calibration": "/etc/passwd"}',
        'model="m.onnx", regions={"by": "fusion", "graph": "../layers.json"}',
    ],
)
def test_a_path_outside_the_root_in_a_python_spec_is_an_error(project, words):
    text = f"""\
from qdqspec import Spec
far = Spec({words}, checks=[{{"kind": "speedup", "min": 1.1}}])
"""
    project.spec("spec_far.py", text)
    result = project.run("specs/spec_far.py")
    result.stdout.fnmatch_lines(["*'far'*leads out of the root directory*", "*--qdq-allow-path*"])
    result.assert_outcomes(errors=1)
    allowed = project.run("specs/spec_far.py", "--collect-only", "-q", "--qdq-allow-path=/")
    assert "specs/spec_far.py::far::speedup" in ids(allowed)


SPEC_MODULE = """\
from qdqspec import Spec

squeeze = Spec(model="m.onnx", checks=[{"kind": "speedup", "min": 1.2}])
wide = Spec(model="m.onnx", matrix={"batch": [1, 8]}, checks=[{"kind": "speedup", "min": 1.2}])
unrelated = 3


def test_ordinary():
    pass
"""


def test_a_python_spec_may_be_a_link(project, tmp_path_factory):
    module = tmp_path_factory.mktemp("elsewhere") / "spec_nets.py"
    module.write_text(SPEC_MODULE)
    (project.path / "specs" / "spec_nets.py").symlink_to(module)
    assert "specs/spec_nets.py::squeeze::speedup" in ids(project.run("--collect-only", "-q", "specs"))


@pytest.mark.parametrize("arguments", [["specs"], ["specs", "specs/spec_nets.py"]])
def test_python_specs_and_their_tests_are_collected_once_and_run(project, arguments):
    project.spec("spec_nets.py", SPEC_MODULE)
    found = ids(project.run("--collect-only", "-q", *arguments))
    assert [one for one in found if "spec_nets" in one] == [
        "specs/spec_nets.py::squeeze::speedup",
        "specs/spec_nets.py::wide-b1::speedup",
        "specs/spec_nets.py::wide-b8::speedup",
        "specs/spec_nets.py::test_ordinary",
    ]
    project.run("specs/spec_nets.py").assert_outcomes(passed=4)
    assert [call.split()[1] for call in project.calls() if call.startswith("judge")] == [
        "squeeze::speedup",
        "wide-b1::speedup",
        "wide-b8::speedup",
    ]


HEAVY = (
    "onnx", "numpy", "scipy", "onnxruntime", "tensorrt", "torch", "rich", "tabulate", "polygraphy",
    "hypothesis.strategies",
)  # fmt: skip

LIST_LOADED = f"""\
import sys


def pytest_sessionfinish():
    loaded = [name for name in {HEAVY} if name in sys.modules]
    print("LOADED", loaded)
"""


def test_collecting_a_spec_loads_no_heavy_module(project):
    (project.path / "conftest.py").write_text(LIST_LOADED)
    result = project.run_apart("--collect-only", "-s", "specs")
    result.stdout.fnmatch_lines(["*CheckItem speedup*", "*LOADED [[][]]*"])


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
