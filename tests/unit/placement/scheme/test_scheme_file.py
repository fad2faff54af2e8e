"""The scheme file: its text, rejected content, and applying it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx_text import parsed
from random_models import ranges_for

from qdqspec.errors import PlacementError, StateError
from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer, packed
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.types import Consumer, PlacedPair, Placement, Site


@pytest.fixture
def model(models: Path) -> Model:
    return load_model(models / "digits_resnet.onnx")


@pytest.fixture
def placement(model: Model) -> Placement:
    conv = next(node for node in model.nodes if node.op_type == "Conv")
    relu = model.consumers[conv.outputs[0]][0].node
    output = model.by_name[relu].outputs[0]
    ends = [(Consumer(conv.name, 0),), (Consumer(conv.name, 1),), model.consumers[output]]
    return Placement(
        sites=frozenset(
            {
                Site(tensor=conv.inputs[0], consumers=ends[0], format="uint8"),
                Site(tensor=conv.inputs[1], consumers=ends[1], format="int8", axis=0, weight=True),
                Site(tensor=output, consumers=ends[2], format="uint8"),
            }
        )
    )


@pytest.fixture
def path(model: Model, placement: Placement, tmp_path: Path) -> Path:
    path = tmp_path / "scheme.json"
    pairs = Quantizer(model, ranges_for(model)).placed(placement)
    SchemeFile(backend="onnxruntime", pairs=pairs).write(path)
    return path


def test_the_text_of_a_scheme_file(path: Path, golden: Callable[[str, str], None]) -> None:
    golden("placement/scheme.json", path.read_text())


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return content


def first(content: dict[str, Any], **values: object) -> None:
    content["sites"][0].update(values)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda c: c.update(schema_version=2), "schema_version: Input should be 1"),
    "format": (lambda c: first(c, format="int9"), r"sites\.0: .*unknown number format 'int9'"),
    "zero scale": (lambda c: first(c, scale=0.0), "a scale must be a positive float32"),
    "infinite scale": (lambda c: first(c, scale=float("inf")), "Infinity is no number of JSON"),
    "lengths": (lambda c: first(c, scale=[1.0, 2.0]), "equally many"),
    "no axis": (lambda c: first(c, scale=[1.0, 2.0], zero_point=[0, 0]), "several scales need an axis"),
    "zero point": (lambda c: first(c, zero_point=300), "lies between"),
    "consumers": (lambda c: first(c, consumers=[]), "at least 1 item"),
    "a site gone": (lambda c: c["sites"].pop(), "the scheme is damaged: its sites have digest"),
    "another scale": (lambda c: first(c, scale=0.5), "the scheme is damaged: its numbers are not those"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_content_is_an_error_with_its_place_and_a_cure(path: Path, kind: str) -> None:
    change, message = DAMAGE[kind]
    edited(path, change)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=rf"scheme\.json: .*{message}") as caught:
        SchemeFile.read(path)
    assert "qdqspec tune" in (caught.value.cure or "")


def test_the_order_of_sites_is_ignored_and_an_edited_file_needs_no_digest(path: Path, model: Model) -> None:
    whole = SchemeFile.read(path).apply(model).proto
    edited(path, lambda c: c["sites"].reverse())
    assert SchemeFile.read(path).apply(model).proto == whole
    edited(path, lambda c: (c["sites"].pop(), c.pop("digest"))[0])
    assert len(SchemeFile.read(path).pairs) == 2


def test_a_tensor_of_another_name_is_found_by_the_nodes_that_read_it(path: Path, model: Model) -> None:
    whole = SchemeFile.read(path).apply(model).proto
    edited(path, lambda c: (first(c, tensor="renamed"), c.pop("digest"))[0])
    applied = SchemeFile.read(path).apply(model)
    assert applied.proto == whole
    assert applied.notes == (
        "found by the nodes that read them, 1: 'renamed': this model names them otherwise",
    )


@pytest.mark.parametrize("backend", ["onnxruntime", "imported"])
def test_one_note_reports_all_sites_that_do_not_fit(path: Path, model: Model, backend: str) -> None:
    def change(content: dict[str, Any]) -> None:
        for number, site in enumerate(content["sites"][:-1]):
            site.update(tensor=f"gone{number}", consumers=[{"node": f"lost{number}", "input": 0}])
        content["backend"] = backend
        del content["digest"]

    edited(path, change)
    applied = SchemeFile.read(path).apply(model)
    note, *cure = applied.notes
    assert ["--reference" in text for text in cure] == ([True] if backend == "imported" else [])
    assert sum(n.op_type == "DequantizeLinear" for n in applied.proto.graph.node) == 1
    assert note.startswith("left out ")
    assert "'gone0', 'gone1'" in note
    assert note.endswith("; 'gone0': the model has no node 'lost0', and none in its position")


def shorten(site: dict[str, Any]) -> None:
    site["scale"].pop()
    site["zero_point"].pop()


def round_three(site: dict[str, Any]) -> None:
    site["rounding"] = packed(np.ones(3, np.int8))


def damage_rounding(site: dict[str, Any]) -> None:
    site["rounding"] = "aGVsbG8="


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (shorten, "channels on axis 0, the scheme"),
        (round_three, "its rounding does not fit"),
        (damage_rounding, "its rounding does not fit"),
    ],
)
def test_numbers_that_are_damaged_or_of_another_channel_count_are_omitted_with_a_note(
    path: Path, model: Model, change: Callable[[dict[str, Any]], None], note: str
) -> None:
    content = json.loads(path.read_text())
    del content["digest"]
    change(next(site for site in content["sites"] if site["weight"]))
    path.write_text(json.dumps(content))
    (found,) = SchemeFile.read(path).apply(model).notes
    assert note in found


def test_a_scheme_without_a_matching_site_is_an_error(path: Path, models: Path) -> None:
    with pytest.raises(PlacementError, match=r"scheme\.json: none of the 3 sites fits"):
        SchemeFile.read(path).apply(load_model(models / "squeezenet10.onnx"))


@pytest.mark.parametrize("fold", [True, False])
def test_a_scheme_of_the_folded_or_unfolded_model_applies(models: Path, tmp_path: Path, fold: bool) -> None:
    """Nodes of this model have no names, so folding BatchNormalization changes their numbers."""
    given = load_model(models / "ultraface_rfb320.onnx")
    model = fold_batchnorm(given).model if fold else given
    sites = [
        Site(tensor=node.inputs[1], consumers=(Consumer(node.name, 1),), format="int8", axis=0, weight=True)
        for node in model.nodes
        if node.op_type == "Conv"
    ]
    placement, numbers = Placement(sites=frozenset(sites)), Quantizer(model, {})
    SchemeFile(backend="onnxruntime", pairs=numbers.placed(placement)).write(tmp_path / "s.json")
    applied = SchemeFile.read(tmp_path / "s.json").apply(given)
    assert applied.proto == insert_qdq(model, placement, numbers).proto
    assert [note.endswith("BatchNormalization folded, as tuning does") for note in applied.notes] == [
        True
    ] * fold


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
def test_a_change_of_any_byte_is_an_error_or_is_whitespace(path: Path, place: float, change: int) -> None:
    whole = path.read_bytes()
    at = int(place * len(whole))
    spoilt = path.with_name("spoilt.json")
    spoilt.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
    try:
        known = SchemeFile.read(spoilt)
    except StateError as error:
        assert error.cure  # noqa: PT017 - the test checks that there is a cure
    else:
        assert known == SchemeFile.read(path), "only whitespace between values may change"


def test_scales_rounded_to_the_type_of_the_tensors_are_noted(tmp_path: Path) -> None:
    text = "g ({0}[2] x) => ({0}[2] y) {{ [n] y = Neg(x) }}"
    single, half = (parsed(text.format(kind), 19, ir=9) for kind in ("float", "float16"))
    site = Site(tensor="x", consumers=(Consumer("n", 0),), format="int8")
    for scale, is_rounded in ((0.05, True), (0.0625, False)):
        pair = PlacedPair(site=site, scale=(scale,), zero_point=(0,))
        SchemeFile(backend="imported", pairs=(pair,)).write(tmp_path / "s.json")
        notes = [SchemeFile.read(tmp_path / "s.json").apply(model).notes for model in (single, half)]
        assert notes == [(), ("scales rounded to the type of the tensors, 1: 'x'",) * is_rounded]
