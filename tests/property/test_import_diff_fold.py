"""Properties of import, diff, constant folding and the check `survival` for any model and placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from hypothesis import given, strategies as st
from onnx_text import outputs_of
from random_models import MODES, placed_models, quantized_model, random_inputs, ranges_for

from qdqspec.graph.fold import QUANTIZING, fold_constants
from qdqspec.graph.model import Model
from qdqspec.graph.protos import all_graphs, copied, graphs_inside, refill
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.formats import BIAS_FORMAT
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.types import Consumer, Placement, Site

Drawn = tuple[Model, Placement]

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
        node.op_type in QUANTIZING or node.attributes.get("to") in INTEGERS for node in model.nodes
    )
    feeds = random_inputs(model)
    outputs = [outputs_of(m, feeds) for m in (model, folded)]
    for before, after in zip(*outputs, strict=True):
        # A value at a rounding boundary may be rounded up or down, depending on the order of sums before it.
        most = max(1.0, ROUNDED_APART * before.size) if is_rounded else 0
        assert np.count_nonzero(~np.isclose(after, before, **near)) <= most
    kept = [[n.outputs for n in m.nodes if n.op_type in QUANTIZING] for m in (model, folded)]
    removed_tensors = within_removed(model.proto, folded.proto)
    assert [outputs for outputs in kept[0] if removed_tensors.isdisjoint(outputs)] == kept[1]


def within_removed(proto: onnx.ModelProto, folded: onnx.ModelProto) -> set[str]:
    """The tensors produced in bodies of nodes that folding removed because no node reads their outputs."""
    left = {name for node in folded.graph.node for name in node.output}
    removed = [node for node in proto.graph.node if left.isdisjoint(node.output)]
    graphs = (graph for node in removed for body in graphs_inside(node) for graph in all_graphs(body))
    return {name for graph in graphs for inner in graph.node for name in inner.output}
