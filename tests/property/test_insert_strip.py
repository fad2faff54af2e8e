"""Properties of insert and strip for any model and any placement that fits it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given, strategies as st
from onnx_text import outputs_of
from random_models import MODES, bytes_of, placed_models, quantized_model, random_inputs, ranges_for

from qdqspec.graph.model import Model
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS
from qdqspec.qdq.insert import Inserter, insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile, apply_scheme, read_scheme, write_scheme
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Placement

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
        write_scheme(path, SchemeFile(backend="onnxruntime", pairs=numbers.placed(placement)))
        known = read_scheme(path)
        applied = apply_scheme(model, path)
    assert known.placement == placement
    assert known.placement.digest == placement.digest
    assert set(known.pairs) == set(numbers.placed(placement))
    assert bytes_of(applied.proto) == bytes_of(insert_qdq(model, placement, numbers).proto)
