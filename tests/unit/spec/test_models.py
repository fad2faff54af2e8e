"""Specs built in Python, their matrix, and the JSON Schema for editors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from hypothesis import given, strategies as st

from qdqspec import Spec, load_spec
from qdqspec.errors import SpecError
from qdqspec.qdq.formats import BIAS_FORMAT, FORMATS, RUN_TIME
from qdqspec.spec.fields import Activations, Format, is_id
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.models import MatrixSection, combinations, spec_schema
from qdqspec.spec.sections import PatternsSection, QuantizeSection, RegionsSection, TuneSection
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


def test_checks_of_other_specs_are_numbered_anew(tmp_path: Path) -> None:
    own = {**SPEEDUP, "id": "own"}
    first, second = (Spec(model="m.onnx", checks=checks) for checks in ([SPEEDUP, SPEEDUP, own], [SPEEDUP]))
    checks = (*second.checks, *first.checks)
    (tmp_path / "a.qdq.yaml").write_text(f"qdqspec: 1\nmodel: m.onnx\n{CHECKS}")
    for spec in (
        Spec(model="m.onnx", checks=checks),
        load_spec(tmp_path / "a.qdq.yaml").model_copy(update={"checks": checks}),
    ):
        found = spec.cases()[0].checks
        assert [check.id for check in found] == ["speedup", "speedup-2", "speedup-3", "own"]


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
    with pytest.raises(SpecError, match="backend: unknown backend 'fakes'") as caught:
        Spec(model="m.onnx", backend="fakes", checks=[{"kind": "no"}] * 30)
    assert str(caught.value).splitlines()[-1] == "and 11 more"


def test_the_defaults_of_sections_are_those_of_the_records() -> None:
    assert InputsSection().rules() == Inputs()
    assert PatternsSection().rules() == PatternRules()
    assert RegionsSection().rules() == RegionRules()
    assert QuantizeSection().rules() == QuantizeRules()
    assert QuantizeSection(outputs=True).rules() == QuantizeRules(outputs=True)
    assert TuneSection().rules() == TuneRules()
    assert Spec(model="m.onnx", checks=[SPEEDUP]).cases()[0].skipping == SkipRules()


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
def test_the_backend_of_a_case_is_that_of_the_spec_or_of_the_matrix(keys, backends) -> None:
    cases = Spec(model="m.onnx", checks=[SPEEDUP], **keys).cases()  # type: ignore[arg-type]
    assert {case.id: case.backend for case in cases} == backends


def test_the_example_of_github_actions() -> None:
    # https://docs.github.com/actions "Example: Expanding configurations" with other axes: fruit is quant,
    # animal is weights, color is calibration, shape is preset.
    choices = combinations(
        {"quant": ["apple", "pear"], "weights": ["cat", "dog"]},
        include=[
            {"calibration": "green"},
            {"calibration": "pink", "weights": "cat"},
            {"quant": "apple", "preset": "circle"},
            {"quant": "banana"},
            {"quant": "banana", "weights": "cat"},
        ],
    )
    assert [tuple(choice.values()) for choice in choices] == [
        ("apple", "pink", "cat", "circle"),
        ("apple", "green", "dog", "circle"),
        ("pear", "pink", "cat"),
        ("pear", "green", "dog"),
        ("banana",),
        ("banana", "cat"),
    ]


@pytest.mark.parametrize(("batches", "why"), [(258, "more than 256"), (5000, "more than 4,096 combinations")])
def test_an_invalid_matrix_is_an_error(batches: int, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        Spec(model="m.onnx", checks=[SPEEDUP], matrix={"batch": list(range(1, batches))})


QUANT = st.sampled_from(["int8", "uint8", "int16"])
BATCH = st.integers(1, 6)
CHOICE = st.fixed_dictionaries({}, optional={"quant": QUANT, "batch": BATCH}).filter(bool)


@given(
    st.fixed_dictionaries({"quant": st.lists(QUANT, min_size=1, unique=True)}).flatmap(
        lambda axes: st.lists(BATCH, min_size=1, unique=True).map(lambda batch: {**axes, "batch": batch})
    ),
    st.lists(CHOICE, max_size=3),
    st.lists(CHOICE, max_size=3),
)
def test_original_combinations_are_kept_and_excluded_ones_are_not_added(axes, exclude, include) -> None:
    choices = combinations(axes, exclude, include)
    originals = [{"quant": q, "batch": b} for q in axes["quant"] for b in axes["batch"]]
    kept = [o for o in originals if not any(e.items() <= o.items() for e in exclude)]
    assert list(choices[: len(kept)]) == kept
    assert all(choice in include for choice in choices[len(kept) :])
    if choices and len({tuple(choice.items()) for choice in choices}) == len(choices):
        matrix = {**axes, "exclude": exclude, "include": include}
        assert all(map(is_id, MatrixSection.model_validate(matrix).cases()))


ROOT = Path(__file__).parents[3]
SHIPPED = resources.files("qdqspec") / "spec" / "qdqspec.schema.json"
HEAD = "qdqspec: 1\nmodel: m.onnx\n"
CHECKS = "checks: [{kind: speedup, min: 1.2}]\n"
GOOD = {
    "smallest": HEAD + CHECKS,
    "shapes": HEAD + CHECKS + "inputs: {shapes: {x: [1, 2], y: {min: [1], opt: [2], max: [3], weight: 1}}}\n",
    "matrix": HEAD + CHECKS + "matrix: {quant: [int8], batch: [1, 2], exclude: [{batch: 2}]}\n",
    "formats": HEAD
    + CHECKS
    + "quantize: {format: [int8, int4]}\nmatrix: {quant: [fp8, [int8, fp8], int8+int4]}\n",
    "skips": HEAD + CHECKS + "skip: why\nskip_unless: {backend: tensorrt}\nxfail: why\n",
    "checks": HEAD + "checks: [{kind: latency, max_ms: {tensorrt: 1.5}}, {kind: size, max_bytes: 4MiB}]\n",
}
BAD = {
    "version": HEAD.replace("1", "2") + CHECKS,
    "unknown key": HEAD + CHECKS + "tun: {}\n",
    "unknown kind": HEAD + "checks: [{kind: sped}]\n",
    "key of another kind": HEAD + "checks: [{kind: speedup, min: 1, max_ms: 3}]\n",
    "no kind": HEAD + "checks: [{min: 1}]\n",
    "a format twice": HEAD + CHECKS + "quantize: {format: [int8, int8]}\n",
    "strategy": HEAD + CHECKS + "tune: {strategy: luck}\n",
    "no value": HEAD + CHECKS + "skip:\n",
    "text for number": HEAD + CHECKS + "tune: {trials: '3'}\n",
}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(spec_schema())


def test_the_packaged_schema_is_the_generated_one() -> None:
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == spec_schema(), (
        "the spec's keys changed; renew with: qdqspec schema > qdqspec/spec/qdqspec.schema.json"
    )


@pytest.mark.parametrize("name", GOOD | BAD)
def test_schema_and_loader_accept_and_reject_the_same(name, schema, tmp_path) -> None:
    path, text = tmp_path / "a.qdq.yaml", (GOOD | BAD)[name]
    path.write_text(text)
    with nullcontext() if name in GOOD else pytest.raises(SpecError):
        load_spec(path, root=tmp_path)
    assert schema.is_valid(yaml.safe_load(text)) is (name in GOOD)


def test_the_example_specs_are_valid_in_schema_and_loader(schema: jsonschema.Draft202012Validator) -> None:
    for path in sorted((ROOT / "specs").glob("*.qdq.yaml")):
        schema.validate(yaml.safe_load(path.read_text()))
        assert load_spec(path, root=ROOT).cases()
