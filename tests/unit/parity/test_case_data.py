from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from qdqspec.accuracy.case_data import CaseData
from qdqspec.errors import ModelError
from qdqspec.graph.model import Model
from qdqspec.types import Inputs, InputShape, ShapeProfile


def model_with(elem_type: int = TensorProto.FLOAT, **inputs: list[int | str | None] | None) -> Model:
    values = [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in inputs.items()]
    output = helper.make_tensor_value_info("y", elem_type, None)
    node = helper.make_node("Identity", [next(iter(inputs))], ["y"])
    return Model(helper.make_model(helper.make_graph([node], "g", values, [output])))


def declared(batch: int | None = None, **shapes: tuple[int, ...]) -> Inputs:
    profile = ShapeProfile(shapes={name: InputShape.of(shape) for name, shape in shapes.items()})
    return Inputs(profiles=(profile,), batch=batch)


@pytest.mark.parametrize(
    ("dims", "asked", "shape"),
    [
        (["n", 1, 16, 16], Inputs(), (1, 1, 16, 16)),  # a dynamic leading dimension is 1
        (["n", 1, 16, 16], Inputs(batch=8), (8, 1, 16, 16)),
        (["n", 1, 16, 16], declared(x=(4, 1, 16, 16)), (4, 1, 16, 16)),
        (["n", 1, 16, 16], declared(batch=2, x=(4, 1, 16, 16)), (2, 1, 16, 16)),
        (None, declared(x=(2, 3)), (2, 3)),
        ([1, 4], Inputs(batch=1), (1, 4)),
    ],
)
def test_shapes_are_those_of_the_model_the_case_and_the_batch(
    dims: list[int | str | None] | None, asked: Inputs, shape: tuple[int, ...]
) -> None:
    assert CaseData(model_with(x=dims), asked).shapes == {"x": shape}


def test_samples_of_several_lengths_give_a_range_of_shapes(tmp_path: Path) -> None:
    """The shape that is timed is that of the file of median size, so not that of an empty cache."""
    model = model_with(past=["b", 2, "past", 4], mask=["b", "total"])
    for number, length in enumerate((0, 7, 3)):
        past = np.zeros((1, 1, 2, length, 4), np.float32)
        np.savez(tmp_path / f"{number}.npz", past=past, mask=np.ones((1, 1, length + 1), np.float32))
    (profile,) = CaseData(model, Inputs(calibration=tmp_path)).shaped().inputs.profiles
    assert profile.shapes == {
        "past": InputShape(min=(1, 2, 0, 4), opt=(1, 2, 3, 4), max=(1, 2, 7, 4)),
        "mask": InputShape(min=(1, 1), opt=(1, 4), max=(1, 8)),
    }


def test_the_range_of_shapes_has_those_of_evaluation_data_too(tmp_path: Path) -> None:
    for name, length in (("calibration", 8), ("evaluation", 16)):
        np.savez(tmp_path / f"{name}.npz", audio=np.zeros((3, length), np.float32))
    source = {name: tmp_path / f"{name}.npz" for name in ("calibration", "evaluation")}
    (profile,) = CaseData(model_with(audio=["n", "t"]), Inputs(**source)).shaped().inputs.profiles
    assert profile.shapes == {"audio": InputShape(min=(1, 8), opt=(1, 8), max=(1, 16))}


@pytest.mark.parametrize(
    ("dims", "asked", "problem"),
    [
        (None, Inputs(), "input 'x' has no known rank"),
        ([1, 4], Inputs(batch=8), "fixes the first dimension of 'x' at 1"),
        (["n", 4], declared(x=(1, 5)), r"declared with shape \[1, 5\], but the model has \[\?, 4\]"),
        (["n", 4], declared(x=(1, 4, 1)), r"declared with shape \[1, 4, 1\], but the model has \[\?, 4\]"),
    ],
)
def test_shapes_that_are_unknown_or_contradict_the_model_are_an_error(
    dims: list[int | str | None] | None, asked: Inputs, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        _ = CaseData(model_with(x=dims), asked).shapes


def test_a_batch_size_applies_to_every_profile() -> None:
    model = model_with(x=["n", 16])
    (alone,) = CaseData(model, Inputs(batch=4)).profiles
    assert alone.shapes == {"x": InputShape.of((4, 16))}
    spans = InputShape(min=(1, 16), opt=(8, 16), max=(9, 16))
    declared = tuple(ShapeProfile(shapes={"x": spans}, weight=weight) for weight in (0.3, 0.7))
    both = CaseData(model, Inputs(profiles=declared, batch=4)).profiles
    assert [profile.weight for profile in both] == [0.3, 0.7]
    assert [profile.shapes for profile in both] == [alone.shapes, alone.shapes]


@pytest.mark.parametrize(("height", "found"), [(8, {"x": InputShape.of((1, 3, 8, 8))}), ("h", {})])
def test_a_batch_that_is_not_asked_for_is_1_in_every_profile(height: int | str, found: Any) -> None:
    model = model_with(x=["n", 3, height, 8], k=[4])
    assert [profile.shapes for profile in CaseData(model, Inputs()).profiles] == [found]


def test_dynamic_dimensions_that_are_not_declared_are_taken_from_the_data(tmp_path: Path) -> None:
    model, given = model_with(x=["n", 3, "h", "w"]), Inputs(calibration=tmp_path / "d.npz")
    # samples without the first axis, and whole inputs
    for data, known in (((5, 3, 8, 8), (1, 3, 8, 8)), ((5, 2, 3, 8, 8), (2, 3, 8, 8))):
        np.savez(tmp_path / "d.npz", x=np.zeros(data, np.float32))
        inputs = CaseData(model, given).shaped().inputs
        assert CaseData(model, inputs).shapes == {"x": known}
        (profile,) = CaseData(model, inputs).profiles
        assert profile.shapes["x"] == InputShape.of(known)
    asked = replace(declared(x=(1, 3, 4, 4)), calibration=tmp_path / "d.npz")
    assert CaseData(model, asked).shaped().inputs == asked
    # whole inputs determine the leading dimension, and samples do not
    batch = model_with(x=["n", 3, 8, 8])
    assert CaseData(batch, given).shaped().shapes == {"x": (2, 3, 8, 8)}
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 3, 8, 8), np.float32))
    assert CaseData(batch, given).shaped().inputs == given


def test_a_declared_shape_sets_the_named_dimensions_of_other_inputs() -> None:
    pair = ["batch", "length"]
    model = model_with(ids=pair, mask=pair, lengths=["batch"], other=["batch", 4])
    inputs = declared(ids=(2, 64))
    shapes = {"ids": (2, 64), "mask": (2, 64), "lengths": (2,), "other": (2, 4)}
    assert CaseData(model, inputs).shapes == shapes
    span = InputShape(min=(1, 1), opt=(1, 64), max=(4, 128))
    (profile,) = CaseData(model, Inputs(profiles=(ShapeProfile(shapes={"ids": span}),))).profiles
    assert profile.shapes["mask"] == span
    assert profile.shapes["lengths"] == InputShape(min=(1,), opt=(1,), max=(4,))
    batched = replace(declared(ids=(2, 64)), batch=8)
    shapes = CaseData(model, batched).shapes
    assert {shape[0] for shape in shapes.values()} == {8}


def test_one_error_names_all_inputs_without_a_shape() -> None:
    model = model_with(ids=["batch", "length"], audio=["samples"], x=[1, 3])
    with pytest.raises(ModelError, match=r"dimension 1 of input 'ids' is dynamic.*also 'audio'") as caught:
        _ = CaseData(model, Inputs()).shapes
    assert "inputs: {shapes: {ids: [1, ?], audio: [?]}}" in caught.value.cure
    assert "--shapes ids:1x?,audio:?" in caught.value.cure
    assert "or give calibration data of those shapes" in caught.value.cure
