"""``qdqspec init``: a spec that loads, with what was found in the model."""

from __future__ import annotations

import shutil

import onnx
import pytest

from qdqspec.cases import load_cases
from qdqspec.config import Settings
from qdqspec.testing.odd import ODD_MODELS

FAKE = ("--backend", "fake")
WRITABLE = [odd for odd in ODD_MODELS if odd.name != "no-nodes"]


@pytest.fixture
def project(tmp_path, models):
    for name in ("digits_resnet", "ultraface_rfb320"):
        shutil.copy(models / f"{name}.onnx", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["digits_resnet", "ultraface_rfb320"])
def test_what_it_writes(verb, project, golden, name):
    result = verb("init", f"{name}.onnx", *FAKE)
    assert result.code == 0
    assert result.out == f"{name}.qdq.yaml: run it with: pytest {name}.qdq.yaml\n"
    golden(f"cli/init-{name}.yaml", (project / f"{name}.qdq.yaml").read_text())


@pytest.mark.parametrize("odd", WRITABLE, ids=lambda odd: odd.name)
def test_the_spec_of_any_model_loads(verb, tmp_path, odd):
    onnx.save(odd.make(), tmp_path / "net.onnx")
    result = verb("init", "net.onnx", *FAKE, "--json")
    assert (result.code, result.err) == (0, "")
    (case,) = load_cases(tmp_path / result.json["output"], Settings(root=tmp_path))
    assert case.model == tmp_path / "net.onnx"
    shapes = case.inputs.profiles[0].opt()
    for name, shape in shapes.items():
        assert list(shape) == result.json["inputs"][name]


@pytest.mark.parametrize("name", ["my net.onnx", "a: b #.onnx", "true.onnx", "größe[1].qdq.onnx", "7.onnx"])
def test_file_names_are_quoted_where_yaml_needs_it(verb, project, name):
    (project / "digits_resnet.onnx").rename(project / name)
    output = verb("init", name, *FAKE, "--json").json["output"]
    assert load_cases(project / output, Settings(root=project))[0].model == project / name


def test_what_is_there_is_never_overwritten(verb, project):
    (project / "digits_resnet.qdq.yaml").write_text("mine")
    result = verb("init", "digits_resnet.onnx", *FAKE)
    assert result.code == 2
    assert "there is a spec already, and it is not overwritten" in result.err
    assert (project / "digits_resnet.qdq.yaml").read_text() == "mine"


def test_it_may_stand_elsewhere_and_still_finds_the_model(verb, project):
    (project / "specs").mkdir()
    assert verb("init", "digits_resnet.onnx", *FAKE, "-o", "specs/d.qdq.yaml").code == 0
    (case,) = load_cases(project / "specs" / "d.qdq.yaml", Settings(root=project))
    assert case.model == project / "digits_resnet.onnx"


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("spec.yaml", "pytest collects a spec by its ending"),
        ("nowhere/d.qdq.yaml", "the spec cannot be written: No such file"),
    ],
)
def test_an_output_that_cannot_be_is_refused(verb, project, output, says):
    result = verb("init", "digits_resnet.onnx", *FAKE, "-o", output)
    assert result.code == 2
    assert says in result.err


def test_a_model_outside_says_what_the_run_needs(verb, project, models):
    result = verb("init", models / "squeezenet10.onnx", *FAKE)
    assert result.code == 0
    assert f"--qdq-allow-path={models}" in result.out
    settings = Settings(root=project, allow_path=(models,))
    assert load_cases(project / "squeezenet10.qdq.yaml", settings)[0].model == models / "squeezenet10.onnx"


def test_a_model_that_is_not_there(verb):
    result = verb("init", "gone.onnx", *FAKE)
    assert result.code == 2
    assert "gone.onnx: there is no such model file" in result.err
