"""The exhaustive search proposes all placements of a small space and refuses a large one."""

from __future__ import annotations

import itertools
import math

import pytest

from qdqspec.errors import ConfigError
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.strategies.exhaustive import Exhaustive


@pytest.mark.parametrize("batch", [1, 7])
def test_every_labelling_is_proposed_once(space_of, drive, batch: int) -> None:
    space = space_of("digits_resnet", "Gemm", "GlobalAveragePool", "Flatten", "Add")
    classes = tie(space)
    labellings = itertools.product(*(tied.codes for tied in classes))
    expected = {space.resolve(labels_of(space, classes, choice)).digest for choice in labellings}
    assert Exhaustive.default_trials("quick", space) == math.prod(len(tied.codes) for tied in classes)
    trials = drive(Exhaustive, space, lambda each: 1.0 - 0.001 * len(each.sites), trials=2000, batch=batch)
    assert [trial.placement for trial in trials[:2]] == [space.resolve({}), space.resolve(space.everything())]
    assert sorted(trial.placement.digest for trial in trials) == sorted(expected)
    assert len(expected) > 8


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10"])
def test_a_large_space_is_an_error_with_its_size(space_of, drive, name: str) -> None:
    space = space_of(name)
    with pytest.raises(ConfigError, match=r"can be labelled in (2,097,152|10\^\d+|[\d,]+) ways") as caught:
        Exhaustive.default_trials("default", space)
    assert "attribution" in (caught.value.cure or "")
    assert f"{name}.onnx" in str(caught.value)
    with pytest.raises(ConfigError, match="ways"):
        Exhaustive.refuse(space)
