"""Comparison of the float model, its Q/DQ arithmetic and the built engine on real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arrays import arrays_of
from changed_models import within_7_bits
from stand_ins import RunsModels
from written_cases import check_of, normal, written_case

from qdqspec import verify
from qdqspec._core.arrays import Array
from qdqspec._core.config import Settings
from qdqspec.accuracy.compare import compare_outputs
from qdqspec.app.evidence.parity import SideBySide
from qdqspec.app.preparation.runtimes import ARITHMETIC, Resources
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.onnxruntime.engine import OnnxRuntime, OnnxRuntimeEngine
from qdqspec.errors import BackendError
from qdqspec.graph.model import QDQ_OPS, load_model
from qdqspec.types import Case, Evidence, QuantizeRules, TuneRules

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
        self.builds += 1
        return BreakingEngine()  # type: ignore[return-value]  # the used part of an engine


class BreakingEngine:
    broken = False

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.broken |= bool((feeds["x"] == 1).all())
        if self.broken:
            raise BackendError("it broke down")
        return {"y": feeds["x"]}

    def close(self) -> None:
        self.broken = True


def bench(backend: object) -> Resources:
    return Resources(
        backend=backend,  # type: ignore[arg-type]  # replacements with the used attributes
        options=BuildOptions(),
        settings=Settings(),
    )


def test_quantization_and_runtime_errors_of_a_real_model_are_separated(tmp_path: Path) -> None:
    """Of a model with 7-bit weights, whose products saturate on no processor."""
    narrow = within_7_bits(EIGHT_BITS, tmp_path / "narrow.onnx")
    shapes = {"input": [1, 1, 16, 16]}
    evidence = verify(MODELS / "digits_resnet.onnx", narrow, shapes=shapes, calibration=CALIBRATION)
    assert evidence.undivided == ""
    (total,), (quantization,), (runtime,) = evidence.outputs, evidence.quantization, evidence.runtime
    assert total.name == quantization.name == runtime.name == "logits"
    assert 20 < quantization.sqnr_db < 60
    # Fused integer kernels round differently, which is their only effect on this model.
    assert quantization.sqnr_db + 3 < runtime.sqnr_db < 100
    assert abs(total.sqnr_db - quantization.sqnr_db) < 3
    assert total.agreement["top1"] > 0.95


def test_a_runtime_that_saturates_is_distinguished_from_quantization() -> None:
    feeds = arrays_of(CALIBRATION)["input"]
    files = MODELS / "digits_resnet.onnx", EIGHT_BITS
    with SideBySide(bench(Clipping()), *files) as compared:
        found = compare_outputs([compared.run({"input": feeds[i : i + 1]}) for i in range(8)], "calibration")
    assert found.quantization[0].sqnr_db > 20
    assert found.runtime[0].sqnr_db < 10
    assert found.sqnr_db < 10


def test_a_model_that_cannot_run_unfused_is_compared_without_separate_errors(tmp_path: Path) -> None:
    (tmp_path / "engine.onnx").write_bytes(b"no model of ONNX Runtime's")
    x = np.zeros((1, 2), np.float32)
    with SideBySide(bench(Breaking()), tmp_path / "reference.onnx", tmp_path / "engine.onnx") as compared:
        run = compared.run({"x": x})
        assert run.arithmetic is None
        assert run.tuned["y"] is x
        assert compared.undivided.startswith("onnxruntime does not compute it unfused: ")


def test_a_failed_engine_is_built_again_for_the_next_input(tmp_path: Path) -> None:
    backend = Breaking()
    with SideBySide(bench(backend), tmp_path / "a.onnx", tmp_path / "b.onnx", divided=False) as compared:
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
    with SideBySide(bench(backend), *files) as compared:
        runs = list(compared.runs(iter(feeds), held))
        assert list(compared.runs(())) == []
    assert (backend.builds, backend.most, backend.open) == (3, most, 0)
    with SideBySide(bench(OnnxRuntime()), *files) as compared:
        for run, each in zip(runs, feeds, strict=True):
            for ours, theirs in zip(run, compared.run(each), strict=True):
                np.testing.assert_array_equal(ours["logits"], theirs["logits"])


# ---- slices of an output --------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """One convolution whose output has four channels of hundreds and two channels below one; all pairs are selected."""
    sizes = np.float32([300] * 4 + [0.3] * 2).reshape(6, 1, 1, 1)
    text = "net (float[1,16,16,16] x) => (float[1,6,16,16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    rules, weight = TuneRules(objective="coverage", trials=3), normal(6, 16, 3, 3, deviation=1 / 12) * sizes
    case = written_case(tmp_path, text, {"x": normal(16, 16, 16, 16, seed=1)}, rules, w=weight)
    return replace(case, quantize=QuantizeRules(outputs=True))


def judged(case: Case, folder: Path, **limits: float) -> tuple[str, Evidence]:
    check = check_of("parity", min_sqnr_db=20, **limits)
    case = replace(case, checks=(check,))
    with Session(root=folder, backend="onnxruntime") as session:
        outcome = session.judge(case, check).verdict.outcome
        return outcome, session.work(case).record.evidence


def test_a_case_notes_a_slice_far_below_its_output_unless_it_has_a_limit(case: Case, tmp_path: Path) -> None:
    outcome, evidence = judged(case, tmp_path)
    assert outcome == "pass"
    (found,) = evidence.parity.outputs
    assert found.sqnr_db > 30
    worst = found.far_slice()
    assert worst.axis == 1
    assert worst.index in (4, 5)
    (noted,) = [line for line in evidence.warnings if "slice" in line]
    assert f"slice {worst.index} of axis 1" in noted
    outcome, evidence = judged(case, tmp_path, min_slice_sqnr_db=10)
    assert outcome == "fail"
    assert not any("slice" in line for line in evidence.warnings)
