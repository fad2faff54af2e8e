"""Attention masks with infinite values, or with the smallest ones of a float type, in the forms of exporters."""

from __future__ import annotations

import gc
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import check_of, normal, written_case

from qdqspec.app.session import Session
from qdqspec.errors import DataError
from qdqspec.types import Case, TuneRules

INF, SMALLEST = -np.inf, np.finfo(np.float32).min
HIDDEN = np.triu(np.ones((16, 16), np.bool_), 1)  # a causal mask hides later positions
# How the scores ``s`` become masked scores ``m``, the type of the mask, and its values.
FORMS: dict[str, tuple[str, str, np.ndarray]] = {
    "infinite input": ("m = Add(s, mask)", "float", np.where(HIDDEN, INF, 0).astype(np.float32)),
    "smallest input": ("m = Add(s, mask)", "float", np.where(HIDDEN, SMALLEST, 0).astype(np.float32)),
    "infinite choice": ("m = Where(mask, low, s)", "bool", HIDDEN),
    "computed": ("f = Cast<to = 1>(mask)  n = Mul(f, low)  m = Add(s, n)", "int64", HIDDEN.astype(np.int64)),
    "infinite half": ("m = Add(s, mask)", "float16", np.where(HIDDEN, INF, 0).astype(np.float16)),
    "smallest half": ("m = Add(s, mask)", "float16", np.where(HIDDEN, -65504, 0).astype(np.float16)),
    "a thousand million": (
        "c = Add(s, mask)  m = Identity(c)",
        "float",
        np.where(HIDDEN, -1e9, 0).astype(np.float32),
    ),
}


COVERAGE = TuneRules(objective="coverage", trials=3)


def attention(folder: Path, form: str, mask: np.ndarray | None = None, **limits: object) -> Case:
    """A case of a model with one attention head."""
    body, kind, usual = FORMS[form]
    real = "float16" if kind == "float16" else "float"
    dtype = np.dtype(np.float16 if real == "float16" else np.float32)
    low = INF if form == "infinite choice" else SMALLEST
    text = f"""net ({real}[b,16,64] x, {kind}[b,16,16] mask) => ({real}[b,16,64] y) {{
          q = MatMul(x, w)  t = Transpose<perm = [0, 2, 1]>(q)  s = MatMul(q, t)  {body}
          p = Softmax<axis = -1>(m)  a = MatMul(p, q)  y = MatMul(a, v) }}"""
    constants = {name: normal(64, 64, deviation=0.1, seed=at).astype(dtype) for at, name in enumerate("wv")}
    if "low" in body:
        constants["low"] = np.float32(low)
    masks = np.broadcast_to(usual if mask is None else mask, (8, 16, 16))
    data = {"x": normal(8, 16, 64).astype(dtype), "mask": masks}
    case = written_case(folder, text, data, COVERAGE, **constants)
    parity = check_of("parity", min_sqnr_db=20, **limits)
    return replace(case, checks=(parity, check_of("lint", target="onnxruntime-cpu")))


@pytest.mark.parametrize("form", FORMS)
def test_masked_scores_stay_float_and_the_rest_does_not(form: str, session: Session, tmp_path: Path) -> None:
    case = attention(tmp_path, form)
    assert session.judge(case, case.checks[0]).verdict.outcome == "pass"
    work = session.work(case)
    evidence = work.record.evidence
    assert 20 < evidence.parity.sqnr_db < 80
    paired = {pair.site.tensor for pair in evidence.pairs}
    assert {"p", "q"} <= paired
    assert paired.isdisjoint({"m", "c", "mask", "mask/float32", "n"})
    ranges = work.prepared.calibrated[1].ranges
    assert "s" in ranges
    assert ranges.keys().isdisjoint({"m", "c"})
    assert not [tensor for tensor, span in ranges.items() if span.largest > 1000 and "mask" not in tensor]
    (note,) = [line for line in evidence.warnings if "'m'" in line]
    assert "so left in floating point" in note


def test_inputs_that_are_searched_keep_the_mask(session: Session, tmp_path: Path) -> None:
    case = attention(tmp_path, "infinite input", search={"examples": 30, "seconds": 60})
    session.judge(case, case.checks[0])
    (found,) = session.work(case).record.evidence.parity_search.values()
    assert found.tried > 3
    if found.found is not None:
        assert all(np.isfinite([one.low, one.high]).all() for one in found.found.inputs)


def test_a_mask_that_hides_everything_is_an_error(session: Session, tmp_path: Path) -> None:
    case = attention(tmp_path, "infinite input", np.full((16, 16), INF, np.float32))
    with pytest.raises(DataError, match=r"'y' .* is NaN or infinite in each of 8 samples.*'mask'") as caught:
        session.work(case).search  # noqa: B018 - it searches
    assert caught.value.__traceback__ is not None  # its frames keep no file open
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and not each.closed]
    assert str(case.inputs.calibration) not in [str(getattr(each, "name", "")) for each in files]
