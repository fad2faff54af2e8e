"""Build options are equal after the transfer to a child process."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.worker import options_from_json, options_to_json
from qdqspec.types import InputShape, ShapeProfile

shapes = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
spans = st.builds(InputShape, min=shapes, opt=shapes, max=shapes)
profiles = st.builds(
    ShapeProfile, shapes=st.dictionaries(st.text(max_size=9), spans, max_size=3), weight=st.floats(0.01, 1)
)
options = st.builds(
    BuildOptions,
    threads=st.integers(1, 64),
    extra=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    serial=st.integers(0, 999),
    profiles=st.lists(profiles, max_size=3).map(tuple),
    state=st.none() | st.just(Path("/some/folder")),
    fresh=st.booleans(),
)


@given(options)
def test_options_are_equal_after_the_transfer(given_options: BuildOptions):
    assert options_from_json(json.loads(json.dumps(options_to_json(given_options)))) == given_options


def test_a_relative_folder_is_that_of_the_sending_process():
    back = options_from_json(options_to_json(BuildOptions(state=Path("results"))))
    assert back.state == Path.cwd() / "results"
