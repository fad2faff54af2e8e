"""Any text is loaded as a spec or raises one `SpecError`, without other exceptions and in limited time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec import load_spec
from qdqspec.errors import SpecError
from qdqspec.spec.models import Spec

VALID = """\
qdqspec: 1
model: models/a.onnx
title: A title
tags: [vision, smoke]
inputs:
  shapes: [{x: [8, 3, 224, 224]}, {x: {min: [1, 64], opt: [8, 128], max: [16, 512], weight: 0.7}}]
  calibration: data/calibration.npz
  evaluation: data/evaluation.npz
matrix: {quant: [int8, uint8], batch: [1, 8], exclude: [{quant: int8, batch: 8}], include: [{preset: quick}]}
patterns: {allow: [Conv, "Conv > Relu?"], deny: [Softmax], nodes: {exclude: ["/head/*"]}}
regions: {by: manual, max_nodes: 10, manual: [[a, b], [c]]}
quantize: {format: int8, calibration: entropy, weights: per-channel, activations: auto}
tune: {strategy: attribution, preset: default, trials: 60, minutes: 90s, min_sqnr_db: 2.5e1, accuracy: {max_drop: 1%}}
checks:
  - &first {kind: latency, max_ms: {onnxruntime-cpu: 9.0, tensorrt: 1.2}, percentile: 50}
  - {kind: speedup, min: 1.3, id: fast, severity: warn}
  - {kind: parity, min_sqnr_db: 25, min_cosine: 0.999}
  - {kind: accuracy, metric: top1, min: 0.97, max_drop: 1%}
  - {kind: size, max_bytes: 4MiB}
skip_unless: {backend: tensorrt, compute_capability: ">=8.9"}
xfail: {reason: not yet, strict: false}
"""

# Fragments with a meaning in YAML or in a spec, in addition to any characters.
FRAGMENTS = (
    *"{}[]:,-?&*!|>'\"%@`#~=<\n\t \r\x85\u2028\ufeff\x00\ud7ff", "---\n", "...\n", "!!python/object:os.system ",
    "&a ", "*a", "*first", "<<: *first", "? ", "%YAML 1.1\n", "null", "true", ".nan", "-.inf", "1e400", "0x", "0b",
    "9" * 50, "1_0", "''", '"\\ud800"', '"\\UFFFFFFFF"', "kind: latency", "checks:", "checks: []", "qdqspec: 1\n",
    "model: ../../x", "matrix: {}", "include: [{}]", "10m", "1.5 h", "5%", "NaN", "allow_file: .", "deny_file: a.txt",
    "id: latency", "[" * 60, "\n" + " " * 8,
)  # fmt: skip
TEXT = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=25).map("".join)


def loaded_or_none(data: bytes) -> Spec | None:
    """The spec of these bytes, or ``None`` if loading raises a `SpecError`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.qdq.yaml")
        path.write_bytes(data)
        try:
            spec = load_spec(path, root=Path(folder))
        except SpecError as error:
            refused = error
        else:
            assert spec.cases()
            return spec
    assert str(refused).startswith("any.qdq.yaml:")
    assert str(refused).encode("utf-8")
    return None


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = VALID
    for _ in range(draw(st.integers(0, 3))):
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        text = text[:start] + draw(TEXT) + text[start + length :]
    return text


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(Spec.model_fields)),
    VALUES,
    st.sampled_from(["kind", "min", "max_ms", "id", "severity"]),
    VALUES,
)
def test_any_value_in_python_is_a_spec_or_raises_a_spec_error(
    key: str, value: object, check_key: str, check_value: object
) -> None:
    keys = {
        "model": "m.onnx",
        "checks": [{"kind": "speedup", "min": 1.1, check_key: check_value}],
        key: value,
    }
    try:
        cases = Spec(**keys).cases()  # type: ignore[arg-type]  # values of any type on purpose
    except SpecError as error:
        cases = (error,)
    assert cases


ALIASES = "\n".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 3)}]" for n in range(1, 6))


@pytest.mark.parametrize(
    "text",
    [*("a: " + "[" * depth for depth in (51, 2_000, 400_000)), "k0: &k0 [" + "x, " * 400 + "]\n" + ALIASES],
    ids=["51 deep", "2,000 deep", "400,000 deep", "aliases"],
)
def test_deep_nesting_and_nested_aliases_are_an_error(text: str) -> None:
    assert loaded_or_none(VALID.encode()) is not None
    assert loaded_or_none(text.encode()) is None
