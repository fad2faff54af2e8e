"""The page of the JSON output of verbs: its fields, from calls on a small model and the simulated device."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from qdqspec._core.config import Settings
from qdqspec._core.records import to_data
from qdqspec.app.cli import machine, main
from qdqspec.app.cli.command import IMPOSSIBLE
from qdqspec.app.cluster.worker import ANNOUNCED, WorkerInfo, announce

_MODELS = Path(__file__).parents[1] / "specs" / "models"
_FAKE = ("--backend", "fake")
_BRANCHES = """<ir_version: 8, opset_import: ["": 17]>
    net (float[n,4] x, bool c) => (float[n,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> {
      a = MatMul(x, w)
      b = MatMul(a, w)
      s = Softmax(b)
      y = If (c) <then_branch = t () => (d) { d = MatMul(s, w) }, else_branch = e () => (f) { f = Neg(s) }>
    }"""
_SPEC = "qdqspec: 1\nmodel: ../net.onnx\nchecks: [{kind: parity, min_sqnr_db: 20}, {kind: regression}]\n"
_BASELINE = ("--qdq-backend=fake", "--qdq-update=all", "--qdq-update-in-ci", "-p", "no:cacheprovider")
_ADDRESS = "tls://host:8786"
_CALLS = (
    ("init", "net.onnx", "-o", "specs/b.qdq.yaml"),
    ("tune", "net.onnx", *_FAKE, "--mode", "plan"),
    ("inspect", "branches.onnx", *_FAKE),
    ("apply", "net.onnx", "out/scheme.json", "-o", "applied.onnx"),
    ("strip", "out/tuned.onnx", "-o", "stripped.onnx"),
    ("import", "out/tuned.onnx", "-o", "scheme.json"),
    ("diff", "out/tuned.onnx", "other/tuned.onnx"),
    ("fold", "net.onnx", "-o", "folded.onnx"),
    ("lint", "out/tuned.onnx", "--target", "tensorrt-10"),
    ("list", "specs"),
    ("list", "backends"),
    ("list", "formats"),
    ("list", "strategies"),
    ("list", "checks"),
    ("compare", "run.json", "run.json"),
    ("explain", "out", *_FAKE),
    ("explain", "out", *_FAKE, "--culprits"),
    ("verify", "net.onnx", "out/tuned.onnx", *_FAKE),
    ("upgrade-check", "out", "--python", sys.executable, *_FAKE),
    ("reduce", "net.onnx", "-o", "fault", *_FAKE, "--backend-option", "fake.raise=build"),
    ("baseline", "list"),
    ("baseline", "show"),
    ("baseline", "prune"),
    ("cache",),
    ("cache", "info"),
    ("cache", "export", "searches.zip"),
    ("cache", "import", "searches.zip"),
    ("cache", "prune"),
    ("cache", "clear"),
    ("cluster", "certificates"),
    ("doctor", *_FAKE),
    ("config",),
)
_EACH = ("schema_version", "text", "notes")
_TABLES = (
    "counts",
    "facts",
    "here",
    "inputs",
    "params",
    "there",
)  # objects whose keys are names of the model, the spec or the result


def verb_fields() -> Iterator[str]:
    """The lines of the page."""
    yield "`--json` of a verb writes one object. In each, `schema_version` is a number, `text` is what the terminal"
    yield "shows, and `notes` are its notes. A field without a value is `null`. `tune --json` writes a"
    yield "[run](record.md#run), `schema` the JSON Schema of a spec, `compare` of two folders the `runtimes` of a"
    yield "run. Fields are listed by calls on `digits_resnet.onnx`, and `inspect` on a model with an If, with the"
    yield "simulated device; `[]` is an entry of a list, `*` of a table."
    for call, found in _results():
        words = " ".join("python" if word == sys.executable else word for word in call if word not in _FAKE)
        yield from ("", f"## {words}", "", "| field | type |", "| --- | --- |")
        yield from (f"| `{name}` | {kind} |" for name, kind in _fields([found]) if name not in _EACH)


def _results() -> Iterator[tuple[Sequence[str], Any]]:
    """Each call with its JSON, in a folder with a spec and the results of a search."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copy(_MODELS / "digits_resnet.onnx", "net.onnx")
        onnx.save(onnx.parser.parse_model(_BRANCHES), "branches.onnx")
        Path("specs").mkdir()
        Path("specs/a.qdq.yaml").write_text(_SPEC, encoding="utf-8")
        Path("run.json").write_text(
            _output(
                "tune",
                "net.onnx",
                *_FAKE,
                "--trials",
                "3",
                "--exclude",
                "/layer1/layer1.0/conv1/*",
                "-o",
                "out",
            ),
            encoding="utf-8",
        )
        _output(
            "tune", "net.onnx", *_FAKE, "--trials", "3", "--seed", "9", "--exclude", "/conv1/*", "-o", "other"
        )
        subprocess.run(
            [sys.executable, "-m", "pytest", "specs", *_BASELINE],
            check=True,
            capture_output=True,
        )
        for call in _CALLS:
            yield call, json.loads(_output(*call))
        yield from _cluster()


def _cluster() -> Iterator[tuple[Sequence[str], Any]]:
    """The output about one device of the verbs that run until they are interrupted, and of the list of workers."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        machine.answer_started(Namespace(json=True), _ADDRESS)  # otherwise a running scheduler is needed
    yield ("cluster", "start"), json.loads(out.getvalue())
    announcement = announce(Settings(backend="fake"), ("fake",))
    rows = [to_data(WorkerInfo.of(_ADDRESS, {ANNOUNCED: to_data(announcement)}, 0.0))]
    yield ("cluster", "list", "ADDRESS"), {"address": _ADDRESS, "workers": rows}
    yield ("worker", "ADDRESS"), to_data(announcement)


def _output(*words: str) -> str:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main([*words, "--json"])
    if code == IMPOSSIBLE:
        raise SystemExit(f"qdqspec {' '.join(words)}: {errors.getvalue()}")
    return out.getvalue()


def _fields(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The fields of objects at one position, including nested ones: ``regions[].nodes``."""
    for key in dict.fromkeys(key for value in values for key in value):
        found, name = [value[key] for value in values if value.get(key) is not None], f"{path}{key}"
        kinds = []
        while found and not _is_object(key, found) and (is_list := _all(list, found)) | _all(dict, found):
            found = [
                one for value in found for one in (value if is_list else value.values()) if one is not None
            ]
            kinds.append("list" if is_list else "table")
            name += "[]" if is_list else ".*"
        is_object = _is_object(key, found)
        kinds += ["object"] if is_object else _kinds(found)
        yield f"{path}{key}", " of ".join(kinds) or "null"
        if is_object:
            yield from _fields(found, f"{name}.")


def _all(kind: type, values: Sequence[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_object(key: str, values: Sequence[Any]) -> bool:
    """Whether the values are objects with fields instead of tables with keys of the user."""
    keys = [name for value in values for name in value] if _all(dict, values) else []
    return bool(keys) and key not in _TABLES and all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in keys)


def _kinds(values: Sequence[Any]) -> list[str]:
    names = {bool: "true or false", int: "number", float: "number", str: "text", list: "list", dict: "table"}
    found = " or ".join(sorted({names[type(value)] for value in values}))
    return [found] if found else []
