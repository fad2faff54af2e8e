"""Specs built in Python: the same keys, the same validation, the same class of error."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from qdqspec import Spec, load_spec
from qdqspec.errors import SpecError
from qdqspec.qdq.quantize.formats import BIAS_FORMAT, FORMATS, RUN_TIME
from qdqspec.spec.fields import Activations, Format
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.sections import (
    PatternsSection,
    QuantizeSection,
    RegionsSection,
    TuneSection,
    skip_rules,
)
from qdqspec.types import Inputs, PatternRules, QuantizeRules, RegionRules, SkipRules, TuneRules

SPEEDUP = {"kind": "speedup", "min": 1.2}


def test_a_spec_in_python_equals_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.qdq.yaml"
    path.write_text(
        "qdqspec: 1\nmodel: m.onnx\nmatrix: {quant: [int8, uint8]}\ntune: {minutes: 1h}\n"
        "checks: [{kind: speedup, min: 1.2}]\n"
    )
    from_file = load_spec(path)
    in_python = Spec.relative_to(
        tmp_path, model="m.onnx", matrix={"quant": ["int8", "uint8"]}, tune={"minutes": 60}, checks=[SPEEDUP]
    )
    assert dict(in_python) == dict(from_file)
    left, right = in_python.cases(), from_file.cases()
    assert [c.id for c in left] == [c.id for c in right] == ["int8", "uint8"]
    assert [(c.model, c.tune, c.quantize) for c in left] == [(c.model, c.tune, c.quantize) for c in right]
    assert (left[0].spec, left[0].name) == (None, "m::int8")


def test_paths_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Spec(model=Path("../m.onnx"), checks=[SPEEDUP]).cases()[0].model == tmp_path.parent / "m.onnx"


def test_one_error_reports_all_problems_without_messages_of_pydantic() -> None:
    with pytest.raises(SpecError) as caught:
        Spec(modle="m.onnx", checks=[SPEEDUP, {"kind": "speedup", "mni": 1}], tune={"trials": 0.5})  # type: ignore[call-arg]  # invalid on purpose
    assert str(caught.value).splitlines() == [
        "Spec(...): model: 'model' is missing in the spec (first of 5 problems)",
        "tune.trials: 'trials' should be an integer, not 0.5",
        "checks[1].min: 'min' is missing in check 'speedup'",
        "checks[1].mni: unknown key 'mni' in check 'speedup' (did you mean 'min'?)",
        "   valid keys: id, kind, min, severity",
        "modle: unknown key 'modle' in the spec (did you mean 'model'?)",
        f"   valid keys: {', '.join(sorted(Spec.model_fields))}",
    ]


def test_problems_beyond_twenty_are_counted() -> None:
    with pytest.raises(SpecError) as caught:
        Spec(model="m.onnx", checks=[{"kind": "no"}] * 30)
    assert str(caught.value).splitlines()[-1] == "and 10 more"


def test_the_defaults_of_sections_are_those_of_the_records() -> None:
    assert InputsSection().rules() == Inputs()
    assert PatternsSection().rules() == PatternRules()
    assert RegionsSection().rules() == RegionRules()
    assert QuantizeSection().rules() == QuantizeRules()
    assert QuantizeSection(outputs=True).rules() == QuantizeRules(outputs=True)
    assert TuneSection().rules() == TuneRules()
    assert skip_rules(None, None, None) == SkipRules()


def test_a_spec_accepts_exactly_the_implemented_formats() -> None:
    assert set(get_args(Format)) == set(FORMATS) - {BIAS_FORMAT, RUN_TIME}
    held = {name for name in get_args(Format) if not FORMATS[name].block}
    assert set(get_args(Activations)) == {"auto", *held}


def test_several_formats_are_one_case_and_each_matrix_value_is_one() -> None:
    spec = Spec(model="m.onnx", checks=[SPEEDUP], quantize={"format": ["int8", "int4"]})
    (case,) = spec.cases()
    assert (case.id, case.quantize.formats) == ("default", ("int8", "int4"))
    matrix = {"quant": ["int8", ["int8", "int4"], "fp8+int8"], "batch": [8]}
    cases = Spec(model="m.onnx", checks=[SPEEDUP], matrix=matrix).cases()
    assert {case.id: case.quantize.formats for case in cases} == {
        "int8-b8": ("int8",), "int8-int4-b8": ("int8", "int4"), "fp8-int8-b8": ("fp8", "int8"),
    }  # fmt: skip


def test_input_values_are_numbers_booleans_or_nested_lists_of_them() -> None:
    section = InputsSection.model_validate({"values": {"sr": 16000, "gain": [[1, 2.5], [0, 1]], "on": True}})
    assert section.rules().values == {"sr": 16000, "gain": ((1, 2.5), (0, 1)), "on": True}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        *(({"values": {"sr": value}}, "sr") for value in ("16000", [1, [2]], float("nan"), [[1], [1, 2]])),
        ({"shapes": {"sr": [1]}, "values": {"sr": 16000}}, "'sr' has a value"),
    ],
)
def test_an_invalid_input_value_is_an_error(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        InputsSection.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "backends"),
    [
        ({"matrix": {"backend": ["onnxruntime", "openvino"], "batch": [8]}},
         {"b8-onnxruntime": "onnxruntime", "b8-openvino": "openvino"}),
        ({"backend": "fake", "matrix": {"batch": [1, 8]}}, {"b1": "fake", "b8": "fake"}),
        ({"backend": "fake", "matrix": {"backend": ["openvino"]}}, {"openvino": "openvino"}),
        ({}, {"default": None}),
    ],
)  # fmt: skip
def test_the_backend_of_a_case_is_that_of_the_spec_or_of_the_matrix(
    keys: dict[str, object], backends: dict[str, str | None]
) -> None:
    cases = Spec(model="m.onnx", checks=[SPEEDUP], **keys).cases()  # type: ignore[arg-type]
    assert {case.id: case.backend for case in cases} == backends


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(SpecError, match="backend: unknown backend 'fakes'"):
        Spec(model="m.onnx", checks=[SPEEDUP], backend="fakes")
