"""Properties of insert, strip, import, diff, folding and rehearsals for any model and any placement that fits it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given, strategies as st
from onnx_text import outputs_of, parsed
from random_models import (
    MODES,
    bytes_of,
    floating,
    onnx_models,
    placed_models,
    placements,
    quantized_model,
    random_inputs,
    ranges_for,
)
from rehearsing import built_outputs, rehearsal_of

from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model
from qdqspec.graph.ops import OF_PAIRS
from qdqspec.graph.protos import all_graphs, copied, graphs_inside, refill
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS, RUN_TIME
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import Inserter, insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

Drawn = tuple[Model, Placement]


def quantizer(model: Model) -> Quantizer:
    return Quantizer(model, ranges_for(model))


@given(placed_models(), MODES)
def test_strip_without_a_reference_restores_all_but_values_of_integer_weights(drawn, mode) -> None:
    model, placement = drawn
    stripped = Model(strip_qdq(quantized_model(model, placement, mode)).proto)
    if mode == "float":
        assert bytes_of(stripped.proto) == bytes_of(model.proto)
        return
    assert [(n.name, n.inputs, n.outputs) for n in stripped.nodes] == [
        (n.name, n.inputs, n.outputs) for n in model.nodes
    ]
    assert list(stripped.initializers) == list(model.initializers)
    stored = {site.tensor for site in placement.sites if site.weight}
    for name, tensor in model.constants.items():
        if name in stored:
            largest = np.abs(model.array(name)).max()
            np.testing.assert_allclose(stripped.array(name), model.array(name), atol=largest / 127)
        else:
            assert stripped.constants[name] == tensor


@given(placed_models(odd=False))
def test_candidates_with_shared_weights_compute_the_same(drawn: Drawn) -> None:
    model, placement = drawn
    numbers, feeds = quantizer(model), random_inputs(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = WeightStore(folder, threshold_bytes=64)
        path = folder / "candidate.onnx"
        save_model(Inserter(model, numbers, store=store).insert(placement).proto, path)
        shared = outputs_of(path, feeds)
    inlined = outputs_of(insert_qdq(model, placement, numbers).proto, feeds)
    for left, right in zip(shared, inlined, strict=True):
        np.testing.assert_array_equal(left, right)


@given(placed_models())
def test_a_scheme_is_read_back_from_its_file(drawn: Drawn) -> None:
    model, placement = drawn
    numbers = quantizer(model)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "scheme.json"
        SchemeFile(backend="onnxruntime", pairs=numbers.placed(placement)).write(path)
        known = SchemeFile.read(path)
        applied = SchemeFile.read(path).apply(model)
    assert known.placement == placement
    assert known.placement.digest == placement.digest
    assert set(known.pairs) == set(numbers.placed(placement))
    assert bytes_of(applied.proto) == bytes_of(insert_qdq(model, placement, numbers).proto)


# ---- import, diff and constant folding -----------------------------------------------------------


ROUNDED_APART = 0.05  # share of an output's values
INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)  # a Cast to one of these types truncates


@given(placed_models(activations=("uint8", "int8", "int16"), weights=("int8", "uint16")), MODES)
def test_import_returns_the_inserted_placement_and_pairs(drawn: Drawn, mode: str) -> None:
    model, placement = drawn
    imported = import_placement(quantized_model(*drawn, mode), model)

    def is_stored(site: Site) -> bool:  # as an activation counts; constants without dimensions stay float
        has_dims = site.weight and bool(model.constants[site.tensor].dims)
        return not site.weight or site.format == BIAS_FORMAT or (mode == "integer" and has_dims)

    expected = (
        replace(p, stored=is_stored(p.site)) for p in Quantizer(model, ranges_for(model)).placed(placement)
    )
    assert imported.placement == placement
    assert imported.placement.digest == placement.digest
    assert set(imported.pairs) == set(expected)
    assert imported.notes == ()


@given(placed_models(), MODES)
def test_diff_with_the_original_has_only_the_pairs(drawn: Drawn, mode: str) -> None:
    model, placement = drawn
    for found, side, sites in (
        (diff_models(model, quantized_model(*drawn, mode)), "added", placement.sites),
        (diff_models(quantized_model(*drawn, mode), model), "removed", placement.sites),
    ):
        assert not found.skeleton.differs, found.skeleton
        assert {(p.tensor, frozenset(p.readers)) for p in getattr(found, side)} == {
            (s.tensor, frozenset(reader_of(s.tensor, end) for end in s.consumers)) for s in sites
        }
        assert found.same == (not sites)


def reader_of(tensor: str, end: Consumer) -> str:
    return f"graph output '{tensor}'" if end.is_output else f"{end.node}:{end.input}"


@st.composite
def foldable(draw: st.DrawFn) -> onnx.ModelProto:
    """A model with or without Q/DQ, of which one input may be replaced by a constant."""
    drawn = draw(placed_models(odd=False))
    proto = (quantized_model(*drawn) if draw(st.booleans()) else drawn[0]).proto
    values = random_inputs(drawn[0], seed=draw(st.integers(0, 9)))
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(values)))
        fixed = copied(proto)
        refill(fixed.graph.input, [value for value in proto.graph.input if value.name != name])
        fixed.graph.initializer.append(onnx.numpy_helper.from_array(values[name], name))
        return fixed
    return proto


@given(foldable())
def test_folding_keeps_results_and_quantization(proto: onnx.ModelProto) -> None:
    model = Model(proto)
    folded = fold_constants(model).model
    onnx.checker.check_model(folded.proto, full_check=True)
    # Without a kernel for float16, ONNX Runtime inserts casts to float32 and removes consecutive casts.
    is_half = any(known.elem_type == onnx.TensorProto.FLOAT16 for known in model.types.values())
    near = {"rtol": 2e-3, "atol": 1e-3} if is_half else {"rtol": 1e-5, "atol": 1e-6}
    is_rounded = any(
        node.op_type in OF_PAIRS or node.attributes.get("to") in INTEGERS for node in model.nodes
    )
    feeds = random_inputs(model)
    outputs = [outputs_of(m, feeds) for m in (model, folded)]
    for before, after in zip(*outputs, strict=True):
        # A value at a rounding boundary may be rounded up or down, depending on the order of sums before it.
        most = max(1.0, ROUNDED_APART * before.size) if is_rounded else 0
        assert np.count_nonzero(~np.isclose(after, before, **near)) <= most
    kept = [[n.outputs for n in m.nodes if n.op_type in OF_PAIRS] for m in (model, folded)]
    removed_tensors = within_removed(model.proto, folded.proto)
    assert [outputs for outputs in kept[0] if removed_tensors.isdisjoint(outputs)] == kept[1]


def within_removed(proto: onnx.ModelProto, folded: onnx.ModelProto) -> set[str]:
    """The tensors produced in bodies of nodes that folding removed because no node reads their outputs."""
    left = {name for node in folded.graph.node for name in node.output}
    removed = [node for node in proto.graph.node if left.isdisjoint(node.output)]
    graphs = (graph for node in removed for body in graphs_inside(node) for graph in all_graphs(body))
    return {name for graph in graphs for inner in graph.node for name in inner.output}


# ---- rehearsals ----------------------------------------------------------------------------------


@st.composite
def rehearsed(draw: st.DrawFn) -> tuple[Model, list[Placement]]:
    """A model and placements that one graph rehearses."""
    model = Model(draw(onnx_models(max_nodes=5)))
    return model, [draw(placements(model)) for _ in range(2)]


@given(rehearsed(), st.data())
def test_a_rehearsed_placement_computes_the_outputs_of_the_inserted_one(drawn, data) -> None:
    """A pair may be enabled for only some of the consumers of its site."""
    model, several = drawn
    numbers, feed = Quantizer(model, ranges_for(model)), random_inputs(model)
    sites = [site for placement in several for site in placement.sites]
    parts = frozenset(
        replace(site, consumers=tuple(ends))
        for site in several[0].sites
        if (ends := data.draw(st.sets(st.sampled_from(site.consumers))))
    )
    with rehearsal_of(model, sites, numbers, feed) as rehearsal, tempfile.TemporaryDirectory() as folder:
        for placement in (*several, Placement(sites=parts), Placement(sites=frozenset())):
            expected = built_outputs(model, placement, numbers, feed, Path(folder))
            for name, values in rehearsal.engine(placement).run(feed).items():
                np.testing.assert_array_equal(values, expected[name])


# ---- candidates of one model ---------------------------------------------------------------------


@st.composite
def placed_in_any_formats(draw: st.DrawFn) -> Drawn:
    """A model and a placement of one stored format, or of formats that differ between sites."""
    name = draw(st.sampled_from([n for n, f in FORMATS.items() if n != BIAS_FORMAT and not f.at_run_time]))
    kinds = [
        (("uint8",) if FORMATS[name].block else (name,), (name,)),
        (("int16", "uint8", "fp8"), ("int16", "int8", "fp8")),
        (("uint8",), ("int8_b16", "int4", "nvfp4", "int8")),
        ((RUN_TIME, "uint8"), ("int8",)),
    ]
    activations, weights = draw(st.sampled_from(kinds))
    model = draw(onnx_models(repeated_names=True).map(Model) | st.builds(products))
    return model, draw(placements(model, activations=activations, weights=weights))


def products() -> Model:
    """Products of which two share a weight, large enough for blocks."""
    return parsed(
        """g (float[2,64] x) => (float[2,64] y, float[2,8] z) { [first] a = MatMul(x, w)
            [relu] r = Relu(a)  [second] y = MatMul(r, w)  [third] z = MatMul(r, ww) }""",
        21, ir=10, w=(64, 64), ww=(64, 8),
    )  # fmt: skip


@given(placed_in_any_formats(), MODES)
def test_a_candidate_is_valid_can_be_inverted_and_is_independent_of_those_made_before(drawn, mode) -> None:
    model, placement = drawn
    inserter = Inserter(model, quantizer(model), floating=floating(placement.sites, mode))
    inserter.insert(Placement(sites=frozenset(placement.ordered[::2])))
    found = Model(inserter.insert(placement).proto)
    assert bytes_of(found.proto) == bytes_of(quantized_model(*drawn, mode).proto)
    assert bytes_of(strip_qdq(found, model).proto) == bytes_of(model.proto)
    assert import_placement(found, model).placement == placement
    if not any(FORMATS[site.format].at_run_time for site in placement.sites):
        onnx.checker.check_model(found.proto, full_check=True)
        assert found.opset == max([model.opset, *(FORMATS[site.format].opset for site in placement.sites)])
