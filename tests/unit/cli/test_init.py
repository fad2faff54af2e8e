"""``qdqspec init``: the spec that it writes loads, and has the inputs, data and formats that it found."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest
from odd import ODD_MODELS
from onnx_text import saved

from qdqspec._core.config import Settings
from qdqspec.accuracy.case_data import CaseData
from qdqspec.app.cases import load_cases
from qdqspec.backends.fake import engine as fake
from qdqspec.graph.given import cautions
from qdqspec.graph.model import load_model

FAKE = ("--backend", "fake")
WRITABLE = [odd for odd in ODD_MODELS if odd.name != "no-nodes"]


@pytest.fixture
def project(tmp_path, models):
    for name in ("digits_resnet", "ultraface_rfb320"):
        shutil.copy(models / f"{name}.onnx", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["digits_resnet", "ultraface_rfb320"])
def test_the_written_spec(verb, project, golden, name):
    result = verb("init", f"{name}.onnx", *FAKE)
    assert result.code == 0
    assert result.out == f"{name}.qdq.yaml: run it with: pytest {name}.qdq.yaml\n"
    golden(f"cli/init-{name}.yaml", (project / f"{name}.qdq.yaml").read_text())


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("int64[batch] lengths, float[batch,width] x", {"lengths": [1], "x": [1, 16]}),  # one size a name
        ("float[n,audio_length] x", {"x": [1, 16000]}),  # 16 are shorter than the first window of a network
        ("float[n,features] x", {"x": [1, 16]}),
    ],
)
def test_the_proposed_sizes_follow_from_the_names_of_dimensions(verb, tmp_path, inputs, expected):
    saved(tmp_path / "net.onnx", f"net ({inputs}) => (float[a,b] y) {{ y = Relu(x) }}")
    assert verb("init", "net.onnx", *FAKE, "--json").json["inputs"] == expected


def test_nothing_is_timed_on_a_backend_without_a_clock(verb, project, monkeypatch):
    known = fake.FakeDevice.capabilities
    monkeypatch.setattr(
        fake.FakeDevice, "capabilities", lambda *words: replace(known(*words), has_clock=False)
    )
    assert verb("init", "digits_resnet.onnx", *FAKE).code == 0
    (case,) = load_cases(project / "digits_resnet.qdq.yaml", Settings(root=project))
    assert case.tune.objective == "coverage"
    assert [check.kind for check in case.checks] == ["builds", "parity"]
    text = (project / "digits_resnet.qdq.yaml").read_text()
    assert not re.search("kind: (latency|regression|speedup)", text)


def test_nothing_that_must_fail_is_proposed_for_a_model_without_quantizable_operators(verb, tmp_path):
    saved(tmp_path / "net.onnx", "net (float[4] x) => (float[4] y) { y = Cos(x) }")
    assert verb("init", "net.onnx", *FAKE).code == 0
    written = (tmp_path / "net.qdq.yaml").read_text()
    assert not re.search("speedup|quant: |deny|Softmax", written)
    (case,) = load_cases(tmp_path / "net.qdq.yaml", Settings(root=tmp_path))
    assert [check.kind for check in case.checks] == ["parity"]


OPTION = re.compile(r"^( *)# (?=\S)")


def specs_with_comments_removed(text: str) -> Iterator[str]:
    """The spec with each option that is a comment in use, and with all of them."""
    head, body = text.split("qdqspec: 1\n")
    lines = body.splitlines()
    options = [number for number, line in enumerate(lines) if OPTION.match(line)]
    assert len(options) >= 4
    for chosen in [*([number] for number in options), options]:
        changed = [OPTION.sub(r"\1", line) if number in chosen else line for number, line in enumerate(lines)]
        yield "\n".join([f"{head}qdqspec: 1", *changed]) + "\n"


@pytest.mark.parametrize("odd", WRITABLE, ids=lambda odd: odd.name)
def test_the_spec_of_each_odd_model_loads_and_each_comment_can_be_removed(verb, tmp_path, odd):
    onnx.save(odd.make(), tmp_path / "net.onnx")
    result = verb("init", "net.onnx", *FAKE, "--json")
    assert (result.code, result.err) == (0, "")
    text = (tmp_path / result.json["output"]).read_text(encoding="utf-8")
    (case,) = load_cases(tmp_path / result.json["output"], Settings(root=tmp_path))
    assert case.model == tmp_path / "net.onnx"
    for name, shape in case.inputs.profiles[0].opt().items():
        assert list(shape) == result.json["inputs"][name]
    warned = [*cautions(load_model(tmp_path / "net.onnx"))]
    assert [note for note in result.json["notes"] if note in warned] == warned
    comments = " ".join(text.split()).replace(" # ", " ")
    assert [caution for caution in warned if " ".join(caution.split()) not in comments] == []
    model = load_model(tmp_path / "net.onnx")
    for changed in specs_with_comments_removed(text):  # resolved against the model, not only loaded
        (tmp_path / "changed.qdq.yaml").write_text(changed)
        for found in load_cases(tmp_path / "changed.qdq.yaml", Settings(root=tmp_path)):
            CaseData(model, found.inputs).require_names()


def test_the_shape_of_data_with_several_lengths_is_a_range(verb, tmp_path):
    """The spec takes its own data, an empty sample included."""
    saved(tmp_path / "net.onnx", "g (float[n,4,t] x) => (float[n,4,t] y) { y = Relu(x) }")
    (tmp_path / "data").mkdir()
    for number, length in enumerate((0, 30, *(8,) * 10)):
        np.savez(tmp_path / "data" / f"{number}.npz", x=np.ones((1, 4, length), np.float32))
    assert verb("init", "net.onnx", "--data", "data", "-o", "a.qdq.yaml").code == 0
    text = (tmp_path / "a.qdq.yaml").read_text()
    assert (
        "    x: {min: [1, 4, 0], opt: [1, 4, 8], max: [1, 4, 30]}  # float, dimensions 0, 2 are dynamic"
        in text
    )
    (case,) = load_cases(tmp_path / "a.qdq.yaml", Settings(root=tmp_path))
    model = load_model(tmp_path / "net.onnx")
    assert len(list(CaseData(model, case.inputs).shaped().open(tmp_path / "data"))) == 12


@pytest.mark.parametrize(
    ("files", "calibration", "evaluation"),
    [
        (("calibration.npz", "evaluation.npz"), "calibration.npz", "evaluation.npz"),
        (("0.npz",), "0.npz", "0.npz"),
        (("calibration/0.npz", "calibration/1.npz", "evaluation/0.npz"), "calibration", "evaluation"),
        (("train/0.npz", "val/0.npz"), "train", "val"),
    ],
)
def test_data_in_a_folder_is_found_by_names_and_shapes(verb, project, files, calibration, evaluation):
    """One data set for calibration and evaluation is stated in file and terminal."""
    data = project / "data"
    for file in files:
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        labels = {} if file.startswith(("calibration", "train")) else {"labels": np.arange(2)}
        np.savez(data / file, input=np.zeros((2, 1, 16, 16), np.float32), **labels)
    np.savez(data / "unrelated.npz", other=np.zeros((2, 2), np.float32))
    result = verb("init", "digits_resnet.onnx", *FAKE, "--data", "data", "-o", "specs/d.qdq.yaml")
    assert (result.code, result.err) == (0, "")
    (case,) = load_cases(project / "specs" / "d.qdq.yaml", Settings(root=project))
    assert (case.inputs.calibration, case.inputs.evaluation) == (data / calibration, data / evaluation)
    text, is_same = (project / "specs" / "d.qdq.yaml").read_text(), calibration == evaluation
    assert ("note: calibration and evaluation are the same data" in result.out) == is_same
    assert ("the same data as calibration" in text) == is_same
    assert "  # - {kind: accuracy, metric: top1, max_drop: 1%}" in text


@pytest.mark.parametrize(
    ("output", "labels", "metric"),
    [("n,5,16,16", (3, 16, 16), "miou"), ("n,tokens,5", (3, 4), "top1"), ("n,5,16,16", (3, 8, 8), "")],
)
def test_the_proposed_metric_fits_labels_and_output(verb, tmp_path, output, labels, metric):
    saved(tmp_path / "net.onnx", f"net (float[n,6] x) => (float[{output}] y) {{ y = plugins.Op(x) }}")
    np.savez(tmp_path / "d.npz", x=np.ones((3, 6), np.float32), labels=np.zeros(labels, np.int64))
    assert verb("init", "net.onnx", *FAKE, "--data", "d.npz").code == 0
    proposed = re.findall("metric: ([a-z0-9]*)", (tmp_path / "net.qdq.yaml").read_text())
    assert proposed == ([metric] if metric else [])


@pytest.mark.parametrize("name", ["a: b #.onnx", "true.onnx", "größe[1].qdq.onnx"])
def test_file_names_are_quoted_if_yaml_needs_it(verb, project, name):
    (project / "digits_resnet.onnx").rename(project / name)
    output = verb("init", name, *FAKE, "--json").json["output"]
    assert load_cases(project / output, Settings(root=project))[0].model == project / name


def test_the_option_needed_for_a_model_outside_the_project_is_printed(verb, project, models):
    result = verb("init", models / "squeezenet10.onnx", *FAKE)
    assert result.code == 0
    assert f"--qdq-allow-path={models}" in result.out
    settings = Settings(root=project, allow_path=(models,))
    assert load_cases(project / "squeezenet10.qdq.yaml", settings)[0].model == models / "squeezenet10.onnx"
