"""Properties of every verb: help with an example, JSON, exit codes, errors of one message."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import saved

import qdqspec.app.cli as cli
from qdqspec.app.cli import main, parsers
from qdqspec.app.cli.tune import equivalents

# A worker runs until it is stopped, and has no JSON.
VERBS = sorted(cli.parsers()[1].keys() - {"worker"})


@pytest.mark.parametrize("name", VERBS)
def test_help_has_an_example_of_the_verb_and_json(verb, name):
    result = verb(name, "--help")
    assert result.code == 0
    assert f"qdqspec {name}" in result.out.split("example:\n")[1]
    assert "--json" in result.out


def test_the_message_on_ctrl_c_states_how_to_resume(verb, monkeypatch):
    def interrupted(parser, words):
        raise KeyboardInterrupt

    monkeypatch.setattr("argparse.ArgumentParser.parse_known_args", interrupted)
    result = verb("tune", "a model.onnx")
    assert result.code == cli.INTERRUPTED
    assert "qdqspec tune 'a model.onnx'" in result.err


def test_config_prints_value_and_origin(verb, monkeypatch):
    monkeypatch.setenv("QDQSPEC_SEED", "7")
    rows = [line.split() for line in verb("config", "--threads", "2", "--require", "device").out.splitlines()]
    assert ["seed", "7", "QDQSPEC_SEED"] in rows
    assert ["threads", "2", "--threads"] in rows
    assert ["require", "device", "--require"] in rows
    assert ["mode", "run", "default"] in rows
    assert ["no-cache", "false", "default"] in rows


@pytest.mark.parametrize("option", ["--trtexec-args=", "--backend-option=trtexec.args="])
def test_config_prints_no_password(verb, option):
    shown = verb("config", f"{option}--remoteAutoTuningConfig=ssh://ann:s3cret@orin:22").out
    assert "ssh://ann:***@orin:22" in shown
    assert "s3cret" not in shown


def test_doctor_reports_every_backend(verb):
    result = verb("doctor")
    assert result.code == 0
    states = [line.partition(":")[::2] for line in result.out.splitlines() if re.match(r"[\w-]+: ", line)]
    names = [name for name, _ in states]
    # The chosen backend is first, then the usable ones, then the others.
    assert states[0] == ("onnxruntime", " works (chosen)")
    assert names[1:] == sorted(names[1:], key=lambda name: dict(states)[name] != " works")
    assert dict(states)["fake"] == " works"


def test_doctor_fails_if_the_chosen_backend_does_not_work(verb, monkeypatch):
    from qdqspec.backends.base import Availability
    from qdqspec.backends.onnxruntime import backend

    missing = Availability(usable=False, why="it is not installed", install="pip install onnxruntime")
    monkeypatch.setattr(backend, "probe", lambda *self: missing)
    result = verb("doctor")
    assert result.code == 2
    assert (
        "onnxruntime: not usable here (chosen)\n  it is not installed\n  to get it: pip install" in result.out
    )
    assert verb("doctor", "--backend", "fake").code == 0


def test_schema_is_written_to_standard_output_or_a_file(verb, tmp_path):
    schema = verb("schema").json
    assert schema["properties"]["qdqspec"]
    assert verb("schema", "-o", "s.json").out == ""
    assert json.loads((tmp_path / "s.json").read_text()) == schema


def test_verify_compares_the_results_of_a_case_with_its_limits(verb, tmp_path, models):
    shutil.copy(models / "digits_resnet.onnx", tmp_path / "digits.onnx")
    shutil.copy(models.parent / "data" / "digits_calibration.npz", tmp_path / "data.npz")
    text = (
        "qdqspec: 1\nmodel: digits.onnx\nbackend: fake\ninputs: {evaluation: data.npz}\nchecks:\n"
        "  - {kind: parity, min_sqnr_db: %s}\n"
    )
    (tmp_path / "digits.qdq.yaml").write_text(text % 300)
    words = ("verify", "digits.qdq.yaml::default")
    missing = verb(*words)
    assert missing.code == 2
    assert "there is no tuned model of digits::default yet" in missing.err
    assert "pytest digits.qdq.yaml::default" in missing.err
    results = tmp_path / "reports" / "digits" / "default"
    results.mkdir(parents=True)
    tuned = Path(__file__).parents[2] / "data" / "qdq_ort_u8s8_digits_resnet_b1.onnx"
    shutil.copy(tuned, results / "tuned.onnx")
    broken = verb(*words)
    assert (broken.code, "< 300.0 dB" in broken.out) == (1, True)
    found = verb(*words, "--min-sqnr-db", "5", "--json")
    assert (found.code, found.json["parity"]["data"], found.json["broken"]) == (0, "evaluation", [])


def test_verify_finds_scores_that_share_the_scale_of_boxes(verb, tmp_path):
    net = "net (float[1,6,200] x) => (float[1,6,200] y)"
    step = f"float s = {{{600 / 255}}}, uint8 z = {{0}}"
    saved(tmp_path / "given.onnx", f"{net} {{ y = Identity(x) }}")
    pair = "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"
    saved(tmp_path / "tuned.onnx", f"{net} <{step}> {{ {pair} }}")
    random = np.random.default_rng(0)
    parts = [random.uniform(0, most, size=(16, rows, 200)) for most, rows in ((600, 4), (1, 2))]
    np.savez(tmp_path / "data.npz", x=np.concatenate(parts, 1).astype(np.float32), z=np.zeros(16))
    words = ("verify", "given.onnx", "tuned.onnx", "--data", "data.npz", "--backend", "onnxruntime")
    found = verb(*words, "--min-sqnr-db", "40", "--json")
    worst = found.json["parity"]["outputs"][0]["worst_slice"]
    assert (found.code, worst["axis"]) == (0, 1)
    assert worst["index"] in (4, 5)
    noted = verb(*words, "--min-sqnr-db", "40")
    assert f"but slice {worst['index']} of axis 1 has 0.0 dB" in noted.out
    assert noted.err == "note: data.npz: array 'z' is no input of the model and is not used\n"
    misnamed = verb(*words, "--min-sqnr-db", "300", "--outputs", "z")
    assert (misnamed.code, misnamed.out.split("\n")[0]) == (1, "no output has the name 'z' given in outputs")
    broken = verb(*words, "--min-slice-sqnr-db", "20")
    assert broken.code == 1
    assert f"output 'y': slice {worst['index']} of axis 1: 0.0 dB < 20.0 dB, by quantization" in broken.out


@pytest.mark.parametrize(
    ("line", "found"), [("qdqspec bas", ["baseline"]), ("qdqspec tune --strat", ["--strategy"])]
)
def test_completions_of_a_shell(tmp_path, line, found):
    pytest.importorskip("argcomplete")
    (tmp_path / "specs").mkdir()
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    subprocess.run(
        [sys.executable, "-m", "qdqspec"],
        env={**os.environ, **asked},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "found").read_text().split() == found


def test_a_closed_pipe_and_letters_that_the_output_lacks_keep_the_exit_code(models, tmp_path):
    folder = tmp_path / "Wörter"
    folder.mkdir()
    tuned = Path(__file__).parents[2] / "data" / "qdq_ort_u8s8_digits_resnet_b1.onnx"
    reader, closed = os.pipe()
    os.close(reader)
    differ = ("diff", models / "digits_resnet.onnx", tuned)
    for words, output, code in ((differ, closed, 1), (("config",), subprocess.PIPE, 0)):
        done = subprocess.run(
            [sys.executable, "-m", "qdqspec", *words],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            cwd=folder,
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, b"")
    os.close(closed)
    assert b"W\\xf6rter" in done.stdout


def test_the_page_has_every_option_of_modelopt() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "from-modelopt.md"
    listed = set(re.findall(r"^\| `(--\w+)", page.read_text(encoding="utf-8"), flags=re.M))
    assert equivalents().keys() | {"--mode"} == listed


# ---- reduce ---------------------------------------------------------------------------------------


def test_a_failing_model_is_reduced(verb, models, tmp_path):
    words = ("--backend", "fake", "--backend-option", "fake.raise=build")
    found = verb("reduce", models / "digits_resnet.onnx", "-o", "fault", *words)
    assert found.code == 0, found.err
    assert "reduced to 1 in" in found.out
    assert len(onnx.load(tmp_path / "fault" / "reduced.onnx").graph.node) == 1
    assert "fake.raise" in (tmp_path / "fault" / "reproduce.py").read_text()
    found = verb("reduce", models / "digits_resnet.onnx", "-o", "fault", *words, "--json")
    assert found.json["nodes"] == 1
    assert found.json["complete"] is True


def test_the_first_failed_candidate_of_a_search_is_reduced(verb, models, tmp_path):
    words = "--backend fake --backend-option fake.fail_rate=0.5 --trials 6 --min-sqnr-db none"
    found = verb("tune", models / "digits_resnet.onnx", "-o", "out", "--reduce-failures", *words.split())
    assert found.code == 0, found.err
    assert "the simulated device refuses this placement" in found.err
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    assert folder.name.split("-")[0].isdecimal()
    assert (folder / "reproduce.py").is_file()
    assert len(onnx.load(folder / "reduced.onnx").graph.node) < 20


# ---- JSON: all names, notes and numbers of the text, at the same precision -----------------------


MODEL, QUANTIZED = "digits_resnet.onnx", "out/tuned.onnx"
FAKE = ("--backend", "fake")


@pytest.fixture(scope="module")
def made(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two results with their records, and a spec."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(models / MODEL, folder)
    with contextlib.chdir(folder):
        for output, trials in (("out", "3"), ("more", "6")):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main(["tune", MODEL, *FAKE, "--trials", trials, "-o", output, "--json"]) == 0
            (folder / f"{output}.json").write_text(out.getvalue())
    (folder / "specs").mkdir()
    (folder / "specs" / "a.qdq.yaml").write_text(
        f"qdqspec: 1\nmodel: ../{MODEL}\nchecks:\n  - {{kind: parity, min_sqnr_db: 20}}\n"
    )
    return folder


@pytest.fixture
def prepared(verb, made: Path, tmp_path: Path):
    """The verb, in a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return verb


# The fixture `verb` audits the JSON in each test of this folder that asks for it.
CALLS = {  # with their exit codes: 1 is a difference, or a check or finding that fails
    ("init", MODEL, "-o", "specs/b.qdq.yaml"): 0,
    ("tune", "specs/a.qdq.yaml", *FAKE, "--mode", "plan"): 0,
    ("tune", MODEL, *FAKE, "--trials", "3", "-o", "out"): 0,
    ("tune", MODEL, *FAKE, "--trials", "3", "-o", "copy/tuned.onnx", "--report", "run.html"): 0,
    ("tune", MODEL, *FAKE, "--trials", "2", "--objective", "pareto", "-o", "front"): 0,
    ("inspect", MODEL, *FAKE, "--verbose"): 0,
    ("apply", MODEL, "out/scheme.json", "-o", "applied.onnx"): 0,
    ("strip", QUANTIZED, "-o", "stripped.onnx"): 0,
    ("import", QUANTIZED, "-o", "scheme.json"): 0,
    ("diff", MODEL, QUANTIZED): 1,
    ("diff", QUANTIZED, "more/tuned.onnx"): 1,
    ("fold", MODEL, "-o", "folded.onnx"): 0,
    ("lint", QUANTIZED, "--target", "onnxruntime-cpu", "--target", "tensorrt-10"): 1,
    ("list", "specs"): 0,
    ("list", "backends"): 0,
    ("list", "strategies"): 0,
    ("list", "checks"): 0,
    ("list", "formats"): 0,
    ("compare", "out.json", "more.json"): 0,
    ("explain", MODEL, *FAKE): 0,
    ("explain", QUANTIZED, *FAKE): 0,
    ("explain", QUANTIZED, *FAKE, "--reference", MODEL): 0,
    ("explain", "out", *FAKE): 0,
    ("explain", "out", *FAKE, "--culprits"): 0,
    ("verify", MODEL, QUANTIZED, *FAKE): 0,
    ("verify", MODEL, QUANTIZED, *FAKE, "--min-sqnr-db", "200"): 1,
    ("baseline", "list"): 0,
    ("cache",): 0,
    ("cache", "info"): 0,
    ("cache", "export", "cache.zip"): 0,
    ("cache", "clear"): 0,
    ("cluster", "certificates"): 0,
    ("doctor", *FAKE): 0,
    ("config",): 0,
}  # fmt: skip
# Verbs whose JSON is read by other tests with the fixture or with clusters, and verbs without JSON.
ELSEWHERE = {"upgrade-check", "reduce", "schema", "worker"}


def test_each_verb_has_a_call() -> None:
    assert {call[0] for call in CALLS} | ELSEWHERE == set(parsers()[1])


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_json_has_what_the_terminal_shows(prepared, words: tuple[str, ...]) -> None:
    """The fixture compares figures and names; the text is that of a call without ``--json``."""
    data = prepared(*words, "--json")
    assert data.code == CALLS[words], data.err
    assert data.json["schema_version"] == 1
    if words[0] in ("tune", "compare", "verify", "explain", "init", "cluster", "cache"):
        return  # it measures again, or has times or a file of each call
    shown = prepared(*words)
    assert shown.code == data.code
    notes = "".join(f"note: {note}\n" for note in data.json["notes"])
    assert shown.out.rstrip("\n") == (notes + data.json["text"]).rstrip("\n")
