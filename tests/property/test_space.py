"""The placement of any labels can be inserted, results in a valid model, and runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings, strategies as st
from onnx_text import outputs_of
from random_models import onnx_models, random_inputs, ranges_for

from qdqspec._core.registry import resolve
from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model
from qdqspec.qdq.formats import RUN_TIME
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import tie_ranges
from qdqspec.qdq.search_space import SchemeSpace, judge
from qdqspec.types import Label, QuantizeRules

BACKENDS: dict[str, Capabilities] = {
    name: resolve("backend", name)().capabilities() for name in ("onnxruntime", "fake")
}
# Its placements run on ONNX Runtime, which crashes on some of them.
BACKENDS["fake"] = replace(BACKENDS["fake"], rules=BACKENDS["onnxruntime"].rules)
MODELS = onnx_models(max_nodes=10)
RULES = st.builds(
    QuantizeRules, weights=st.sampled_from(["per-channel", "per-tensor"]), outputs=st.booleans()
)


def labels_of(data: st.DataObject, space: SchemeSpace) -> dict[str, Label]:
    return {unit.id: data.draw(st.sampled_from(unit.labels)) for unit in space.units}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(MODELS, RULES, st.data())
def test_the_placement_of_any_labels_is_valid_and_runs(backend, proto, rules, data) -> None:
    model = Model(proto)
    space = SchemeSpace(model, BACKENDS[backend], rules=rules)
    placement = space.resolve(labels_of(data, space))
    numbers = Quantizer(model, tie_ranges(model, ranges_for(model)), biases=space.bias_sources)
    inserted = Inserter(model, numbers).insert(placement).proto
    onnx.checker.check_model(inserted, full_check=True)
    feeds = random_inputs(model)
    try:
        expected = outputs_of(proto, feeds, "ENABLE_ALL")
    except Exception:  # noqa: BLE001 - the runtime refuses some of these float models; its errors share no base
        assume(False)
    for ours, theirs in zip(outputs_of(inserted, feeds, "ENABLE_ALL"), expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.isfinite(ours).all()


@pytest.mark.parametrize("backend", BACKENDS)
@given(MODELS, RULES, st.data())
def test_sites_are_on_float_tensors_and_disjoint_consumers(backend, proto, rules, data) -> None:
    model = Model(proto)
    space = SchemeSpace(model, BACKENDS[backend], rules=rules)
    labels = labels_of(data, space)
    placement = space.resolve(labels)
    seen: set[tuple[str, int]] = set()
    for site in placement.sites:
        assert model.elem_type(site.tensor) == onnx.TensorProto.FLOAT
        assert site.weight == (site.tensor in model.constants)
        assert set(site.consumers) <= set(model.ends(site.tensor))
        assert rules.outputs or not any(end.is_output for end in site.consumers)
        assert seen.isdisjoint(site.consumers)
        assert site.weight or site.tensor in space.tensors
        seen.update(site.consumers)
    chosen = {name: label for name, label in labels.items() if label != "fp"}
    completed = dict(placement.labels).items() - chosen.items()
    assert chosen.keys() <= dict(placement.labels).keys()
    for name, label in completed:
        assert label == "in+out"
        assert space.by_id[name].op_type in BACKENDS[backend].completes
    assert space.resolve(dict(placement.labels)) == placement


@given(MODELS, st.data())
def test_onnx_runtime_has_no_float_weight_between_pairs(proto: onnx.ModelProto, data: st.DataObject) -> None:
    """It would quantize such a weight itself (`Capabilities.completes`)."""
    model = Model(proto)
    space = SchemeSpace(model, BACKENDS["onnxruntime"])
    placement = space.resolve(labels_of(data, space))
    ends = {(site.tensor, end) for site in placement.sites for end in site.consumers}
    static = {
        (site.tensor, end) for site in placement.sites for end in site.consumers if site.format != RUN_TIME
    }
    for unit in (u for u in space.units if u.op_type in BACKENDS["onnxruntime"].completes):
        constants = [(site.tensor, end) for site in unit.forms[0].constants for end in site.consumers]
        around = {*unit.edges, *space.result_edges(unit)}
        if space.result_edges(unit) and "in+out" in unit.labels and around <= static:
            assert ends.issuperset(constants)


@pytest.mark.parametrize("backend", BACKENDS)
@given(MODELS, RULES)
def test_a_reason_is_reported_for_exactly_the_units_not_offered(backend, proto, rules) -> None:
    model = Model(proto)
    space = SchemeSpace(model, BACKENDS[backend], rules=rules)
    judged = judge(model, BACKENDS[backend], backend=backend, rules=rules)
    assert {name for name, reason in judged.reasons.items() if not reason} == space.by_id.keys()
    offered = {tensor for unit in space.units for tensor in unit.outputs}
    assert {name for name, reason in judged.outputs.items() if not reason} == offered.intersection(
        model.outputs
    )


@given(MODELS, st.data())
def test_tensors_without_calibration_are_not_quantized(proto: onnx.ModelProto, data: st.DataObject) -> None:
    space = SchemeSpace(Model(proto), BACKENDS["onnxruntime"])
    known = {tensor for tensor in sorted(space.tensors) if data.draw(st.booleans())}
    smaller = space.known(known)
    assert {tensor for unit in smaller.units if "in+out" in unit.labels for tensor in unit.outputs} <= known
    for labels in (smaller.everything(), smaller.uniform("in+out"), smaller.uniform("in-only")):
        placement = smaller.resolve(labels)
        ranged = (site for site in placement.sites if not site.weight and site.format != RUN_TIME)
        assert {site.tensor for site in ranged} <= known
    assert len(space.known(space.tensors).units) == len(space.units)
