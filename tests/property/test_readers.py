"""Every reader of files returns a result for any bytes or raises one error, never another exception.

The long version is ``benchmarks/fuzz.py``, which also checks limits on memory and time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import readers
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqspec.errors import QdqspecError

SEEDS = {name: reader.seeds() for name, reader in readers.READERS.items()}


@pytest.mark.parametrize("name", SEEDS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    for seed in SEEDS[name]:
        assert readers.READERS[name].read(seed, tmp_path) is not None


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=35)
@given(chance=st.randoms(use_true_random=False), noise=st.none() | st.binary(max_size=200))
def test_damaged_files_and_random_bytes_are_read_or_raise_one_error(
    name: str, tmp_path_factory: pytest.TempPathFactory, chance: random.Random, noise: bytes | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"damaged-{name.replace(' ', '-')}"
    folder.mkdir(exist_ok=True)
    data = readers.mutated(chance.choice(SEEDS[name]), chance) if noise is None else noise
    try:
        readers.READERS[name].read(data, folder)
    except QdqspecError as error:
        assert error.what  # noqa: PT017 - the test checks the type of the error
