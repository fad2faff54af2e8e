"""Outputs of the float model, its Q/DQ arithmetic and the built engine compared, and the pairs that cost most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of
from onnx_text import saved
from sessions import Open
from stand_ins import RunsModels
from written_cases import check_of, normal, written_case

from qdqspec import find_culprits
from qdqspec._core.arrays import Array
from qdqspec._core.config import Settings
from qdqspec.accuracy.compare import compare_outputs
from qdqspec.app.evidence.parity import SideBySide, culprits_of
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import ARITHMETIC, Resources
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.onnxruntime.engine import OnnxRuntime, OnnxRuntimeEngine
from qdqspec.errors import BackendError
from qdqspec.graph.model import load_model
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.types import Case, Consumer, CulpritEvidence, Inputs, PlacedPair, QuantizeRules, Site, TuneRules

DATA = Path(__file__).parents[2] / "data"
MODELS = Path(__file__).parents[3] / "specs" / "models"
EIGHT_BITS = DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
CALIBRATION = MODELS.parent / "data" / "digits_calibration.npz"


class Clipping(OnnxRuntime):
    """A runtime that saturates the outputs of quantized models only."""

    name = "clipping"

    def build(self, model: Path, options: BuildOptions) -> OnnxRuntimeEngine:
        engine = super().build(model, options)
        if any(node.op_type in QDQ_OPS for node in load_model(model).nodes):
            run = engine.run
            engine.run = lambda feeds: {n: np.clip(v, -2, 2) for n, v in run(feeds).items()}  # type: ignore[method-assign]
        return engine


class Breaking(RunsModels):
    """A runtime for any file whose engines fail on inputs of ones and on all later inputs."""

    name = target = "breaking"

    def __init__(self) -> None:
        self.builds = 0

    def build(self, model: Path, options: BuildOptions) -> Engine:
        seen: list[Array] = []

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            seen.append(feeds["x"])
            if any((each == 1).all() for each in seen):
                raise BackendError("it broke down")
            return {"y": feeds["x"]}

        self.builds += 1
        return SimpleNamespace(run=run, close=lambda: None)  # type: ignore[return-value]  # the used part of an engine


def resources(backend: object) -> Resources:
    return Resources(backend=backend, options=BuildOptions(), settings=Settings())  # type: ignore[arg-type]  # the used attributes


def test_a_runtime_that_saturates_is_distinguished_from_quantization() -> None:
    feeds = arrays_of(CALIBRATION)["input"]
    files = MODELS / "digits_resnet.onnx", EIGHT_BITS
    with SideBySide(resources(Clipping()), *files) as compared:
        found = compare_outputs([compared.run({"input": feeds[i : i + 1]}) for i in range(8)], "calibration")
    assert found.quantization[0].sqnr_db > 20
    assert found.runtime[0].sqnr_db < 10
    assert found.sqnr_db < 10


def test_a_model_that_cannot_run_unfused_is_compared_without_separate_errors(tmp_path: Path) -> None:
    (tmp_path / "engine.onnx").write_bytes(b"no model of ONNX Runtime's")
    x = np.zeros((1, 2), np.float32)
    with SideBySide(resources(Breaking()), tmp_path / "reference.onnx", tmp_path / "engine.onnx") as compared:
        run = compared.run({"x": x})
        assert run.arithmetic is None
        assert run.tuned["y"] is x
        assert compared.undivided.startswith("onnxruntime does not compute it unfused: ")


def test_a_failed_engine_is_built_again_for_the_next_input(tmp_path: Path) -> None:
    backend = Breaking()
    with SideBySide(resources(backend), tmp_path / "a.onnx", tmp_path / "b.onnx", divided=False) as compared:
        for value, works in ((0, True), (0, True), (1, False), (0, True)):
            feeds = {"x": np.full(3, value, np.float32)}
            if works:
                compared.run(feeds)
            else:
                with pytest.raises(BackendError, match="it broke down"):
                    compared.run(feeds)
    assert backend.builds == 3  # the reference is built twice, the other model once


class Counting(RunsModels):
    """ONNX Runtime, with a count of the engines that are open."""

    name = ARITHMETIC

    def __init__(self) -> None:
        self.builds = self.open = self.most = 0

    def build(self, model: Path, options: BuildOptions) -> OnnxRuntimeEngine:
        engine = OnnxRuntime().build(model, options)
        close = engine.close

        def counted() -> None:
            self.open -= 1
            close()

        engine.close = counted  # type: ignore[method-assign]
        self.builds += 1
        self.open += 1
        self.most = max(self.most, self.open)
        return engine


@pytest.mark.parametrize(("held", "most"), [(2**20, 1), (9_000, 3)])
def test_runs_of_all_inputs_equal_single_runs_with_a_limit_of_open_engines(held: int, most: int) -> None:
    """An image has a kilobyte, so that the limit of 9,000 bytes is reached at the ninth."""
    pictures = arrays_of(CALIBRATION)["input"][:12]
    feeds = [{"input": picture[None]} for picture in pictures]
    files = MODELS / "digits_resnet.onnx", EIGHT_BITS
    backend = Counting()
    with SideBySide(resources(backend), *files) as compared:
        runs = list(compared.runs(iter(feeds), held))
        assert list(compared.runs(())) == []
    assert (backend.builds, backend.most, backend.open) == (3, most, 0)
    with SideBySide(resources(OnnxRuntime()), *files) as compared:
        for run, each in zip(runs, feeds, strict=True):
            for ours, theirs in zip(run, compared.run(each), strict=True):
                np.testing.assert_array_equal(ours["logits"], theirs["logits"])


def test_parity_is_of_samples_and_not_of_the_batches_that_they_are_run_in(tmp_path: Path) -> None:
    """The fifth sample, weaker than the others, is negated; three samples that fill up its batch do not count."""
    x = np.float32([[9, 0]] * 4 + [[1, 2]])
    case = written_case(tmp_path, "net (float[4,2] x) => (float[4,2] y) { y = Identity(x) }", {"x": x})
    text = """net (float[4,2] x) => (float[4,2] y) {
      two = Constant <value_float = 2.0> ()  is = Equal(x, two)  no = Neg(x)  y = Where(is, no, x) }"""
    with Session(root=tmp_path, backend="onnxruntime") as session:
        found = session.work(case).parity_with(saved(tmp_path / "other.onnx", text, opset=17, ir_version=8))
    assert found.samples == 5
    (output,) = found.outputs
    assert output.cosine == pytest.approx((1 - 4) / 5)
    assert output.sqnr_db == pytest.approx(10 * np.log10((4 * 81 + 5) / 16))
    assert output.agreement == {"top1": 0.8}
    # whole batches of a data loader, whose labels show that their rows are samples
    np.savez(tmp_path / "data.npz", x=x[None, 1:], labels=np.zeros((1, 4)))
    whole = replace(case, id="whole", inputs=Inputs(evaluation=tmp_path / "data.npz"))
    with Session(root=tmp_path, backend="onnxruntime") as session:
        found = session.work(whole).parity_with(tmp_path / "other.onnx")
    assert (found.samples, found.outputs[0].cosine) == (4, pytest.approx((1 - 4) / 5))


def test_a_model_compared_with_itself_runs_on_a_few_inputs_only(tmp_path: Path) -> None:
    case = written_case(
        tmp_path, "net (float[1,2] x) => (float[1,2] y) { y = Neg(x) }", {"x": np.ones((20, 2), np.float32)}
    )
    with Session(root=tmp_path, backend="onnxruntime") as session:
        work = session.work(case)
        same = work.parity_with(work.prepared.given.path)
        other = saved(
            tmp_path / "other.onnx",
            "net (float[1,2] x) => (float[1,2] y) { y = Neg(x) }",
            opset=17,
            ir_version=8,
        )
        assert (same.samples, work.parity_with(other).samples) == (8, 20)


# ---- slices of an output --------------------------------------------------------------------------


@pytest.fixture
def wide_case(tmp_path: Path) -> Case:
    """One convolution whose output has four channels of hundreds and two channels below one; all pairs are selected."""
    sizes = np.float32([300] * 4 + [0.3] * 2).reshape(6, 1, 1, 1)
    text = "net (float[1,16,16,16] x) => (float[1,6,16,16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    rules, weight = TuneRules(objective="coverage", trials=3), normal(6, 16, 3, 3, deviation=1 / 12) * sizes
    case = written_case(tmp_path, text, {"x": normal(16, 16, 16, 16, seed=1)}, rules, w=weight)
    return replace(case, quantize=QuantizeRules(outputs=True))


def test_a_case_notes_a_slice_far_below_its_output_unless_it_has_a_limit(
    wide_case: Case, tmp_path: Path
) -> None:
    notes, checks = [], (check_of("parity", min_sqnr_db=20), check_of("parity", min_slice_sqnr_db=10))
    for check, outcome in zip(checks, ("pass", "fail"), strict=True):
        own = replace(wide_case, id=outcome, checks=(check,))
        with Session(root=tmp_path, backend="onnxruntime") as session:
            assert session.judge(own, check).verdict.outcome == outcome
            evidence = session.work(own).record.evidence
        notes.append([line for line in evidence.warnings if "slice" in line])
    (found,) = evidence.parity.outputs
    worst = found.far_slice()
    assert (worst.axis, worst.index in (4, 5)) == (1, True)
    ((noted,), without) = notes
    assert f"slice {worst.index} of axis 1" in noted
    assert not without


# ---- the Q/DQ pairs that cost the most accuracy ---------------------------------------------------

TEXT = """chain (float[1,8,12,12] x) => (float[1,8,12,12] y) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)  [relu] b = Relu(a)  [second] c = Conv<pads = [1, 1, 1, 1]>(b, w2)
  [add] d = Add(b, c)  [third] y = Conv<pads = [1, 1, 1, 1]>(d, w) }"""


def placed(tensor: str, *readers: tuple[str, int], scale: float, weight: bool = False) -> PlacedPair:
    ends = tuple(Consumer(*reader) for reader in readers)
    site = Site(tensor=tensor, consumers=ends, format="int8" if weight else "uint8", weight=weight)
    return PlacedPair(site=site, scale=(scale,), zero_point=(0 if weight else 128,))


# Activations are between -4 and 4, weights below one: only the pair that `second` reads has a coarse step.
PAIRS = (
    placed("x", ("first", 0), scale=0.04),
    placed("w", ("first", 1), ("third", 1), scale=0.008, weight=True),
    placed("b", ("second", 0), scale=2.0),
    placed("b", ("add", 0), scale=0.04),
    placed("w2", ("second", 1), scale=0.008, weight=True),
    placed("d", ("third", 0), scale=0.08),
)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    weights = {name: normal(8, 8, 3, 3, deviation=0.08, seed=at) for at, name in enumerate(("w", "w2"))}
    return written_case(tmp_path, TEXT, {"x": normal(12, 8, 12, 12, seed=2)}, **weights)


@pytest.fixture
def bench(open_session: Open, case: Case) -> Prepared:
    return open_session().work(case).prepared


def ranked(bench: Prepared, pairs: Iterable[PlacedPair], **limits: Any) -> CulpritEvidence:
    return culprits_of(bench, SchemeFile(backend="any", pairs=tuple(pairs)), **limits)


def test_the_coarsest_pair_is_first_and_the_sqnr_without_it_is_as_reported(bench: Prepared) -> None:
    found = ranked(bench, PAIRS)
    worst = found.pairs[0]
    assert (worst.site.tensor, worst.nodes) == ("b", ("second",))
    assert worst.share > 0.9
    assert (found.total, len(found.pairs), found.samples, found.data) == (6, 6, 8, "calibration")
    assert found.output == "y"
    others = ranked(bench, [pair for pair in PAIRS if pair.site.consumers[0].node != "second"])
    assert worst.without_db == pytest.approx(others.together_db)
    assert worst.without_db > found.together_db + 10


def test_shares_of_listed_pairs_and_the_rest_add_up_to_one(bench: Prepared) -> None:
    whole, some = ranked(bench, PAIRS, most=None), ranked(bench, PAIRS, most=2)
    assert sum(pair.share for pair in whole.pairs) == pytest.approx(1)
    assert whole.rest == pytest.approx(0, abs=1e-9)
    assert [pair.site for pair in some.pairs] == [pair.site for pair in whole.pairs[:2]]
    assert some.rest == pytest.approx(1 - sum(pair.share for pair in some.pairs))
    together = placed("b", ("second", 0), ("add", 0), scale=2.0)
    assert ranked(bench, [together, *PAIRS[:2]], most=1).pairs[0].nodes == ("add", "second")


def test_reasons_for_missing_pairs(bench: Prepared, session: Session, tmp_path: Path) -> None:
    assert ranked(bench, []) == CulpritEvidence(missing="no pair that a scheme can carry is in it")
    late = ranked(bench, PAIRS, seconds=0.0)
    assert (len(late.pairs), late.missing) == (1, "the time was over")
    text = "f (float[1,4] x) => (float[1,4] y) { [relu] a = Relu(x)  [own] y = plugins.Op(a) }"
    case = Case(id="default", model=saved(tmp_path / "own.onnx", text))
    refused = ranked(session.work(case).prepared, [placed("x", ("relu", 0), scale=0.1)])
    assert refused.pairs == ()
    assert refused.missing.startswith("onnxruntime does not compute it: ")


def test_samples_of_pairs_are_counted_as_those_of_outputs_also_in_batches(session: Session) -> None:
    inputs = Inputs(batch=16, calibration=CALIBRATION)
    case = Case(id="default", model=MODELS / "digits_resnet.onnx", inputs=inputs)
    prepared = session.work(case).prepared
    scheme = SchemeFile(backend="any", pairs=(placed("input", ("/conv1/Conv", 0), scale=0.1),))
    assert culprits_of(prepared, scheme).samples == 80


def test_pairs_of_another_tool_are_ranked_with_the_names_of_the_float_model() -> None:
    digits = find_culprits(MODELS / "digits_resnet.onnx", EIGHT_BITS, most=None, calibration=CALIBRATION)
    assert digits.total == len(digits.pairs) == 41  # 13 biases are no separate pairs
    names = set(load_model(MODELS / "digits_resnet.onnx").by_name)
    assert {node for pair in digits.pairs for node in pair.nodes} <= names
    total = sum(10 ** (-pair.alone_db / 10) for pair in digits.pairs)
    assert -10 * np.log10(total) == pytest.approx(digits.together_db, abs=2)
    first, second = digits.pairs[:2]
    assert first.makes_output  # this tool quantizes the logits
    assert first.nodes == ()
    assert "/fc/Gemm" in second.nodes
    assert 30 < digits.together_db < 60
    assert first.without_db is not None
    assert first.without_db > digits.together_db


def test_responsible_pairs_are_searched_only_if_a_parity_check_fails(open_session: Open, case: Case) -> None:
    session = open_session()
    asked = replace(case, tune=TuneRules(trials=3))
    loose, strict = (
        replace(asked, id=str(least), checks=(check_of("parity", min_sqnr_db=least),)) for least in (5, 90)
    )
    assert session.judge(loose, loose.checks[0]).verdict.outcome == "pass"
    assert session.evidence(loose, frozenset({"parity"})).culprits is None
    assert session.evidence(strict, frozenset({"parity"})).culprits is None, "the check is not judged yet"
    verdict = session.judge(strict, strict.checks[0]).verdict
    assert verdict.outcome == "fail"
    assert verdict.headline.endswith("by quantization")
    assert any(section.title.startswith("Noisiest of") for section in verdict.sections)
