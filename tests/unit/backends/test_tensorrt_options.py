"""Options of the backend, whose names begin with ``tensorrt.``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qdqspec.backends.tensorrt import options as trt_options
from qdqspec.backends.tensorrt.options import TensorRtOptions, options_from
from qdqspec.errors import ConfigError


def test_without_options_defaults_of_tensorrt_are_kept():
    words = options_from({"fake.seed": "1"})
    assert words == TensorRtOptions()
    assert words.opt_level is words.workspace is words.build_route is None
    assert words.tf32


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


def test_every_option_has_a_help_text():
    for option in trt_options.OPTIONS.options:
        assert option.help.endswith(".")


def test_every_field_is_a_declared_option():
    declared = {option.key for option in trt_options.OPTIONS.options}
    assert declared == set(TensorRtOptions.__dataclass_fields__)
