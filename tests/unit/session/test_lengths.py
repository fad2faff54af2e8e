"""Data in which samples have several lengths: caches that grow from token to token, audio, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from onnx import numpy_helper
from sessions import Open

from qdqspec import Session
from qdqspec.types import AccuracyRules, Case, Inputs, TuneRules

HEADS, DIM, TOKENS = 2, 16, 40
DECODER = f"""<ir_version: 8, opset_import: ["": 17]>
decoder (int64[b,s] ids, float[b,{HEADS},past,{DIM}] past)
  => (float[b,s,{TOKENS}] logits, float[b,{HEADS},total,{DIM}] present) {{
  x = Gather(table, ids)
  k0 = MatMul(x, wk)  k1 = Reshape(k0, split)  k = Transpose<perm = [0, 2, 1, 3]>(k1)
  q0 = MatMul(x, wq)  q1 = Reshape(q0, split)  q = Transpose<perm = [0, 2, 1, 3]>(q1)
  present = Concat<axis = 2>(past, k)
  keys = Transpose<perm = [0, 1, 3, 2]>(present)
  scores = MatMul(q, keys)  p = Softmax<axis = -1>(scores)
  c = MatMul(p, present)  c1 = Transpose<perm = [0, 2, 1, 3]>(c)  c2 = Reshape(c1, merge)
  o = MatMul(c2, wo)  r = Add(x, o)  u = MatMul(r, wu)  a = Relu(u)  d = MatMul(a, wd)  r2 = Add(r, d)
  logits = MatMul(r2, head) }}"""
AUDIO = """<ir_version: 8, opset_import: ["": 17]> audio (float[n,1,t] x) => (float[n,10] y) {
  a = Conv<strides = [2]>(x, w1)  b = Relu(a)  c = Conv<strides = [2]>(b, w2)  d = Relu(c)
  e = ReduceMean<axes = [2], keepdims = 0>(d)  y = MatMul(e, w3) }"""


def weights(**shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    random = np.random.default_rng(0)
    arrays = {
        name: random.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()
    }
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def decoder(folder: Path) -> Case:
    width = HEADS * DIM
    model = onnx.parser.parse_model(DECODER)
    square = dict.fromkeys(("wk", "wq", "wo"), (width, width))
    model.graph.initializer.extend(
        weights(table=(TOKENS, width), **square, wu=(width, 64), wd=(64, width), head=(width, TOKENS))
    )
    shapes = {"split": [0, 0, HEADS, DIM], "merge": [0, 0, width]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(dims), n) for n, dims in shapes.items())
    onnx.save(model, folder / "decoder.onnx")
    random = np.random.default_rng(1)
    (folder / "data").mkdir()
    for number, (past, tokens) in enumerate([(0, 6), (0, 2), (3, 1), (9, 1), (5, 1), (20, 1)]):
        cache = random.normal(size=(1, 1, HEADS, past, DIM)).astype(np.float32)
        ids = random.integers(0, TOKENS, (1, 1, tokens))
        np.savez(folder / "data" / f"{number}.npz", ids=ids, past=cache)
    return Case(id="default", model=folder / "decoder.onnx", inputs=Inputs(calibration=folder / "data"))


def audio(folder: Path) -> Case:
    model = onnx.parser.parse_model(AUDIO)
    model.graph.initializer.extend(weights(w1=(16, 1, 5), w2=(16, 16, 5), w3=(16, 10)))
    onnx.save(model, folder / "audio.onnx")
    random = np.random.default_rng(1)
    (folder / "data").mkdir()
    for number, length in enumerate((200, 80, 333, 120, 64, 250, 90, 170)):
        loud = np.float32(5 if length == 333 else 1)  # the widest range is in the longest sample
        sample = loud * random.normal(size=(1, 1, length)).astype(np.float32)
        np.savez(folder / "data" / f"{number}.npz", x=sample, labels=[number % 10])
    data = folder / "data"
    return Case(id="default", model=folder / "audio.onnx", inputs=Inputs(calibration=data, evaluation=data))


@pytest.fixture
def session(open_session: Open) -> Session:
    return open_session()


def tuned(case: Case, **rules: object) -> Case:
    return replace(case, tune=TuneRules(trials=6, **rules))


@pytest.mark.parametrize("make", [decoder, audio])
def test_each_sample_is_calibrated_and_compared_in_its_own_shape(
    tmp_path: Path, session: Session, make: Callable[[Path], Case]
) -> None:
    rules = AccuracyRules(metric="top1", min=0.0) if make is audio else None
    case = tuned(make(tmp_path), min_sqnr_db=10.0, objective="coverage", accuracy=rules)
    evidence = session.evidence(case, frozenset({"parity"}))
    assert not evidence.search.unchanged, evidence.search.reason
    assert evidence.parity.samples == len(list((tmp_path / "data").iterdir()))
    assert evidence.parity.data == ("evaluation" if make is audio else "calibration")
    assert evidence.parity.sqnr_db is not None
    assert evidence.parity.sqnr_db > 10
    if make is audio:
        assert evidence.search.accuracy.samples == 8
        highest = max(np.abs(arrays_of(file)["x"]).max() for file in (tmp_path / "data").iterdir())
        span = session.work(case).prepared.calibrated[1].ranges["x"]
        assert max(-span.low, span.high) == pytest.approx(highest), "of samples of all lengths"


def test_the_sample_that_is_timed_has_a_length_in_the_middle(tmp_path: Path, session: Session) -> None:
    prepared = session.work(decoder(tmp_path)).prepared
    (load,) = prepared.loads
    assert {name: value.shape for name, value in load.feeds.items()} == {
        "ids": (1, 1),
        "past": (1, HEADS, 5, DIM),
    }
