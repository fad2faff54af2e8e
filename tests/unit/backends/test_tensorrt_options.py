"""Options of the backend, whose names begin with ``tensorrt.``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qdqspec.backends.tensorrt.options import options_from
from qdqspec.errors import ConfigError


def test_options_are_parsed(tmp_path: Path):
    first, second = tmp_path / "a.so", tmp_path / "b.so"
    first.touch()
    second.touch()
    words = options_from(
        {
            "tensorrt.opt-level": "5",
            "tensorrt.workspace": " 4096 ",
            "tensorrt.tf32": "off",
            "tensorrt.hardware": "ampere-plus",
            "tensorrt.tiling": "full",
            "tensorrt.plugins": f"{first}{os.pathsep}{second}",
            "tensorrt.cuda-graph": "no",
            "tensorrt.build-route": "knob_a=1",
        }
    )
    assert (words.opt_level, words.workspace, words.tf32, words.hardware) == (5, 4096, False, "ampere-plus")
    assert words.plugins == (first, second)
    assert (words.tiling, words.cuda_graph, words.build_route) == ("full", False, "knob_a=1")


@pytest.mark.parametrize(
    ("word", "text", "said"),
    [
        ("opt-level", "0", "does not use the timing cache"),
        ("opt-level", "6", "from 1 to 5"),
        ("workspace", "4GiB", "whole number of at least 1"),
        ("tf32", "perhaps", "on or off"),
        ("hardware", "ampere", "did you mean 'ampere-plus'"),
        ("plugins", "nowhere.so", "there is no file"),
        ("build-route", "", "a word is expected"),  # the same as no value: it would pin nothing
        ("opt-levle", "3", "did you mean 'tensorrt.opt-level'"),
        ("fp16", "on", "strongly typed"),
        ("int8", "true", "in the types the model has"),
    ],
)
def test_a_wrong_value_of_an_option_is_reported(word: str, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        options_from({f"tensorrt.{word}": text})
