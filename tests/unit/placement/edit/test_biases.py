"""Corrected biases are inserted with their weights, computed by the rehearsal, stored in schemes and removed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import helper, numpy_helper
from onnx_text import parsed
from rehearsing import built_outputs, rehearsal_of

from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.pairs import biased_layer
from qdqspec.qdq.quantizer import Corrections, Quantizer, weight_key
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

CHANNELS = 3
SITES = tuple(
    Site(tensor=w, consumers=(Consumer(n, 1),), format=fmt, axis=0, weight=True)
    for w, n, fmt in (("w", "first", "int8"), ("v", "second", "int8"), ("w", "first", "int16"))
)
SHIFTS = ([0.25, -0.5, 1e-3], [1.0, 0.1, -3.0], [-1.0, 0.5, 4.0])
PLACEMENT = Placement(sites=frozenset(SITES[:2]))


def model_of(bias: str, seed: int = 0, kind: str = "float") -> Model:
    """Two convolutions; ``bias`` is the form of both biases: initializer, constant, none, shared or graph input."""
    b, c = {"none": ("", ""), "shared": ("b", "b")}.get(bias, ("b", "c"))
    more = f", {kind}[3] b, {kind}[3] c" if bias == "graph input" else ""
    random = np.random.default_rng(seed)
    biases = {name: (CHANNELS,) for name in (b, c) if name}
    shapes = {"w": (CHANNELS, 2, 1, 1), **biases, "v": (CHANNELS, CHANNELS, 1, 1)}
    real = np.float32 if kind == "float" else np.float16
    values = {name: random.standard_normal(shape).astype(real) for name, shape in shapes.items()}
    model = parsed(
        f"""g ({kind}[1,2,4,4] x{more}) => ({kind}[1,3,4,4] y) {{
            [first] h = Conv(x, w{b and f", {b}"})  [second] y = Conv(h, v{c and f", {c}"}) }}""",
        13 if kind == "float" else 19, ir=10,
        **{name: value for name, value in values.items() if bias != "constant" or name not in biases},
    )  # fmt: skip
    for name in biases if bias == "constant" else ():
        value = numpy_helper.from_array(values[name], name)
        model.proto.graph.node.insert(
            0, helper.make_node("Constant", [], [name], f"{name}_made", value=value)
        )
    return Model(model.proto)


def numbers_of(model: Model, *shifts: list[float]) -> Quantizer:
    biases = {weight_key(site): np.array(s, np.float32) for site, s in zip(SITES, shifts, strict=False)}
    return Quantizer(model, {}, corrections=Corrections(biases=biases))


@pytest.mark.parametrize("bias", ["initializer", "constant", "none"])
def test_the_rehearsal_computes_the_outputs_of_the_built_model(bias: str, tmp_path: Path) -> None:
    """Each format of a weight has its own correction."""
    model = model_of(bias)
    numbers = numbers_of(model, *SHIFTS)
    feed = {"x": np.random.default_rng(1).standard_normal((1, 2, 4, 4)).astype(np.float32)}
    with rehearsal_of(model, SITES, numbers, feed) as rehearsal:
        for chosen in (SITES[:2], SITES[:1], SITES[1:2], SITES[2:]):
            placement = Placement(sites=frozenset(chosen))
            expected = built_outputs(model, placement, numbers, feed, tmp_path)["y"]
            np.testing.assert_allclose(rehearsal.engine(placement).run(feed)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("bias", ["shared", "graph input"])
def test_a_bias_that_is_shared_or_a_graph_input_is_not_corrected(bias: str) -> None:
    model = model_of(bias)
    assert biased_layer(model, SITES[0]) is None
    made = Model(insert_qdq(model, PLACEMENT, numbers_of(model, *SHIFTS)).proto)
    np.testing.assert_array_equal(made.array("b"), model.array("b"))


@given(
    bias=st.sampled_from(["initializer", "constant", "none"]),
    shifts=st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=CHANNELS, max_size=CHANNELS), min_size=2, max_size=2
    ),
    chosen=st.sampled_from([SITES[:2], SITES[:1], SITES[1:2]]),
    kind=st.sampled_from(["float", "float16"]),
    seed=st.integers(0, 99),
)
def test_schemes_reproduce_corrected_biases_and_strip_restores_the_original(
    tmp_path_factory: pytest.TempPathFactory,
    bias: str,
    shifts: list[list[float]],
    chosen: tuple[Site, ...],
    kind: str,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("biases")
    shifts = [[min(max(x, -1e3), 1e3) for x in shift] for shift in shifts]  # within the range of float16
    model = model_of(bias, seed, kind)
    numbers = numbers_of(model, *shifts)
    placement = Placement(sites=frozenset(chosen))
    made = insert_qdq(model, placement, numbers)
    onnx.checker.check_model(made.proto)
    SchemeFile(backend="onnxruntime", pairs=numbers.placed(placement)).write(folder / "scheme.json")
    again = SchemeFile.read(folder / "scheme.json").apply(model)
    assert again.proto.SerializeToString() == made.proto.SerializeToString()
    save_model(made.proto, folder / "q.onnx")
    quantized = load_model(folder / "q.onnx")
    assert strip_qdq(quantized, model).proto == model.proto
    stripped = Model(strip_qdq(quantized).proto)
    assert [node.proto for node in stripped.nodes] == [node.proto for node in model.nodes]
    for name in {"b", "c"} & model.constants.keys():
        assert stripped.constants[name] == model.constants[name]
    imported = import_placement(quantized, model)
    found = {pair.site: pair.bias for pair in imported.pairs}
    assert found == {pair.site: pair.bias for pair in numbers.placed(placement)}


def test_diff_reports_a_corrected_bias() -> None:
    model = model_of("initializer")
    one, other = (
        Model(insert_qdq(model, PLACEMENT, numbers_of(model, *shifts)).proto) for shifts in ((), SHIFTS)
    )
    found = diff_models(one, other)
    changes = {pair.tensor: [change.text for change in pair.changes] for pair in found.changed}
    text = "bias of its layer as in the float model > corrected"
    assert changes == {"w": [text], "v": [text]}
    assert not found.skeleton.differs
    assert diff_models(other, other).same


def test_a_bias_correction_of_another_channel_count_is_omitted_with_a_note(tmp_path: Path) -> None:
    model = model_of("initializer")
    pairs = numbers_of(model, [1.0, 2.0], SHIFTS[1]).placed(PLACEMENT)
    SchemeFile(backend="onnxruntime", pairs=pairs).write(tmp_path / "scheme.json")
    notes = SchemeFile.read(tmp_path / "scheme.json").apply(model).notes
    assert any("'w'" in note and "does not hold 3 values" in note for note in notes)
