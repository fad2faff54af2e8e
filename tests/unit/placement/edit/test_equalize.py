"""Equalization: chains and products that can be scaled, and schemes, strip, import and diff of scaled models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from chain_models import SIZE, TOKENS, ChainModel, image_model
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of, parsed

from qdqspec.app.preparation.correcting import find_branches
from qdqspec.app.preparation.files import write_placed, write_placement
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.errors import PlacementError, StateError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import copied
from qdqspec.graph.storage import save_model
from qdqspec.qdq.chains import EQUALIZED, branched, find_chains
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.equalize import branches_of, equalized, misfit_of, restored, touched
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.match import SchemeNumbers
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Case, Consumer, Inputs, PlacedPair, Placement, QuantizeRules, Site, TuneRules

EXPONENTS = (3, -2, 0, 1)


def changed(model: Model, change: object) -> Model:
    """A copy of the model after ``change`` of its message."""
    proto = copied(model.proto)
    change(proto)  # type: ignore[operator]
    return Model(proto)


def test_a_chain_ends_at_the_weights_of_the_next_layer() -> None:
    model = image_model(0, ["relu", "depthwise", "max"], "gemm")
    (first, second) = find_chains(model)
    assert [c.tensor for c in first.constants] == ["c0", "c1", "c2"]
    assert [c.tensor for c in second.constants] == ["c2", "c3"]
    assert [(c.sign, c.repeat) for c in second.constants] == [(1, 1), (-1, 36)]  # after Flatten
    assert first.absorbers[0].is_depthwise
    assert not second.absorbers[0].is_depthwise


RELU, CONV = "t1 = Relu(t0)", "y = Conv(t1, c2)"
BRANCHES = (
    "then_branch = t () => (float p) { p = Relu(t1) }, else_branch = e () => (float q) { q = Relu(t1) }"
)


@pytest.mark.parametrize(
    ("nodes", "ports", "found"),
    [
        (f"{RELU} {CONV}", "", True),
        (f"{RELU} {CONV} more = Relu(c0)", "", False),
        (f"{RELU} {CONV} more = Add(t0, t1)", "", False),
        (f"{RELU} {CONV} more = If(always) <{BRANCHES}>", "", False),
        (f"t1 = Sigmoid(t0) {CONV}", "", False),
        (f"t1 = Cast<to = 1>(t0) {CONV}", "", False),
        (f"{RELU} {CONV}", "float[2,4,1,1] c2", False),
        (f"{RELU} {CONV}", "t1", False),
    ],
    ids=["chain", "shared", "residual", "body", "sigmoid", "cast", "fed", "output"],
)
def test_chains_that_cannot_be_scaled_are_omitted(nodes: str, ports: str, found: bool) -> None:
    fed, out = (
        (f", {ports}", "") if ports.startswith("float") else ("", ports and f", float[1,4,6,6] {ports}")
    )
    model = parsed(
        f"g (float[1,3,6,6] x{fed}) => (float[1,2,6,6] y{out}) {{ t0 = Conv(x, c0, c1) {nodes} }}",
        c0=(4, 3, 1, 1), c1=(4,), c2=(2, 4, 1, 1), always=np.array(True),
    )  # fmt: skip
    assert [[one.tensor for one in chain.constants] for chain in find_chains(model)] == [
        ["c0", "c1", "c2"]
    ] * found


def test_a_scaled_chain_is_not_scaled_again() -> None:
    model = image_model(0, ["relu"], "conv")
    assert find_chains(equalized(model, [find_chains(model)[0].by((1, 0, 0, 0))])) == []


@pytest.mark.parametrize(
    ("op_type", "numbers", "attributes", "found"),
    [
        ("Slice", (0, 4, 1, 1), {}, True),
        ("Slice", (-1, -5, 1, -1), {}, False),  # the channels in another order
        ("ReduceMean", (), {"axes": [2]}, True),
        ("ReduceMean", (), {"axes": [1]}, False),
        ("ReduceMean", (), {}, False),
    ],
)
def test_a_chain_passes_operators_that_keep_the_channels(
    op_type: str, numbers: tuple[int, ...], attributes: dict[str, object], found: bool
) -> None:
    work = ChainModel(0, [1, 4, SIZE, SIZE])
    work.add("BatchNormalization", "x", *(work.constant(4, least=0.1) for _ in range(4)))
    work.add(op_type, work.now, *map(work.integers, numbers), **attributes)
    work.add("Conv", work.now, work.constant(2, 1 if not found and not numbers else 4, 1, 1))
    assert bool(find_chains(work.model())) is found


@pytest.mark.parametrize("value", [1e-38, 3e38, np.nan])
def test_weights_that_cannot_be_restored_after_scaling_are_rejected(value: float) -> None:
    def change(proto: onnx.ModelProto) -> None:
        weights = numpy_helper.to_array(proto.graph.initializer[0]).copy()
        weights[:, 0, 0, 0] = value
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "c0"))

    model = image_model(0, ["relu"], "conv")
    (chain,) = find_chains(model)
    assert misfit_of(model, [chain.by((-4, 4, -4, 4))]) is None
    why = misfit_of(changed(model, change), [chain.by((-4, 4, -4, 4))])
    assert why is not None
    assert "too large or too small to be scaled exactly" in why


def pairs_of(model: Model) -> tuple[PlacedPair, ...]:
    """Pairs of the convolutions' weights and of the tensor between them."""
    sites = (
        Site(tensor="c0", consumers=(Consumer("n0", 1),), format="int8", axis=0, weight=True),
        Site(tensor="t1", consumers=(Consumer("n2", 0),), format="uint8"),
        Site(tensor="c2", consumers=(Consumer("n2", 1),), format="int8", axis=0, weight=True),
    )
    weights = (np.abs(model.array(site.tensor)) for site in sites if site.weight)
    first, last = (tuple((w.reshape(len(w), -1).max(axis=1) / 127).tolist()) for w in weights)
    return tuple(
        PlacedPair(site=site, scale=scale, zero_point=(0,) * len(scale))
        for site, scale in zip(sites, (first, (0.05,), last), strict=True)
    )


@pytest.fixture
def written(tmp_path: Path) -> tuple[Model, Model, Path]:
    """A float model, the same model with pairs and scaled channels, and its scheme."""
    path = tmp_path / "float.onnx"
    save_model(image_model(0, ["relu"], "conv").proto, path)
    model = load_model(path)
    changes = [chain.by(EXPONENTS) for chain in find_chains(model)]
    scaled = equalized(model, changes)
    pairs = pairs_of(scaled)
    placement = Placement(sites=frozenset(pair.site for pair in pairs))
    scheme = tmp_path / "scheme.json"
    SchemeFile(backend="onnxruntime", pairs=pairs, equalized=changes).write(scheme)
    made = insert_qdq(scaled, placement, SchemeNumbers(scaled, pairs))
    save_model(made.proto, tmp_path / "q.onnx")
    return model, load_model(tmp_path / "q.onnx"), scheme


def test_a_scheme_reproduces_the_factors_and_stripping_removes_them(
    written: tuple[Model, Model, Path],
) -> None:
    model, quantized, scheme = written
    assert (
        SchemeFile.read(scheme).apply(model).proto.SerializeToString() == quantized.proto.SerializeToString()
    )
    assert strip_qdq(quantized, model).proto.SerializeToString() == model.proto.SerializeToString()
    alone = Model(strip_qdq(quantized).proto)
    assert not any(prop.key == EQUALIZED for prop in alone.proto.metadata_props)
    assert alone.array("c1").tobytes() == model.array("c1").tobytes()  # the bias has no pair
    for name in ("c0", "c2"):  # dequantized, without the factors
        np.testing.assert_allclose(alone.array(name), model.array(name), atol=0.2)


@pytest.mark.parametrize("with_reference", [True, False])
def test_an_imported_scheme_reproduces_the_model(
    written: tuple[Model, Model, Path], tmp_path: Path, with_reference: bool
) -> None:
    model, quantized, _ = written
    imported = import_placement(quantized, model if with_reference else None)
    again = tmp_path / "again.json"
    imported.write(again)
    source = model if with_reference else Model(strip_qdq(quantized).proto)
    assert not any(pair.rounding for pair in imported.pairs)
    made, wanted = Model(SchemeFile.read(again).apply(source).proto), quantized
    for name in wanted.constants:
        np.testing.assert_array_equal(made.array(name), wanted.array(name))


def test_diff_reports_scaled_channels(written: tuple[Model, Model, Path]) -> None:
    model, quantized, _ = written
    pairs = pairs_of(model)
    placement = Placement(sites=frozenset(pair.site for pair in pairs))
    plain = Model(insert_qdq(model, placement, SchemeNumbers(model, pairs)).proto)
    found = diff_models(plain, quantized)
    assert not found.skeleton.differs
    texts = [change.text for pair in found.changed for change in pair.changes if change.kind == "channels"]
    assert texts == ["channels as in the float model > scaled by powers of two"] * 2
    assert diff_models(quantized, quantized).same


def test_a_scheme_that_does_not_fit_or_was_changed_is_rejected(written: tuple[Model, Model, Path]) -> None:
    model, _, scheme = written

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.output.append(helper.make_tensor_value_info("t1", TensorProto.FLOAT, None))

    with pytest.raises(PlacementError, match="the channels that 'c0' makes cannot be scaled in it"):
        SchemeFile.read(scheme).apply(changed(model, change))
    content = json.loads(scheme.read_text())
    content["equalized"][0]["exponents"][0] = 2
    scheme.write_text(json.dumps(content))
    with pytest.raises(StateError, match="its numbers are not those that were written"):
        SchemeFile.read(scheme)
    content["equalized"][0]["constants"][0]["sign"] = 3
    scheme.write_text(json.dumps(content))
    with pytest.raises(StateError, match="not a scheme"):
        SchemeFile.read(scheme)


def test_chains_without_a_quantized_tensor_are_dropped() -> None:
    model = image_model(0, ["relu", "conv", "relu"], "conv")
    changes = [chain.by(EXPONENTS) for chain in find_chains(model)]
    assert len(changes) == 2

    def kept(*tensors: str) -> list[int]:
        sites = {Site(tensor=t, consumers=(Consumer("n", 0),), format="uint8") for t in tensors}
        return [changes.index(one) for one in touched(model, changes, Placement(sites=frozenset(sites)))]

    assert kept("t1") == [0]
    assert kept("t3") == [1]
    assert kept("c2") == [0, 1]  # the weight between the chains
    assert kept("x") == kept() == []


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
    branches = [change.branch for change in branched(model) if change.branch is not None]
    assert bool(branches) is (why in ("", "decomposed"))
    for branch in branches:
        assert [model.by_name[name].op_type for name in branch.readers] == ["MatMul", "MatMul"]
        assert {model.by_name[name].inputs[0] for name in branch.readers} == {branch.tensor}


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


def test_factors_of_external_weights_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read beside the model, not in the working folder, where another file has the same name."""
    model = residual_model()
    (change,) = branched(model)
    scaled = equalized(model, [replace(change, exponents=(1, -2, 3, 0, 1, 2, -1, 0))])
    for folder, each in (("own", scaled), ("other", model)):
        (tmp_path / folder).mkdir()
        save_model(each.proto, tmp_path / folder / "model.onnx", limit_bytes=1)
    monkeypatch.chdir(tmp_path / "other")
    path = tmp_path / "own" / "model.onnx"
    found = Model(strip_qdq(load_model(path)).proto, path=path)
    for name in model.constants:
        np.testing.assert_array_equal(found.array(name), model.array(name))


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
    (change,) = branches_of(work.folded).values()
    assert change.branch is not None
    assert change.branch.tensor == "t0"
    assert change.exponents[1] == min(change.exponents) < 0
    assert branches_of(work.folded).keys() == {"t0_scaled"}
    (note,) = (note for note in work.warnings if "product" in note)
    assert note.startswith(
        "equalization inserts 1 product with factors of channels between a normalization and"
    )
    assert "t0_scaled" in work.space.tensors
    assert not any("t0_scaled" in unit.nodes for unit in work.space.units)  # it is not quantized itself


def test_operators_without_labels_have_no_products_before_them(
    work: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_branches(work, work.given)
    labels = {op: kinds for op, kinds in work.capabilities.labels.items() if op != "MatMul"}
    monkeypatch.setattr(work, "capabilities", replace(work.capabilities, labels=labels, dynamic={}))
    assert find_branches(work, work.given) == ()


@pytest.mark.parametrize(
    ("outlier", "corrections"),
    [(100.0, "none"), (100.0, ("bias",)), (1.0, ("equalization",))],
    ids=["none", "others", "similar ranges"],
)
def test_products_are_inserted_by_equalization_and_for_outliers_only(
    session: Session, tmp_path: Path, outlier: float, corrections: object
) -> None:
    assert branches_of(prepared(session, tmp_path, outlier, corrections).folded) == {}


def test_a_placement_with_a_product_is_written_repeated_and_removed(work: Prepared, tmp_path: Path) -> None:
    placement = work.space.resolve(work.space.everything())
    write_placement(work, placement, tmp_path / "q.onnx")
    write_placed(work, placement, tmp_path / "scheme.json")
    quantized, model = load_model(tmp_path / "q.onnx"), work.given
    assert "t0_scaled" in quantized.by_name
    assert SchemeFile.read(tmp_path / "scheme.json").apply(model).proto.SerializeToString() == (
        quantized.proto.SerializeToString()
    )
    assert strip_qdq(quantized, model).proto.SerializeToString() == model.proto.SerializeToString()
    alone = Model(strip_qdq(quantized).proto)
    assert [node.op_type for node in alone.nodes] == [node.op_type for node in model.nodes]
    assert alone.constants.keys() == model.constants.keys()
    imported = import_placement(quantized, model)
    imported.write(tmp_path / "again.json")
    again = Model(SchemeFile.read(tmp_path / "again.json").apply(model).proto)
    assert diff_models(again, quantized).same
    assert not diff_models(model, quantized).skeleton.differs
    with pytest.raises(PlacementError, match="the channels that 't0_factors' makes cannot be scaled in it"):
        SchemeFile.read(tmp_path / "scheme.json").apply(residual_model("narrow"))


@pytest.mark.parametrize("corrections", ["none", "auto"])
def test_a_search_from_a_quantized_model_inserts_products_if_that_has_them(
    session: Session, tmp_path: Path, corrections: str
) -> None:
    """The kept scales of a quantized model without products are those of the model as it is."""
    work = prepared(session, tmp_path, corrections=corrections)
    placement = work.space.resolve(work.space.everything())
    write_placement(work, placement, tmp_path / "start.onnx")
    rules = TuneRules(start_from=(tmp_path / "start.onnx",))
    started = session.work(replace(work.case, quantize=QuantizeRules(), tune=rules)).prepared
    assert bool(branches_of(started.folded)) is (corrections == "auto")
    assert bool(started.start_scales.tensors) is (corrections == "none")


def test_a_model_whose_product_another_tool_removed_keeps_its_weights(work: Prepared) -> None:
    proto = copied(work.folded.proto)
    factors = next(one for one in proto.graph.initializer if one.name == "t0_factors")
    factors.name = "renamed"
    node = next(node for node in proto.graph.node if node.name == "t0_scaled")
    node.input[1] = "renamed"
    assert branches_of(Model(proto)).keys() == {"t0_scaled"}
    found = Model(strip_qdq(Model(proto)).proto)
    for name in found.constants:
        np.testing.assert_array_equal(found.array(name), Model(proto).array(name))
    assert "t0_scaled" in found.by_name
