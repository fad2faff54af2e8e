"""Data in which samples have several lengths: caches that grow from token to token, audio, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from sessions import Open
from written_cases import normal, written_case

from qdqspec import Session
from qdqspec.types import AccuracyRules, Case, Inputs, TuneRules

HEADS, DIM, TOKENS = 2, 16, 40
DECODER = f"""decoder (int64[b,s] ids, float[b,{HEADS},past,{DIM}] past)
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
AUDIO = """audio (float[n,1,t] x) => (float[n,10] y) {
  a = Conv<strides = [2]>(x, w1)  b = Relu(a)  c = Conv<strides = [2]>(b, w2)  d = Relu(c)
  e = ReduceMean<axes = [2], keepdims = 0>(d)  y = MatMul(e, w3) }"""


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: normal(*shape, deviation=shape[0] ** -0.5) for name, shape in shapes.items()}


def case_of(folder: Path, text: str, samples: list[dict[str, Any]], **constants: np.ndarray) -> Case:
    """A case with a file for each sample, for calibration and evaluation."""
    case = written_case(folder, text, {}, **constants)
    (folder / "data").mkdir()
    for number, sample in enumerate(samples):
        np.savez(folder / "data" / f"{number}.npz", **sample)
    data = folder / "data"
    return replace(case, inputs=Inputs(calibration=data, evaluation=data if "labels" in samples[0] else None))


def decoder(folder: Path) -> Case:
    width = HEADS * DIM
    square = dict.fromkeys(("wk", "wq", "wo"), (width, width))
    constants = weights(table=(TOKENS, width), **square, wu=(width, 64), wd=(64, width), head=(width, TOKENS))
    constants |= {"split": np.array([0, 0, HEADS, DIM]), "merge": np.array([0, 0, width])}
    random = np.random.default_rng(1)
    lengths = [(0, 6), (0, 2), (3, 1), (9, 1), (5, 1), (20, 1)]
    samples = [
        {"ids": random.integers(0, TOKENS, (1, 1, tokens)), "past": normal(1, 1, HEADS, past, DIM, seed=past)}
        for past, tokens in lengths
    ]
    return case_of(folder, DECODER, samples, **constants)


def audio(folder: Path) -> Case:
    lengths = (200, 80, 333, 120, 64, 250, 90, 170)
    samples = [  # the widest range is in the longest sample
        {"x": normal(1, 1, each, deviation=5 if each == 333 else 1, seed=each), "labels": [number]}
        for number, each in enumerate(lengths)
    ]
    return case_of(folder, AUDIO, samples, **weights(w1=(16, 1, 5), w2=(16, 16, 5), w3=(16, 10)))


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
