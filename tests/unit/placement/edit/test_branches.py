"""Products inserted behind normalizations that a residual sum reads too: where, and back to the float model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from chain_models import TOKENS, ChainModel
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of

from qdqspec.app.preparation.branching import scaled_branches
from qdqspec.app.preparation.files import write_placed, write_placement
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.save import save_model
from qdqspec.qdq.edit.branches import find_branches
from qdqspec.qdq.edit.equalize import branched, branches_of, equalized, misfit_of, products_of, restored
from qdqspec.qdq.read.diff import diff_models
from qdqspec.qdq.read.import_qdq import import_placement
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.scheme.scheme_file import apply_scheme, write_scheme
from qdqspec.types import Case, Inputs, QuantizeRules, TuneRules

WIDE = 128
SAMPLES = np.random.default_rng(1).standard_normal((16, 2, TOKENS, 8)).astype(np.float32)


def residual_model(why: str = "", channels: int = 8, outlier: float = 1.0) -> Model:
    """Two linear layers behind a normalization, which a sum at the end reads too.

    The scales of its channels are 1, but for one, which is ``outlier``.
    """
    work = ChainModel(3, [2, TOKENS, channels])
    scale, bias = work.constant(channels), work.constant(channels)
    values = np.ones(channels, np.float32)
    values[1] = outlier
    work.constants[0].CopyFrom(numpy_helper.from_array(values, scale))
    if why == "decomposed":
        work.add("Mul", work.add("Relu", "x"), scale)
        normal = work.add("Add", work.now, bias)
    elif why == "sum":
        normal = work.add("Add", work.add("Relu", "x"), bias)
    else:
        normal = work.add("Relu", "x") if why == "relu" else work.add("LayerNormalization", "x", scale, bias)
    weights = [work.constant(channels, WIDE // 2 if why == "narrow" else WIDE) for _ in range(2)]
    one = work.add("MatMul", normal, weights[0])
    other = work.add("MatMul", normal, weights[0 if why == "shared" else 1])
    added = work.add("Add", one, other)
    hidden = work.add("Relu", added)
    inner = WIDE // 2 if why == "narrow" else WIDE
    back = work.add("MatMul", hidden, work.constant(inner, channels))
    if why == "taken":
        normal = work.add("Identity", normal)
        work.nodes[-1].output[0] = normal = "t0_scaled"
    work.add("Add", back, normal)
    model = work.model(*([weights[0]] if why == "output" else []))
    if why == "fed":
        value = helper.make_tensor_value_info(weights[0], TensorProto.FLOAT, [channels, inner])
        model.proto.graph.input.append(value)
        return Model(model.proto)
    return model


@pytest.mark.parametrize(
    "why", ["", "decomposed", "sum", "relu", "narrow", "shared", "taken", "output", "fed"]
)
def test_linear_layers_that_read_a_normalization_may_read_a_product(why: str) -> None:
    model = residual_model(why)
    branches = find_branches(model)
    assert bool(branches) is (why in ("", "decomposed"))
    for branch in branches:
        assert [model.by_name[name].op_type for name in branch.readers] == ["MatMul", "MatMul"]
        assert {model.by_name[name].inputs[0] for name in branch.readers} == {branch.tensor}
        assert find_branches(model, {branch.tensor}) == []


def test_a_normalization_that_only_linear_layers_read_needs_no_product() -> None:
    work = ChainModel(0, [2, TOKENS, 8])
    work.add("LayerNormalization", "x", work.constant(8), work.constant(8))
    work.add("MatMul", work.now, work.constant(8, 2 * WIDE))
    assert branched(work.model()) == ()


@given(st.lists(st.integers(-10, 10), min_size=8, max_size=8))
def test_factors_change_no_bit_of_the_outputs_and_are_removed_again(exponents: list[int]) -> None:
    model = residual_model()
    (change,) = branched(model)
    scaled = equalized(model, [replace(change, exponents=tuple(exponents))])
    one, other = (outputs_of(each, {"x": SAMPLES[0]}, "ENABLE_ALL")[0] for each in (model, scaled))
    assert one.tobytes() == other.tobytes()
    assert restored(scaled.flat).SerializeToString() == model.flat.SerializeToString()


def test_bad_factors_are_rejected() -> None:
    model = residual_model()
    (change,) = branched(model)
    assert misfit_of(model, [change]) is None
    assert "cannot be inserted" in str(misfit_of(residual_model("relu"), [change]))
    assert "cannot be inserted" in str(misfit_of(model, [replace(change, exponents=(0,) * 9)]))
    weight = next(one for one in model.proto.graph.initializer if list(one.dims) == [8, WIDE])
    values = numpy_helper.to_array(weight).copy()
    values[0, 0] = 3e38
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    most = replace(change, exponents=(-10,) * 8)
    assert "cannot be scaled exactly" in str(misfit_of(Model(model.proto), [most]))


def prepared(
    session: Session, folder: Path, outlier: float = 100.0, corrections: object = ("equalization",)
) -> Prepared:
    """A case of the model with calibration data, prepared."""
    save_model(residual_model(outlier=outlier).proto, folder / "model.onnx")
    np.savez(folder / "calibration.npz", x=SAMPLES)
    case = Case(
        id="default",
        model=folder / "model.onnx",
        inputs=Inputs(calibration=folder / "calibration.npz"),
        quantize=QuantizeRules(corrections=corrections),  # type: ignore[arg-type]
    )
    return session.work(case).prepared


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(root=tmp_path_factory.mktemp("root")) as opened:
        yield opened


@pytest.fixture(scope="module")
def work(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The case of a model with an outlier in a normalization."""
    return prepared(session, tmp_path_factory.mktemp("outlier"))


def test_outliers_of_a_normalization_are_scaled(work: Prepared) -> None:
    (change,) = branches_of(work.folded)
    assert change.branch is not None
    assert change.branch.tensor == "t0"
    assert change.exponents[1] == min(change.exponents) < 0
    assert products_of(work.folded) == {"t0_scaled"}
    (note,) = (note for note in work.warnings if "product" in note)
    assert note.startswith(
        "equalization inserts 1 product with factors of channels between a normalization and"
    )
    assert "t0_scaled" in work.space.tensors
    assert not any("t0_scaled" in unit.nodes for unit in work.space.units)  # it is not quantized itself


def test_operators_without_labels_have_no_products_before_them(
    work: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scaled_branches(work, work.given)
    labels = {op: kinds for op, kinds in work.capabilities.labels.items() if op != "MatMul"}
    monkeypatch.setattr(work, "capabilities", replace(work.capabilities, labels=labels, dynamic={}))
    assert scaled_branches(work, work.given) == ()


@pytest.mark.parametrize(
    ("outlier", "corrections"),
    [(100.0, "none"), (100.0, ("bias",)), (1.0, ("equalization",))],
    ids=["none", "others", "similar ranges"],
)
def test_products_are_inserted_by_equalization_and_for_outliers_only(
    session: Session, tmp_path: Path, outlier: float, corrections: object
) -> None:
    assert branches_of(prepared(session, tmp_path, outlier, corrections).folded) == ()


def test_a_placement_with_a_product_is_written_repeated_and_removed(work: Prepared, tmp_path: Path) -> None:
    placement = work.space.resolve(work.space.everything())
    write_placement(work, placement, tmp_path / "q.onnx")
    write_placed(work, placement, tmp_path / "scheme.json")
    quantized, model = load_model(tmp_path / "q.onnx"), work.given
    assert "t0_scaled" in quantized.by_name
    assert apply_scheme(model, tmp_path / "scheme.json").proto.SerializeToString() == (
        quantized.proto.SerializeToString()
    )
    assert strip_qdq(quantized, model).proto.SerializeToString() == model.proto.SerializeToString()
    alone = Model(strip_qdq(quantized).proto)
    assert [node.op_type for node in alone.nodes] == [node.op_type for node in model.nodes]
    assert alone.constants.keys() == model.constants.keys()
    imported = import_placement(quantized, model)
    write_scheme(
        tmp_path / "again.json", imported.placement, imported.pairs, "imported", factors=imported.equalized
    )
    again = Model(apply_scheme(model, tmp_path / "again.json").proto)
    assert diff_models(again, quantized).same
    assert not diff_models(model, quantized).skeleton.differs
    with pytest.raises(PlacementError, match="'t0_factors' cannot be inserted in it"):
        apply_scheme(residual_model("narrow"), tmp_path / "scheme.json")


@pytest.mark.parametrize("corrections", ["none", "auto"])
def test_a_search_from_a_quantized_model_inserts_products_if_that_has_them(
    session: Session, tmp_path: Path, corrections: str
) -> None:
    """The kept scales of a quantized model without products are those of the model as it is."""
    work = prepared(session, tmp_path, corrections=corrections)
    placement = work.space.resolve(work.space.everything())
    write_placement(work, placement, tmp_path / "start.onnx")
    case = Case(
        id="default",
        model=tmp_path / "model.onnx",
        inputs=Inputs(calibration=tmp_path / "calibration.npz"),
        tune=TuneRules(start_from=(tmp_path / "start.onnx",)),
    )
    started = session.work(case).prepared
    assert bool(branches_of(started.folded)) is (corrections == "auto")
    assert bool(started.start_scales.tensors) is (corrections == "none")


def test_a_model_whose_product_another_tool_removed_keeps_its_weights(work: Prepared) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(work.folded.proto)
    factors = next(one for one in proto.graph.initializer if one.name == "t0_factors")
    factors.name = "renamed"
    node = next(node for node in proto.graph.node if node.name == "t0_scaled")
    node.input[1] = "renamed"
    assert products_of(Model(proto)) == {"t0_scaled"}
    found = Model(strip_qdq(Model(proto)).proto)
    for name in found.constants:
        np.testing.assert_array_equal(found.array(name), Model(proto).array(name))
    assert "t0_scaled" in found.by_name
