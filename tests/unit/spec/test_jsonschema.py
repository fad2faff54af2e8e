"""The JSON Schema for editors is equivalent to the loader, and the packaged file is the generated one."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from qdqspec import load_spec
from qdqspec._core import registry
from qdqspec.errors import SpecError
from qdqspec.spec.models import spec_schema

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


def loads(text: str, folder: Path) -> bool:
    path = folder / "a.qdq.yaml"
    path.write_text(text)
    try:
        load_spec(path, root=folder)
    except SpecError:
        return False
    return True


def test_the_packaged_schema_is_the_generated_one() -> None:
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == spec_schema(), (
        "the spec's keys changed; renew with: qdqspec schema > qdqspec/spec/qdqspec.schema.json"
    )


@pytest.mark.parametrize("name", GOOD | BAD)
def test_schema_and_loader_accept_and_reject_the_same(
    name: str, schema: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    text = (GOOD | BAD)[name]
    assert loads(text, tmp_path) is schema.is_valid(yaml.safe_load(text)) is (name in GOOD)


def test_the_example_specs_are_valid_in_schema_and_loader(schema: jsonschema.Draft202012Validator) -> None:
    for path in sorted((ROOT / "specs").glob("*.qdq.yaml")):
        schema.validate(yaml.safe_load(path.read_text()))
        assert load_spec(path, root=ROOT).cases()


def test_every_check_and_every_key_has_a_description(schema: jsonschema.Draft202012Validator) -> None:
    kinds = schema.schema["properties"]["checks"]["items"]["oneOf"]
    assert [kind["properties"]["kind"]["const"] for kind in kinds] == list(registry.names("check"))
    assert all("kind" in kind["required"] and kind["description"] for kind in kinds)
    sections = schema.schema["$defs"]
    assert all(section["description"] for section in sections.values())
    for name, part in schema.schema["properties"].items():
        assert part.get("description") or part["$ref"].rpartition("/")[2] in sections, name
