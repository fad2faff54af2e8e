"""``--json`` of each verb holds what its text shows: each name, and each number, at the precision of the text."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdqspec.cli import main

MODEL, QUANTIZED = "digits_resnet.onnx", "out/tuned.onnx"
FAKE = ("--backend", "fake")
WORDS = {"Q/DQ", "2/2"}
_TOKEN = re.compile(r"[\w/.#:-]*[\w/#]")
_NUMBER = re.compile(r"-?\d+(?:\.(\d+))?x?")


@pytest.fixture(scope="module")
def made(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its result, a spec and a record."""
    folder, out = tmp_path_factory.mktemp("made"), io.StringIO()
    shutil.copy(models / MODEL, folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        assert main(["tune", MODEL, *FAKE, "--trials", "3", "-o", "out", "--json"]) == 0
    (folder / "a.json").write_text(out.getvalue())
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


def leaves(value: Any) -> Iterator[Any]:
    """All values and keys, and the lengths of lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from leaves(inner)
    elif isinstance(value, list):
        yield len(value)
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def lost(text: str, data: Any) -> list[str]:
    """The names and numbers of the text that the data has in no form."""
    values = list(leaves(data))
    texts = " ".join(value for value in values if isinstance(value, str))
    numbers = [
        float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    missing = []
    for word in (match[0].strip(".:-") for match in _TOKEN.finditer(text)):
        number = _NUMBER.fullmatch(word)
        if word in WORDS or "..." in word or word in texts:
            continue
        if number is not None:
            digits = len(number[1] or "")
            wanted = float(word.rstrip("x"))
            forms = [form for value in numbers for form in _forms(value)]
            if not any(math.isclose(round(form, digits), wanted, abs_tol=1e-9) for form in forms):
                missing.append(word)
        elif "/" in word or "::" in word:
            missing.append(word)
    return missing


def _forms(value: float) -> Iterator[float]:
    """As it is, its size, in per cent, as a change in per cent, inverted, and in MB."""
    yield from (
        value,
        abs(value),
        100 * value,
        abs(100 * (value - 1)),
        value / 1e6,
        value / 1024,
        value / 2**20,
    )
    if value:
        yield 1 / value


@pytest.mark.parametrize(
    "words",
    [
        ("tune", "specs/a.qdq.yaml", *FAKE, "--mode", "plan"),
        ("tune", MODEL, *FAKE, "--trials", "3", "-o", "out"),
        ("list", "specs"),
        ("list", "checks"),
        ("doctor", *FAKE),
        ("config",),
        ("compare", "a.json", "a.json"),
        ("import", QUANTIZED, "-o", "scheme.json"),
        ("apply", MODEL, "out/scheme.json", "-o", "applied.onnx"),
        ("strip", QUANTIZED, "-o", "stripped.onnx"),
        ("fold", MODEL, "-o", "folded.onnx"),
        ("init", MODEL, "-o", "specs/b.qdq.yaml"),
        ("baseline", "list"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_json_has_what_the_text_shows(prepared, words: tuple[str, ...]) -> None:
    shown = prepared(*words)
    Path("specs/b.qdq.yaml").unlink(missing_ok=True)
    data = prepared(*words, "--json")
    assert data.code == shown.code
    assert lost(shown.out, json.loads(data.out)) == []


LINT = ("lint", QUANTIZED, "--target", "onnxruntime-cpu")
NAMING = [("inspect", MODEL, *FAKE), ("diff", MODEL, QUANTIZED), LINT, ("cache", "list")]


@pytest.mark.parametrize("words", NAMING)
def test_json_has_each_node_that_the_text_names(prepared, words: tuple[str, ...]) -> None:
    """Counts and shares follow from the lists, which the text cuts; ages pass."""
    named = {
        word for word in lost(prepared(*words).out, prepared(*words, "--json").json) if word.startswith("/")
    }
    assert named == set()


@pytest.mark.parametrize("what", [MODEL, QUANTIZED, "out"])
def test_explain_json_has_the_layers_that_the_text_shows(prepared, what: str) -> None:
    text, found = prepared("explain", what, *FAKE).out, prepared("explain", what, *FAKE, "--json").json
    engines = found["engines"]
    assert all(engine["layers"] for engine in engines)
    layers = [layer for engine in engines for layer in engine["layers"]]
    names = {name for layer in layers for name in (layer["name"], *layer["nodes"], *layer["tensors"])}
    shown = [word for word in re.findall(r"(?<!\S)/[\w/.]+", text) if "..." not in word]
    assert shown
    assert set(shown) <= names


def test_the_audit_finds_what_is_missing() -> None:
    assert lost("a/b took 4.21 ms and 12 %", {"share": 0.12}) == ["a/b", "4.21"]
