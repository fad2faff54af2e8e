"""Exit codes of every verb: 0 success, 1 a failed check or finding, 2 an error. One row per verb and outcome."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from baseline_entries import entry_of

import qdqspec.app.cli as cli
from qdqspec.checks.baselines import update_baseline
from qdqspec.timing.store import Store, cache_key

SPEC = "qdqspec: 1\nmodel: net.onnx\ntune: {trials: 1}\nchecks:\n  - {kind: size, max_ratio: MOST}\n"
ENTRY = entry_of(1)


@pytest.fixture(scope="module")
def prepared(models: Path, tmp_path_factory: pytest.TempPathFactory, run_records: tuple[str, str]) -> Path:
    """A project with results, records, baselines and caches, of which some fail and some are damaged."""
    root = tmp_path_factory.mktemp("project")
    (root / "pyproject.toml").write_text('[tool.qdqspec]\nbackend = "fake"\n')
    shutil.copy(models / "digits_resnet.onnx", root / "net.onnx")
    (root / "broken.onnx").write_bytes(b"no model")
    (root / "broken.json").write_text("{")
    (root / "broken.qdq.yaml").write_text("qdqspec: 1\nmodle: net.onnx\n")
    (root / "net.qdq.yaml").write_text(SPEC.replace("MOST", "9"))
    (root / "small.qdq.yaml").write_text(SPEC.replace("MOST", "0.001"))
    words = [sys.executable, "-m", "qdqspec", "tune", "net.onnx", "--trials", "12", "-o", "tuned"]
    subprocess.run(words, cwd=root, env=os.environ, check=True, capture_output=True)
    shutil.copy(root / "tuned" / "tuned_raw.onnx", root / "net.qdq.onnx")
    for name, text in zip(("a.json", "b.json"), run_records, strict=True):
        (root / name).write_text(text)
    for folder, entries in (("good", {}), ("bad", {("gone", "regression"): ENTRY})):
        (root / folder).mkdir()
        shutil.copy(root / "net.onnx", root / folder)
        (root / folder / "net.qdq.yaml").write_text(SPEC.replace("MOST", "9") + "  - {kind: regression}\n")
        file = root / folder / "__baselines__" / "net" / "fake.json"
        update_baseline(file, "fake", {("default", "regression"): ENTRY, **entries})
    for cache in ("whole", "damaged"):
        entry = Store(root / cache).put(cache_key(case=cache), lambda to: (to / "a").write_text("a") and None)
        if cache == "damaged":
            (entry / "a").write_text("b")
    return root


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path


CODES = {
    "init net.onnx -o new.qdq.yaml": 0,
    "init net.onnx -o net.qdq.yaml": 2,
    "init broken.onnx": 2,
    "tune net.qdq.yaml": 0,
    "tune small.qdq.yaml": 1,
    "tune broken.qdq.yaml": 2,
    "tune net.onnx --backend trtexec": 2,
    "inspect net.onnx": 0,
    "inspect broken.onnx": 2,
    "apply net.onnx tuned/scheme.json -o out.onnx": 0,
    "apply net.onnx broken.json -o out.onnx": 2,
    "apply net.onnx tuned/scheme.json -o net.onnx": 2,
    "strip net.qdq.onnx -o out.onnx": 0,
    "strip broken.onnx -o out.onnx": 2,
    "import net.qdq.onnx -o scheme.json": 0,
    "import broken.onnx -o scheme.json": 2,
    "diff net.onnx net.onnx": 0,
    "diff net.onnx net.qdq.onnx": 1,
    "diff net.onnx broken.onnx": 2,
    "fold net.onnx -o out.onnx": 0,
    "fold gone.onnx -o out.onnx": 2,
    "lint net.onnx --target onnxruntime-cpu": 0,
    "lint net.qdq.onnx --target tensorrt-11": 1,
    "lint net.onnx --target toaster": 2,
    "list net.qdq.yaml": 0,
    "list broken.qdq.yaml": 2,
    "schema": 0,
    "schema -o nowhere/schema.json": 2,
    "compare a.json a.json": 0,
    "compare a.json b.json": 1,
    "compare a.json b.json --fail-on 300%": 0,
    "compare a.json broken.json": 2,
    "explain tuned": 0,
    "explain net.qdq.yaml::default": 2,
    "verify net.onnx net.qdq.onnx --min-sqnr-db 0.1": 0,
    "verify net.onnx net.qdq.onnx --min-sqnr-db 900": 1,
    "verify net.onnx broken.onnx": 2,
    "baseline": 1,
    "baseline list good": 0,
    "baseline list bad": 1,
    "baseline list gone": 2,
    "cache --cache-dir whole": 0,
    "cache --cache-dir damaged": 1,
    "cache throw": 2,
    "cache export": 2,
    "doctor": 0,
    "doctor --backend trtexec": 2,
    "cluster certificates --cluster-tls keys": 0,
    "cluster list": 2,
    "cluster start --host 10.0.0.5": 2,
    "worker tcp://10.0.0.5:8786": 2,
    "upgrade-check tuned --python nowhere": 2,
    "reduce broken.onnx -o out": 2,
    "config": 0,
    "config --mode sleep": 2,
}
# A worker runs until it is stopped; a second runtime and models that a backend refuses have other tests.
ELSEWHERE = {"worker", "upgrade-check", "reduce"}


@pytest.mark.parametrize("words", CODES)
def test_the_exit_code_of_each_call(verb, project: Path, words: str) -> None:
    result = verb(*words.split())
    assert result.code == CODES[words], result.out + result.err
    if result.code == 2:
        assert (result.err + result.out).strip(), "an error has a message"


def test_every_verb_has_a_row_for_each_outcome() -> None:
    known = {words.split()[0] for words in CODES}
    (verbs,) = (action.choices for action in cli.parsers()[0]._actions if action.choices)
    assert known == set(verbs)
    for verb in known:
        codes = {code for words, code in CODES.items() if words.split()[0] == verb}
        assert {0, 2} - ({0} if verb in ELSEWHERE else set()) <= codes, verb
