"""Every reader of files returns a result for any bytes or raises one error, never another exception.

The long version is ``benchmarks/fuzz.py``, which also checks limits on memory and time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import readers
from hypothesis import given, settings, strategies as st

from qdqspec.errors import QdqspecError, SpecError
from qdqspec.spec.models import Spec

SEEDS = {name: reader.seeds() for name, reader in readers.READERS.items()}


@pytest.mark.parametrize("name", SEEDS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    for seed in SEEDS[name]:
        assert readers.READERS[name].read(seed, tmp_path) is not None


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=35)
@given(chance=st.randoms(use_true_random=False), noise=st.none() | st.binary(max_size=200))
def test_damaged_files_and_random_bytes_are_read_or_raise_one_error(name, tmp_path_factory, chance, noise):
    folder = tmp_path_factory.getbasetemp() / f"damaged-{name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    data = readers.mutated(chance.choice(SEEDS[name]), chance) if noise is None else noise
    try:
        readers.READERS[name].read(data, folder)
    except QdqspecError as error:
        assert error.what  # noqa: PT017 - the test checks the type of the error


WORDS = (
    "int8",
    "kind: latency",
    "*a",
    "../../x",
    "10m",
    "1.5 h",
    "5%",
    ".nan",
    "1e400",
    "\ud7ff",
    "{}",
    "[" * 60,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(Spec.model_fields)),
    VALUES,
    st.sampled_from(["kind", "min", "max_ms", "id", "severity"]),
    VALUES,
)
def test_any_value_in_python_is_a_spec_or_raises_a_spec_error(key, value, check_key, check_value) -> None:
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
