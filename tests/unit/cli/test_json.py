"""The exit code of each verb; its ``--json`` has all names, notes and numbers of its text, at the same precision.

The fixture ``verb`` checks this in each test of this folder that asks for JSON.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from qdqspec.app.cli import main, parsers

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
    if words[0] in ("tune", "compare", "verify", "explain", "init") or words[:2] in FLEETING:
        return  # it measures again, or has times or a file of each call
    shown = prepared(*words)
    assert shown.code == data.code
    notes = "".join(f"note: {note}\n" for note in data.json["notes"])
    assert shown.out.rstrip("\n") == (notes + data.json["text"]).rstrip("\n")


FLEETING = [
    ("cluster", "certificates"),
    ("cache",),
    ("cache", "info"),
    ("cache", "export"),
    ("cache", "clear"),
    ("doctor", *FAKE),
]


@pytest.mark.parametrize(
    "words", ["inspect nowhere.onnx", "lint net.onnx --target nothing", "inspekt net.onnx"]
)
def test_an_error_is_written_as_json(verb, words: str) -> None:
    """Empty standard output is not valid JSON."""
    found = verb(*words.split(), "--json")
    assert found.code == 2
    assert (found.json["where"] or "").endswith("nowhere.onnx") == ("nowhere" in words)
    assert found.json["what"] in found.err
    assert verb(*words.split()).out == ""
