"""Loading of spec files: the resulting cases and the error messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec import load_spec
from qdqspec.errors import SpecError
from qdqspec.types import (
    CORRECTIONS,
    AccuracyRules,
    Case,
    Data,
    ImageRules,
    Inputs,
    InputShape,
    PatternRules,
    QuantizeRules,
    RegionRules,
    ShapeProfile,
    SkipRules,
    TuneRules,
)

HEAD = "qdqspec: 1\nmodel: m.onnx\n"
CHECKS = "checks:\n  - {kind: speedup, min: 1.2}\n"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_spec(text: str, name: str = "specs/a.qdq.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_spec


def the_case(path: Path) -> Case:
    (case,) = load_spec(path, root=path.parents[1]).cases()
    return case


def refusal(path: Path, **where: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(path, **{"root": path.parents[1], **where})  # type: ignore[arg-type]  # root or allow_paths
    return caught.value


# ---- valid specs ---------------------------------------------------------------------------------
def test_a_minimal_spec_with_a_byte_order_mark_and_crlf_line_ends(write: Write, tmp_path: Path) -> None:
    path = write("")
    path.write_bytes(("\ufeff" + HEAD + CHECKS).replace("\n", "\r\n").encode())
    case = the_case(path)
    assert (case.id, case.name, case.line) == ("default", "a::default", 1)
    assert (case.spec, case.model) == (path, tmp_path / "specs" / "m.onnx")
    (check,) = case.checks
    assert (check.id, check.kind, check.severity, check.line) == ("speedup", "speedup", "error", 4)
    assert check.params.min == 1.2


def test_every_key_of_a_spec_sets_a_field_of_the_case(write: Write, tmp_path: Path) -> None:
    write("/stem/*  # the first\n\n# nothing\n  /body/1\n", "specs/allow.txt")
    write("\ufeff/head/*\nConv#3 # unnamed\n", "specs/deny.txt")
    case = the_case(
        write(
            HEAD
            + """\
title: Title
tags: [vision, smoke]
inputs:
  shapes: {x: [8, 3, 224, 224], y: {min: [1, 64], opt: [8, 128], max: [16, 512], weight: 0.7}}
  calibration: data/c.npz
  evaluation: data/e.npz
matrix: {quant: [uint8], batch: [4]}
patterns:
  allow: [Conv, MatMul]
  deny: [Softmax]
  nodes: {include: ["/neck/*"], exclude: ["/tail/*"]}
  allow_file: allow.txt
  deny_file: deny.txt
regions: {by: manual, max_nodes: 4, manual: [[a, "b*"], [c]]}
quantize: {format: int16, calibration: entropy, weights: per-tensor, activations: uint8}
tune:
  strategy: attribution
  preset: quick
  trials: 60
  minutes: 90s
  objective: pareto
  min_sqnr_db: 25
  accuracy: {metric: top3, min: 0.9, max_drop: 1%, output: y}
  clock: wall
  start_from: [cache.yaml, ../tuned.onnx]
skip: not today
skip_unless: {backend: tensorrt, compute_capability: ">=8.9"}
xfail: {reason: not yet, strict: false}
"""
            + CHECKS
        )
    )
    assert (case.id, case.title, case.tags) == ("uint8-b4", "Title", ("vision", "smoke"))
    assert (case.matrix, case.line) == ({"quant": "uint8", "batch": 4}, 9)
    data, x = tmp_path / "specs" / "data", (8, 3, 224, 224)
    shapes = {"x": InputShape.of(x), "y": InputShape(min=(1, 64), opt=(8, 128), max=(16, 512))}
    profiles = (ShapeProfile(shapes=shapes, weight=0.7),)
    assert case.inputs == Inputs(
        calibration=data / "c.npz", evaluation=data / "e.npz", batch=4, profiles=profiles
    )
    assert case.patterns == PatternRules(
        allow=("Conv", "MatMul"),
        deny=("Softmax",),
        include=("/neck/*", "/stem/*", "/body/1"),
        exclude=("/tail/*", "/head/*", "Conv#3"),
    )
    assert case.regions == RegionRules(by="manual", max_nodes=4, manual=(("a", "b*"), ("c",)))
    assert case.quantize == QuantizeRules(
        format="uint8", calibration="entropy", weights="per-tensor", activations="uint8"
    )
    start = (tmp_path / "specs" / "cache.yaml", tmp_path / "tuned.onnx")
    accuracy = AccuracyRules(metric="top3", min=0.9, max_drop=0.01, output="y")
    numbers = {"trials": 60, "minutes": 1.5, "min_sqnr_db": 25.0, "start_from": start, "accuracy": accuracy}
    assert case.tune == TuneRules(preset="quick", objective="pareto", clock="wall", **numbers)
    unless = {"backend": "tensorrt", "compute_capability": ">=8.9"}
    assert case.skipping == SkipRules(skip="not today", xfail="not yet", xfail_strict=False, unless=unless)


@pytest.mark.parametrize(
    ("key", "found", "value"),
    [
        ("quantize: {corrections: auto}", lambda c: c.quantize.allowed_corrections, CORRECTIONS),
        ("quantize: {corrections: none}", lambda c: c.quantize.allowed_corrections, ()),
        (
            "quantize: {corrections: [ranges, bits]}",
            lambda c: c.quantize.allowed_corrections,
            ("bits", "ranges"),
        ),
        ("tune: {minutes: 0.5}", lambda c: c.tune.minutes, 0.5),
        (
            "inputs: {shapes: [{x: [1]}, {x: {opt: [8], max: [9], weight: 2}}]}",
            lambda c: c.inputs.profiles,
            (
                ShapeProfile(shapes={"x": InputShape.of((1,))}),
                ShapeProfile(shapes={"x": InputShape(min=(8,), opt=(8,), max=(9,))}, weight=2.0),
            ),
        ),
        ("tune: {minutes: 1.5 h}", lambda c: c.tune.minutes, 90),
        (
            "inputs: {values: {sr: 16000, gain: [[1, 2.5], [0, 1]], on: true}}",
            lambda c: c.inputs.values,
            {"sr": 16000, "gain": ((1, 2.5), (0, 1)), "on": True},
        ),
    ],
)
def test_the_forms_of_a_value(write: Write, key: str, found: Callable[[Case], object], value: object) -> None:
    assert found(the_case(write(f"{HEAD}{CHECKS}{key}\n"))) == value


def test_each_matrix_axis_overrides_its_rule(write: Write) -> None:
    chosen = {"quant": "int16", "batch": 7, "calibration": "entropy", "weights": "per-tensor", "activations": "uint8",
              "strategy": "region", "preset": "quick", "backend": "fake"}  # fmt: skip
    axes = ", ".join(f"{axis}: [{value}]" for axis, value in chosen.items())
    case = the_case(write(f"{HEAD}matrix: {{{axes}}}\n{CHECKS}"))
    rules, tune = case.quantize, case.tune
    numbers = (rules.format, case.inputs.batch, rules.calibration, rules.weights, rules.activations)
    assert (*numbers, tune.strategy, tune.preset, case.backend) == tuple(chosen.values())
    assert case.matrix == chosen


def test_default_ids_of_checks_are_distinct(write: Write) -> None:
    text = "checks:\n" + "".join(
        f"  - {{kind: speedup, min: 1.{n}{extra}}}\n" for n, extra in enumerate(["", "", ", id: fast", ""])
    )
    case = the_case(write(HEAD + text))
    assert [check.id for check in case.checks] == ["speedup", "speedup-2", "fast", "speedup-4"]
    assert [check.line for check in case.checks] == [4, 5, 6, 7]


# ---- invalid specs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("model: m.onnx\n" + CHECKS, "1:1: 'qdqspec' is missing in the spec"),
        ("qdqspec: 1\n" + CHECKS, "1:1: 'model' is missing in the spec"),
        (HEAD, "1:1: 'checks' is missing in the spec"),
        (HEAD + "checks: [speedup]", "3:10: a check is a mapping with a 'kind'"),
        (HEAD + "checks: [{kind: accuracy, min: 97%}]", "3:10: check 'accuracy' needs inputs.evaluation"),
        ("  - {kind: speedup, min: 1, id: speedup}", "5:33: two checks are called 'speedup'"),
        ("tune: quick", "5:7: 'tune' should be a mapping, not 'quick'"),
        (
            "  - {kind: latency, max_ms: 9, profile: 2}\ninputs: {shapes: [{x: [1]}, {x: [2]}]}",
            "5:41: there is no shape profile 2",
        ),
        ("tune: {minutes: .inf}", "5:17: 'minutes' should be a finite number, not inf"),
        ("tune: {min_sqnr_db: off}", "5:21: 'min_sqnr_db' should be a finite number or none, not off"),
        ("quantize: {format: [int8, int8]}", "5:20: 'int8' occurs twice among the formats"),
        ("regions: {by: manual, manual: [[]]}", "5:10: a manual region without a node"),
        ("regions: {by: fusion, graph: /etc/a.json}", "5:30: path '/etc/a.json' leads out"),
        ("matrix: {quant: int8}", "5:17: 'quant' should be a list, not 'int8'"),
        ("matrix: {quant: []}", "5:17: an axis without a value"),
        ("matrix: {batch: [1], exclude: [{}]}", "5:32: no axis is named here"),
        ("matrix: {}", "5:9: the matrix excludes every case"),
        (
            "matrix: {batch: [1], include: [{batch: 2}, {batch: 2}]}",
            "5:9: two cases of the matrix are called 'b2'",
        ),
        ("inputs: {shapes: [{}]}", "5:19: a shape profile without an input"),
        (
            "inputs: {shapes: {x: {opt: [1], weight: 1}, y: {opt: [1], weight: 2}}}",
            "5:10: the inputs of one profile have different weights",
        ),
        ("inputs: {values: {sr: '16000'}}", "5:23: a value is a number, true or false"),
        ("inputs: {values: {sr: [1, [2]]}}", "5:23: the rows of a value are not equally long"),
        ("inputs: {values: {sr: .nan}}", "5:23: a value that is not finite"),
        ("inputs: {shapes: {sr: [1]}, values: {sr: 1}}", "5:9: 'sr' has a value, and so no shape"),
        ("skip: no", "5:7: 'no' is no reason: remove the key, or state the reason"),
        ("patterns: {deny_file: .}", "5:23: cannot read '.': it is not a file"),
        ("quantize: {corrections: []}", "5:25: an empty list of corrections"),
        ("quantize: {corrections: [bits, bits]}", "5:25: a correction is in the list twice"),
        ("quantize: {corrections: [biass]}", "5:25: there is no correction 'biass'"),
        ("tune: {accuracy: {max_drop: 1%}}", "5:18: 'tune.accuracy' needs inputs.evaluation"),
        (
            "inputs: {evaluation: e.npz}\ntune: {accuracy: {metric: top1}}",
            "6:18: no limit of the metric is given",
        ),
        (
            "inputs: {evaluation: e.npz}\ntune: {accuracy: {metric: top1, min: 97}}",
            "6:18: top1 is a share, and 97 of it is no valid limit: write 97% or 0.97",
        ),
    ],
)
def test_an_invalid_key_is_an_error_with_its_position(write: Write, more: str, message: str) -> None:
    text = more if more.startswith(("model", "qdqspec")) else f"{HEAD}{CHECKS}{more}"
    first = str(refusal(write(f"{text}\n"))).splitlines()[0]
    assert first.startswith(f"specs/a.qdq.yaml:{message}")


@pytest.mark.parametrize(
    "key",
    [
        "model: ../../{}",
        "inputs: {{calibration: ../../{}}}",
        "tune: {{start_from: [../../{}]}}",
        "patterns: {{allow_file: ../../{}}}",
    ],
)
def test_a_path_outside_the_root_is_an_error_unless_allowed(write: Write, tmp_path: Path, key: str) -> None:
    (tmp_path / "outside.txt").write_text("name\n")
    text = key.format("outside.txt") + "\n" + CHECKS + "qdqspec: 1\n"
    path = write(text if key.startswith("model") else text + "model: m.onnx\n", "root/specs/a.qdq.yaml")
    root = tmp_path / "root"
    error = refusal(path, root=root)
    assert "path '../../outside.txt' leads out of the root directory" in str(error).splitlines()[0]
    assert "--qdq-allow-path" in str(error)
    assert load_spec(path, root=root, allow_paths=[tmp_path]).cases()


@pytest.mark.parametrize("name", ["d" * 300, "d/" * 4000 + "d"], ids=["one name", "many folders"])
def test_a_too_long_file_name_is_an_error(write: Write, name: str) -> None:
    error = refusal(write(f"qdqspec: 1\nmodel: {name}\n{CHECKS}"))
    first = str(error).splitlines()[0]
    assert first.endswith("is too long for a file's name")
    assert len(first) < 300


def test_links_out_of_the_root_are_an_error(write: Write, tmp_path: Path) -> None:
    """Of a file, in a folder of data, and of a glob."""
    (tmp_path / "secret.npz").write_bytes(b"")
    path = write(HEAD + "inputs: {calibration: samples}\n" + CHECKS, "root/specs/a.qdq.yaml")
    globbed = write(HEAD + "inputs: {calibration: samples/*.npz}\n" + CHECKS, "root/specs/b.qdq.yaml")
    samples = path.parent / "samples"
    samples.mkdir()
    (samples / "0.npz").write_bytes(b"")
    (samples / "1.npz").symlink_to(samples / "0.npz")
    assert load_spec(path, root=tmp_path / "root").cases()
    for link, name in ((samples / "2.npz", "samples/2.npz"), (path.parent / "m.onnx", "m.onnx")):
        link.symlink_to(tmp_path / "secret.npz")
        assert f"'{name}' leads out of the root directory" in str(refusal(path, root=tmp_path / "root"))
        assert load_spec(path, root=tmp_path / "root", allow_paths=[tmp_path]).cases()
        assert "leads out of the root directory" in str(refusal(globbed, root=tmp_path / "root"))
        link.unlink()


@pytest.mark.parametrize("text", ["~/secret.onnx", "$HOME/secret.onnx"])
def test_variables_in_paths_are_not_expanded(write: Write, text: str) -> None:
    path = write(f"qdqspec: 1\nmodel: {text}\n" + CHECKS)
    assert the_case(path).model == path.parent / text


def test_the_root_of_a_spec_outside_the_root_is_its_folder(write: Write, tmp_path: Path) -> None:
    path = write(HEAD + CHECKS)
    (tmp_path / "elsewhere").mkdir()
    assert load_spec(path, root=tmp_path / "elsewhere").cases()
    text = str(refusal(write(HEAD.replace("m.onnx", "../m.onnx") + CHECKS), root=tmp_path / "elsewhere"))
    assert text.startswith(f"{path}:2:8: ")


def test_names_in_capitals_are_an_error_with_a_suggestion(write, tmp_path, monkeypatch) -> None:
    path = write(HEAD + CHECKS + "quantize: {format: INT8}\nMatrix: {Quant: [int8]}\n")
    monkeypatch.chdir(tmp_path / "specs")
    text = str(refusal(path, root=None))
    assert text.startswith("a.qdq.yaml:5:20: "), "the path is relative to the working directory"
    assert "did you mean 'int8'?" in text
    assert "did you mean 'matrix'?" in text


def test_a_spec_that_is_too_large_missing_a_pipe_or_no_text_is_an_error(write: Write) -> None:
    path = write(HEAD + "patterns: {allow_file: pipe}\n" + CHECKS)
    os.mkfifo(path.parent / "pipe")
    assert "it is not a file" in str(refusal(path))
    assert "a spec is a file" in str(refusal(path.parent / "pipe"))
    path = write("# " + "x" * 1_000_000)
    assert "a spec has at most 1,000,000 bytes" in str(refusal(path))
    assert "No such file" in str(refusal(path.with_name("no.qdq.yaml")))
    path.write_bytes(b"qdqspec: 1\nmodel: \xff\xfe\n")
    assert str(refusal(path)).splitlines()[0] == "specs/a.qdq.yaml:2:8: the file is not UTF-8 text"


def calibration_of(write: Write, text: str) -> object:
    return the_case(write(f"{HEAD}{CHECKS}inputs: {{calibration: {text}}}\n")).inputs.calibration


GRAY = ImageRules(size=(3, 3), mean=(127.5,), std=(128,))
COLORS = ImageRules(size=(9, 9), resize=10, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), layout="nhwc")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("{arrays: d.npz}", Path("d.npz")),
        ("'d[1].npz'", Path("d[1].npz")),
        (
            "{images: i/*.jpg, size: 9, resize: 10, mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.4], layout: nhwc}",
            Data(path=Path("i/*.jpg"), images=COLORS),
        ),
        ("{images: i, size: [480, 640]}", Data(path=Path("i"), images=ImageRules(size=(480, 640)))),
        ("{images: i, size: 3, mean: 127.5, std: 128}", Data(path=Path("i"), images=GRAY)),
        ("{images: i, size: 3, mean: [127.5], std: [128]}", Data(path=Path("i"), images=GRAY)),
        ("{loader: mine}", Data(loader="mine")),
        (
            "{arrays: d.npz, names: {x: pixels}, labels: l.txt}",
            Data(path=Path("d.npz"), names={"x": "pixels"}, labels=Path("l.txt")),
        ),
    ],
)
def test_the_forms_of_data(write: Write, tmp_path: Path, text: str, data: Path | Data) -> None:
    here = tmp_path / "specs"
    if isinstance(data, Data):
        paths = {
            name: here / path for name in ("path", "labels") if (path := getattr(data, name)) is not None
        }
        assert calibration_of(write, text) == replace(data, **paths)
    else:
        assert calibration_of(write, text) == here / data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{names: {x: y}}", "one of arrays, images and loader is needed"),
        ("{arrays: a.npz, size: 3}", "'size' is a key of images"),
        ("{images: a.jpg}", "images need a size"),
        ("{images: a.jpg, size: 3, mean: [1, 2]}", "'mean' has one number, or one for each of 3 channels"),
        ("{images: a.jpg, size: 3, std: 0}", "greater than 0"),
        ("{images: a.jpg, size: 30, resize: 3}", "'resize' is smaller than 'size'"),
        ("{images: a.jpg, size: 3, layot: nchw}", "did you mean 'layout'"),
        ("../../far/*.npz", "leads out of the root directory"),
        ("[a.npz, b.npz]", "'calibration' should be a path, not a list"),
    ],
)
def test_invalid_data_is_an_error(write: Write, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        calibration_of(write, text)
