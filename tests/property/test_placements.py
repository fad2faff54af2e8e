"""Properties of insert, strip, import, diff, folding and rehearsals for any model and any placement that fits it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper
from onnx_text import outputs_of, parsed
from random_models import (
    MODES,
    by_graph,
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

from qdqspec.graph.flat import closed, flat_form
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model
from qdqspec.graph.ops import OF_PAIRS
from qdqspec.graph.protos import all_graphs, copied, graphs_inside, refill, rename_tensors, with_value
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.graph.trt import DOMAIN, VERSION
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.dynamic_kernels import with_kernels
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS, RUN_TIME
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import Inserter, RaisedInputs, insert_qdq, raised
from qdqspec.qdq.pairs import PairMaker, QuantSource, biased_layer, makes_output, misfit
from qdqspec.qdq.quantizer import Corrections, Quantizer, weight_key
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


@st.composite
def placed_in_one_format(draw: st.DrawFn) -> Drawn:
    """A model and a placement of any format that is stored."""
    fmt = FORMATS[
        draw(st.sampled_from([n for n, f in FORMATS.items() if n != BIAS_FORMAT and not f.at_run_time]))
    ]
    activations = ("uint8",) if fmt.block else (fmt.name,)
    return draw(placed_models(activations=activations, weights=(fmt.name,)))


@given(placed_in_one_format(), MODES)
def test_strip_with_the_reference_restores_a_model_of_any_format_and_its_opset(drawn, mode) -> None:
    model, placement = drawn
    inserted = quantized_model(model, placement, mode)
    onnx.checker.check_model(inserted.proto, full_check=True)
    needed = [FORMATS[site.format].opset for site in placement.sites]
    assert inserted.opset == max([model.opset, *needed])
    assert bytes_of(strip_qdq(inserted, model).proto) == bytes_of(model.proto)


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


@given(rehearsed())
def test_a_rehearsed_placement_computes_the_outputs_of_the_inserted_one(drawn) -> None:
    model, several = drawn
    numbers, feed = Quantizer(model, ranges_for(model)), random_inputs(model)
    sites = [site for placement in several for site in placement.sites]
    with rehearsal_of(model, sites, numbers, feed) as rehearsal, tempfile.TemporaryDirectory() as folder:
        for placement in (*several, Placement(sites=frozenset())):
            expected = built_outputs(model, placement, numbers, feed, Path(folder))
            for name, values in rehearsal.engine(placement).run(feed).items():
                np.testing.assert_array_equal(values, expected[name])


@given(rehearsed(), st.data())
def test_any_part_of_a_site_can_be_rehearsed(drawn, data) -> None:
    """A pair may be enabled for only some of the consumers of its site."""
    model, (placement, _) = drawn
    numbers, feed = Quantizer(model, ranges_for(model)), random_inputs(model)
    parts = frozenset(
        Site(tensor=s.tensor, consumers=tuple(ends), format=s.format, axis=s.axis, weight=s.weight)
        for s in placement.sites
        if (ends := data.draw(st.sets(st.sampled_from(s.consumers))))
    )
    some = Placement(sites=parts)
    with (
        rehearsal_of(model, placement.sites, numbers, feed) as rehearsal,
        tempfile.TemporaryDirectory() as folder,
    ):
        expected = built_outputs(model, some, numbers, feed, Path(folder))
        for name, values in rehearsal.engine(some).run(feed).items():
            np.testing.assert_array_equal(values, expected[name])


# ---- insertion equals a reference that is written in the most obvious way ------------------------
#
# Each pair of `PairMaker` is before the first node that reads it; one that only a graph output reads is at the end.
# The order of nodes and initializers is not compared (`unordered`).


KINDS = {
    "8 bits": (("uint8", "int8"), ("int8",)),
    "raised opsets": (("int16", "uint8", "fp8"), ("int16", "int8", "fp8")),
    "blocked weights": (("uint8",), ("int8_b16", "int4", "nvfp4", "int8")),
    "scales at run time": ((RUN_TIME, "uint8"), ("int8",)),
}


def convolutions() -> Model:
    """A bias as initializer, one as Constant node, and none; an inner tensor is an output."""
    kernel = (3, 3, 1, 1)
    proto = parsed(
        """g (float[1,3,4,4] x) => (float[1,3,4,4] i, float[1,3,4,4] y) {
            [h_made] h = Conv(x, w1, b)  [i_made] i = Conv(h, w22, c)  [y_made] y = Conv(i, w333) }""",
        13, ir=10, w1=kernel, w22=kernel, w333=kernel, b=(3,), c=(3,),
    ).proto  # fmt: skip
    node = helper.make_node("Constant", [], ["c"], "c_made", value=proto.graph.initializer.pop())
    proto.graph.node.insert(0, node)
    return Model(proto)


def products() -> Model:
    """Products that share a weight, for dynamic and blocked formats."""
    return parsed(
        """g (float[2,64] x) => (float[2,64] y, float[2,8] z) { [first] a = MatMul(x, w)
            [relu] r = Relu(a)  [second] y = MatMul(r, w)  [third] z = MatMul(r, ww) }""",
        21, ir=10, w=(64, 64), ww=(64, 8),
    )  # fmt: skip


def shifted(model: Model, placement: Placement) -> Quantizer:
    """Numbers with a shift for each bias that can be corrected."""
    layers = [(site, biased_layer(model, site)) for site in placement.sites if site.weight]
    shifts = {
        weight_key(site): np.linspace(-1, 1, layer.channels, dtype=np.float32)
        for site, layer in layers
        if layer is not None
    }
    return Quantizer(model, ranges_for(model), corrections=Corrections(biases=shifts))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_insertion_equals_the_reference(kind: str, data: st.DataObject) -> None:
    fixed = st.sampled_from([convolutions, products]).map(lambda make: make())
    model = data.draw(onnx_models(repeated_names=True).map(Model) | fixed)
    activations, weights = KINDS[kind]
    drawn = data.draw(placements(model, activations=activations, weights=weights))
    sites = frozenset(site for site in drawn.sites if misfit(model, site) is None)
    check_insertion(model, Placement(sites=sites), data.draw(st.sampled_from(["integer", "float"])))


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.dynamic and fmt.block])
@given(chosen=st.sets(st.sampled_from(range(6)), min_size=1))
def test_insertion_of_blocks_with_dynamic_scales_equals_the_reference(name: str, chosen: set[int]) -> None:
    model = products()
    ends = [("x", "first"), ("r", "second"), ("r", "third"), ("w", "first"), ("w", "second"), ("ww", "third")]
    sites = [
        Site(
            tensor=tensor,
            consumers=(Consumer(node, int("w" in tensor)),),
            format=name,
            axis=0 if "w" in tensor else 1,
            weight="w" in tensor,
        )
        for tensor, node in ends
    ]
    check_insertion(model, Placement(sites=frozenset(sites[i] for i in chosen)), "integer")


def check_insertion(model: Model, placement: Placement, mode: str) -> None:
    numbers, floats = shifted(model, placement), floating(placement.sites, mode)
    inserter = Inserter(model, numbers, floating=floats)
    inserter.insert(
        Placement(sites=frozenset(placement.ordered[::2]))
    )  # a candidate made before has no effect
    found = inserter.insert(placement).proto
    assert unordered(found) == unordered(insert_by_reference(model, placement, numbers, floats))
    if RUN_TIME not in {site.format for site in placement.sites} and mode == "integer":
        onnx.checker.check_model(found)  # the order of the nodes is topological


def insert_by_reference(
    model: Model, placement: Placement, numbers: QuantSource, floating: Collection[Site]
) -> onnx.ModelProto:
    """The model with the pairs of a placement."""
    maker = PairMaker(model, numbers, floating=frozenset(floating))
    floats = {s.tensor: maker.float_name(s.tensor) for s in placement.sites if makes_output(s)}
    pairs = [
        (site, part, maker.make(part, source=floats.get(site.tensor, ""), whole=site))
        for site in placement.ordered
        for part in (replace(site, consumers=ends) for ends in by_graph(model, site.consumers))
    ]
    opset = max([model.opset, *(pair.opset for _, _, pair in pairs)])
    is_raised = opset > model.opset or model.proto.ir_version < 4
    before = flat_form(raised(model.proto, opset)) if is_raised else model.flat
    inputs = RaisedInputs(model, before.graph.node, is_raised=is_raised)
    proto = copied(before)
    nodes = list(proto.graph.node)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    replace_constant = partial(_replace_constant, initializers, constants)
    for node in nodes:
        rename_tensors(node, lambda name: floats.get(name, name))
    readers = {}
    for _, site, pair in pairs:
        ends = [end for end in site.consumers if not end.is_output]
        readers[pair.output] = {
            place for end in ends for place in inputs.of(site.tensor, end, site.consumers, "", "")
        }
        for index, number in readers[pair.output]:
            nodes[index].input[number] = pair.output
    pairs.sort(key=lambda one: min(readers[one[2].output], default=(len(nodes), 0)))
    for _, _, pair in pairs:
        initializers |= {tensor.name: tensor for tensor in pair.constants}
        if pair.bias is not None and pair.bias.is_added:
            initializers[pair.bias.value.name] = pair.bias.value
            nodes[min(readers[pair.output])[0]].input.append(pair.bias.value.name)
        elif pair.bias is not None:
            replace_constant(pair.bias.value.name, pair.bias.value)
    stored = [(site, pair.integer) for _, site, pair in pairs if pair.integer is not None]
    for tensor in {site.tensor for site, _ in stored}:
        integers = [integer for site, integer in stored if site.tensor == tensor]
        covered = {end for site, _ in stored if site.tensor == tensor for end in site.consumers}
        if maker.is_private(tensor) and covered == set(model.consumers[tensor]):
            replace_constant(tensor, integers.pop(0))
            refill(proto.graph.input, [value for value in proto.graph.input if value.name != tensor])
        initializers |= {integer.name: integer for integer in integers}
    anchors = [min(readers[pair.output], default=(len(nodes), 0))[0] for _, _, pair in pairs]
    added = [(index, 0, pair.nodes) for index, (_, _, pair) in zip(anchors, pairs, strict=True)]
    given = [(index, 1, (node,)) for index, node in enumerate(map(copied, nodes))]
    refill(
        proto.graph.node,
        [node for _, _, some in sorted(added + given, key=lambda one: one[:2]) for node in some],
    )
    refill(proto.graph.initializer, initializers.values())
    domains = {node.domain for node in proto.graph.node} - {opset.domain for opset in proto.opset_import}
    if DOMAIN in domains:
        proto.opset_import.add(domain=DOMAIN, version=VERSION)
    if any(site.format == RUN_TIME for site in placement.sites):
        proto = with_kernels(proto)
    instead = {pair.integer.name: site.tensor for _, site, pair in pairs if pair.integer is not None}
    return closed(proto, instead) if model.has_bodies else proto


def _replace_constant(
    initializers: dict[str, TensorProto], constants: dict[str, onnx.NodeProto], name: str, value: TensorProto
) -> None:
    if name in initializers:
        initializers[name] = value
    else:
        constants[name].CopyFrom(with_value(constants[name], value))
        constants[name].output[0] = value.name


def unordered(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes and initializers of all its graphs in the order of their bytes."""
    sorted_model = copied(proto)
    _sort(sorted_model.graph)
    return sorted_model


def _sort(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for body in graphs_inside(node):
            _sort(body)
    for field in (graph.node, graph.initializer):
        refill(field, sorted(map(copied, field), key=lambda one: one.SerializeToString(deterministic=True)))
