"""The message of each error, also as JSON, one row per message: exit code 2, no other output, no file is changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqspec.app.report.record import record_to_json
from qdqspec.testing.records import sample_run

DATA = Path(__file__).parents[2] / "data"
SPEC = "qdqspec: 1\nmodel: net.onnx\nmatrix: {batch: [1, 8]}\nchecks:\n  - {kind: speedup, min: 1.1}\n"

ERRORS = [
    # words that are no verb, option or argument
    ("tun", "unknown verb 'tun' (did you mean 'tune'?)"),
    ("bananas", "unknown verb 'bananas'\n"),
    ("tune net.onnx --calibraton a.npz", "arguments: --calibraton (did you mean '--calibration'?)"),
    ("tune net.onnx again.onnx", "unrecognized arguments: again.onnx\n"),
    ("cache prun", "'prun' is not one of list, info, prune, clear, export, import (did you mean 'prune'?)"),
    ("verify a.onnx b.onnx --calibration e.npz", "--calibration (did you mean '--data'?)"),
    # what cannot be tuned
    ("tune spec_nets.py", "specs in Python are collected by pytest only"),
    ("tune spec.qdq.yaml::b9", "there is no case 'b9'"),
    ("tune spec.qdq.yaml -o x.onnx", "a file holds one tuned model, and this makes several"),
    ("tune net.onnx -o net.onnx", "inputs are not written to"),
    ("tune net.onnx -o pyproject.toml", "the output folder cannot be written to"),
    ("tune net.onnx --trials 0", "--trials: 'trials' should be greater than or equal to 1, not 0"),
    ("tune net.onnx --max-drop 1%", "add --evaluation: an .npz with the model's inputs and 'labels'"),
    (
        "tune spec.qdq.yaml --metric top1 --evaluation e.npz",
        "--metric: no limit of the metric is given: add min",
    ),
    ("tune net.onnx --min 97 --evaluation e.npz", "--min: top1 is a share"),
    ("tune net.onnx --shapes x:1x", "is no list of shapes such as images:1x3x224x224"),
    ("tune net.onnx --shapes x:1x8 y:1x2", "arguments: y:1x2 (several are separated by commas: --shapes "),
    ("tune net.onnx --values sr:wide", "is no list of values such as sr:16000"),
    ("tune net.onnx --min-shapes x:1", "--opt-shapes is missing"),
    ("tune net.onnx --opt-shapes x:1 --max-shapes z:4", "--max-shapes names 'z', and --opt-shapes does not"),
    ("tune net.onnx --opt-shapes x:1 --shapes x:1", "are both given"),
    ("tune net.onnx --graph-json net.onnx", "--graph-json is a model"),
    ("tune net.onnx --trials-per-region 3", "'trials_per_region' belongs to 'strategy: region'"),
    ("tune net.onnx --backend fake,fak", "--backend: 'fak' does not fit"),
    # options of ModelOpt's autotune
    ("tune net.onnx --mode quick", "--mode quick is an option of ModelOpt"),
    ("tune net.onnx --schemes-per-region=30", "--schemes-per-region is an option of ModelOpt"),
    # files that are missing, of another kind, or not to be written
    ("inspect broken.onnx", "broken.onnx: "),
    ("verify net.onnx .", "this is a folder, not a model file"),
    ("reduce broken.onnx -o out", "broken.onnx: "),
    ("reduce net.onnx -o out --backend fake", "there is nothing to reduce"),
    ("schema -o nowhere/schema.json", "the schema cannot be written"),
    ("inspect none.onnx", "none.onnx: there is no such model file"),
    ("apply net.onnx none.json -o x.onnx", "none.json: the scheme cannot be read"),
    ("strip net.onnx -o none/x.onnx", "none: there is no such folder"),
    ("import quantized.onnx -o quantized.onnx", "this file is an input"),
    ("apply net.onnx scheme.json -o ./net.onnx", "overwrite the input"),
    ("apply net.onnx scheme.json -o scheme.json", "overwrite the input"),
    ("strip net.onnx -o net.onnx", "overwrite the input"),
    ("fold net.onnx -o net.onnx", "overwrite the input"),
    ("strip apart.onnx -o weights.bin", "overwrite the input"),  # its external weights
    ("apply apart.onnx scheme.json -o weights.bin", "overwrite the input"),
    ("strip quantized.onnx -o x.onnx --values x:1", "--values is for the model of --reference"),
    ("import quantized.onnx -o x.json --values x:1", "--values is for the model of --reference"),
    ("import net.onnx -o scheme.json", "no Q/DQ pair that a scheme can carry"),
    ("verify net.onnx net.onnx --input pix.npz --shapes input:1x1x16x16", "--shapes is for --data"),
    ("verify net.onnx", "no tuned model is given"),
    ("tune spec.qdq.yml", "(did you mean 'spec.qdq.yaml'?)"),
    ("tune specs", "specs: this is a folder\n  name a model or spec, or run all specs in it: pytest specs\n"),
    (
        "tune cal.npz",
        "cal.npz: this is neither a model nor a spec\n  name a file that ends in .onnx, .qdq.yaml",
    ),
    ("tune net.onnx --backend fake --shapes input:1x3x16x16", "--shapes"),
    ("inspect net.onnx --shapes xx:1x30x4", "names 'xx', which is no input"),
    (
        "inspect net.onnx --values inputt:1",
        "'inputt', which is no input of the model (did you mean 'input'?)",
    ),
    ("tune net.onnx --shapes x:1x4,x:2x4", "argument --shapes: 'x' is given twice"),
    # init
    ("init net.onnx -o spec.yaml", "pytest collects a spec by its ending"),
    ("init net.onnx -o net.onnx/x/d.qdq.yaml", "the spec cannot be written: Not a directory"),
    ("init net.onnx -o spec.qdq.yaml", "this spec exists already, and is not overwritten"),
    ("init net.onnx --data specs", "{images: FOLDER, size: SIDE}"),
    ("init net.onnx --data specs", "no data there fits the model's inputs: input [?, 1, 16, 16]"),
    ("init net.onnx --data pix.npz", "{arrays: pix.npz, names: {input: pixels}}"),
    # explain
    ("explain cal.npz", "cal.npz: this is nothing that can be explained"),
    ("explain pyproject.toml", "pyproject.toml: TensorRT's layer information cannot be used"),
    ("explain specs", "specs: there are no results yet"),
    ("explain a.onnx b.onnx c.onnx", "a model is explained alone, or with its original before it"),
    ("explain a.qdq.yaml b.qdq.yaml --culprits", "one case or model"),
    ("explain run.json", "run.json: TensorRT's layer information has no layers"),
    ("explain specs --reference net.onnx", "--reference is for a model"),
    ("explain pyproject.toml --data cal.npz", "--data is for models that are run"),
    ("explain net.onnx --layers 0", "--layers: 0 is not at least 1"),
    # lint and list
    ("lint net.onnx --target tensorrt-12", "unknown lint target 'tensorrt-12'"),
    ("lint net.onnx", "no target is given\n  name one with --target, of: "),
    ("lint net.onnx --target tensorrt-10 --compute-capability hopper", "not a compute capability"),
    ("list specs", "names of specs end in .qdq.yaml"),
    ("list bakends", "there is no such spec or folder (did you mean 'backends'?)"),
    # the machine
    ("config --mode sleep", "--mode"),
    ("doctor --plugin none.so", "there is no file"),
    ("doctor --device x", "--device"),
    ("cluster list", "list needs the address of the scheduler"),
    ("cluster start --host 10.0.0.5", "needs certificates"),
    ("worker tcp://10.0.0.5:8786", "plain tcp is refused beyond this machine"),
    # results
    ("upgrade-check specs --python nowhere", "no spec was found"),
    ("baseline list gone", "gone: there is no such file or folder"),
    ("cache export", "FILE is for export and import, which need it"),
    ("compare run.json run.json --fail-on=-5%", "--fail-on"),
    ("compare run.json run.json --fail-on 5", "5%"),
    ("compare run.json run.json --data cal.npz", "--data is for folders of results"),
    ("compare specs specs --fail-on 5%", "--fail-on is for two records"),
    ("compare specs run.json", "a record is not compared with a folder"),
    ("upgrade-check net.onnx --python nowhere", "net.onnx: this is no spec\n"),
    ("upgrade-check spec.qdq.yaml --python nowhere --values input:1", "--values is for folders of results"),
    ("compare run.json empty.json", "empty.json: this is no run record"),
    ("compare run.json result.json", "result.json: this is the result of one case, not a run record"),
    ("cache clear --older-than 30d", "--older-than is for prune"),
    ("cache prune --older-than 30", "a time with its unit is expected"),
    ("cache import none.zip", "none.zip: there is no such archive"),
]


@pytest.fixture
def project(verb, models: Path, tmp_path: Path) -> Path:
    shutil.copy(models / "digits_resnet.onnx", tmp_path / "net.onnx")
    shutil.copy(DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx", tmp_path / "quantized.onnx")
    apart = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save_model(onnx.load(tmp_path / "net.onnx"), tmp_path / "apart.onnx", **apart)
    (tmp_path / "scheme.json").write_text('{"schema_version": 1, "backend": "onnxruntime", "sites": []}')
    (tmp_path / "spec.qdq.yaml").write_text(SPEC)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (tmp_path / "specs").mkdir()
    np.savez(tmp_path / "specs" / "unrelated.npz", other=np.zeros((2, 2), np.float32))
    (tmp_path / "cal.npz").write_bytes(b"PK" + bytes(2_000_000))
    np.savez(tmp_path / "pix.npz", pixels=np.zeros((2, 1, 16, 16), np.float32))
    run = record_to_json(sample_run())
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "result.json").write_text(json.dumps({"schema_version": 1, **run["cases"][0]}))
    (tmp_path / "empty.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_an_error_is_one_message(verb, project: Path, words: str, message: str) -> None:
    before = {file: file.read_bytes() for file in project.rglob("*") if file.is_file()}
    result = verb(*words.split())
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) <= 4
    data = verb(*words.split(), "--json")
    assert data.code == 2
    assert ("what" in data.json) == (words != "list specs")  # which lists the specs that it can load
    assert data.json.get("what", "") in data.err
    named = re.match(r"\w+\.onnx(?=: )", message)
    assert named is None or Path(data.json["where"]).name == named[0]
    assert {file: file.read_bytes() for file in before} == before
    journals = [file.read_text() for file in project.rglob("trials.jsonl")]
    assert not any('"trial"' in text for text in journals), "nothing was measured"
