"""Nodes that stay in floating point: denied by a spec, with invalid patterns as errors, and attention masks."""

from __future__ import annotations

import gc
import io
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx_text import kernels
from written_cases import check_of, normal, written_case

from qdqspec import load_spec
from qdqspec.app.preparation.prepare import require_patterns
from qdqspec.app.session import Session
from qdqspec.errors import BackendError, DataError, PlacementError, SpecError
from qdqspec.graph.model import load_model
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.search.base import Proposal
from qdqspec.types import Case, PatternRules, Placement, TuneRules

WORDS = ("fake.run_noise=0.005", "fake.wall_noise=0.01", "fake.build_noise=0.002")
DENIED = {"conv1", "add"}
RULES = {
    "denied": PatternRules(deny=("Add",), exclude=("conv1",)),
    "not allowed": PatternRules(allow=("Conv",), include=("conv[0345]",), deny=("Add",), exclude=("*1",)),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Five convolutions and a residual, all faster when quantized."""
    text = """net (float[1,8,24,24] x) => (float[1,8,24,24] y) {
      [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)  [conv3] b = Conv<pads = [1, 1, 1, 1]>(a, w1)
      [conv1] c = Conv<pads = [1, 1, 1, 1]>(b, w2)  [add] d = Add(b, c)
      [conv4] e = Conv<pads = [1, 1, 1, 1]>(d, w3)  [conv5] y = Conv<pads = [1, 1, 1, 1]>(e, w4) }"""
    data, weights = {"x": normal(2, 8, 24, 24)}, kernels(5, 8, 8, 3, 3)
    return written_case(tmp_path_factory.mktemp("net"), text, data, TuneRules(trials=12), **weights)


@pytest.fixture(scope="module")
def outputs(case: Case) -> Path:
    """The output of a run without filters, which has every kind of file that a search can start from."""
    root = case.model.parent
    with Session(backend="fake", root=root, output=Path("free"), backend_option=WORDS, layout="") as session:
        session.search(case)
        study = session.study(case)
        study.export(root / "free" / "everything.onnx", study.space.resolve(study.space.everything()))
        study.close()
    return root / "free"


def quantized_nodes(placement: Placement) -> set[str]:
    """The nodes that read a quantized tensor."""
    return {end.node for site in placement.sites for end in site.consumers}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("strategy", ["attribution", "region"])
def test_no_tried_placement_quantizes_a_denied_node(
    case: Case, outputs: Path, tmp_path: Path, strategy: str, rules: str
) -> None:
    files = [outputs / name for name in ("everything.onnx", "patterns.yaml", "scheme.json", "trials.jsonl")]
    original = load_model(case.model)
    placement, _ = import_placement(load_model(files[0]), original).placement_for(original)
    assert quantized_nodes(placement) >= DENIED
    tune = replace(case.tune, strategy=strategy, start_from=tuple(files))
    filtered = replace(case, patterns=RULES[rules], tune=tune)
    words = {"output": Path(strategy), "backend_option": WORDS, "layout": ""}
    with Session(backend="fake", root=tmp_path, **words) as session:
        trials = session.search(filtered).trials
    read = set().union(*(quantized_nodes(trial.placement) for trial in trials))
    assert {"conv0", "conv4"} <= read  # other nodes are quantized
    assert DENIED.isdisjoint(read)
    assert all(trial.ok or "patterns:" not in str(trial.error) for trial in trials)
    tuned = load_model(tmp_path / strategy / "tuned.onnx")
    original = load_model(case.model)
    placement, _ = import_placement(tuned, original).placement_for(original)
    assert DENIED.isdisjoint(quantized_nodes(placement))


@pytest.mark.parametrize(("rules", "part"), [("denied", ()), ("not allowed", ("conv1", "add"))])
def test_a_denied_placement_of_the_user_fails_without_a_build(
    case: Case, tmp_path: Path, rules: str, part: tuple[str, ...]
) -> None:
    filtered = replace(case, patterns=RULES[rules])
    with Session(backend="fake", root=tmp_path, backend_option=WORDS) as session, ExitStack() as opened:
        free, study = (opened.enter_context(session.study(each)) for each in (case, filtered))
        everything = free.space.resolve(free.space.everything())
        trial = study.evaluate(Proposal(placement=everything, phase="mine", subgraph=part))
        assert trial.status == "failed"
        assert "an input of node 'add', which patterns: keeps in floating point" in str(trial.error)
        with pytest.raises(BackendError, match="cannot be the one to beat"):
            study.commit(everything)
        with pytest.raises(PlacementError, match="is no unit that can be labelled"):
            study.evaluate({"conv1": "in+out"})
        assert study.evaluate(study.space.everything()).ok
        assert DENIED.isdisjoint(quantized_nodes(study.confirm().result.winner))


# ---- invalid patterns -----------------------------------------------------------------------------

SPEC = """\
qdqspec: 1
model: m.onnx
patterns:
  allow: ["Conv > Relu", "Cnov > Relu"]
  deny: [softmax, "Conv > (Relu"]
checks: [{kind: speedup, min: 1}]
"""


def error_of(text: str, folder: Path) -> SpecError:
    path = folder / "a.qdq.yaml"
    path.write_text(text, encoding="utf-8")
    (case,) = load_spec(path).cases()
    with pytest.raises(SpecError) as caught:
        require_patterns(case)
    return caught.value


def test_all_invalid_patterns_are_reported_each_with_a_caret(tmp_path: Path) -> None:
    error = error_of(SPEC, tmp_path)
    assert [problem[:2] for problem in error.problems] == [(4, 27), (5, 10), (5, 27)]
    lines = str(error).splitlines()
    assert "a.qdq.yaml:4:27: unknown operator 'Cnov' (did you mean 'Conv'?)" in lines[0]
    assert lines[3].index("^") == lines[2].index("Cnov")
    assert "did you mean 'Softmax'?" in str(error)
    escaped = error_of(SPEC.replace('"Cnov > Relu"', '"Cn\\u006fv > Relu"'), tmp_path)
    assert "unknown operator 'Cnov'" in str(escaped)


# ---- attention masks with infinite values, or with the smallest ones of a float type --------------

INF, SMALLEST = -np.inf, np.finfo(np.float32).min
HIDDEN = np.triu(np.ones((16, 16), np.bool_), 1)  # a causal mask hides later positions
# How the scores ``s`` become masked scores ``m``, the type of the mask, and its values.
FORMS: dict[str, tuple[str, str, np.ndarray]] = {
    "infinite input": ("m = Add(s, mask)", "float", np.where(HIDDEN, INF, 0).astype(np.float32)),
    "half the smallest": (
        "m = Add(s, mask)",
        "float",
        np.where(HIDDEN, 0.51 * SMALLEST, 0).astype(np.float32),
    ),
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


def attention(folder: Path, form: str, mask: np.ndarray | None = None) -> Case:
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
    return replace(
        case, checks=(check_of("parity", min_sqnr_db=20), check_of("lint", target="onnxruntime-cpu"))
    )


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
    assert ("in calibration sample 0, as masks are" in note) == (form != "a thousand million")


def test_a_mask_that_hides_everything_is_an_error(session: Session, tmp_path: Path) -> None:
    case = attention(tmp_path, "infinite input", np.full((16, 16), INF, np.float32))
    with pytest.raises(DataError, match=r"'y' .* is NaN or infinite in each of 8 samples.*'mask'") as caught:
        session.work(case).search  # noqa: B018 - it searches
    assert caught.value.__traceback__ is not None  # its frames keep no file open
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and not each.closed]
    assert str(case.inputs.calibration) not in [str(getattr(each, "name", "")) for each in files]
    masks = np.zeros((8, 16, 16), np.float32)
    masks[::2] = INF
    (tmp_path / "some").mkdir()
    assert session.work(attention(tmp_path / "some", "infinite input", masks)).search.winner.sites
