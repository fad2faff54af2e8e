"""The exhaustive search proposes all placements of a small space and refuses a large one."""

from __future__ import annotations

import itertools
import math

import pytest

from qdqspec.errors import ConfigError
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.strategies.exhaustive import Exhaustive
from qdqspec.types import Placement


def flat(placement: Placement) -> float:
    return 1.0 - 0.001 * len(placement.sites)


@pytest.mark.parametrize("batch", [1, 7])
def test_every_labelling_is_proposed_once(space_of, drive, batch: int) -> None:
    space = space_of("digits_resnet", "Gemm", "GlobalAveragePool", "Flatten", "Add")
    classes = tie(space)
    labellings = itertools.product(*(tied.codes for tied in classes))
    expected = {space.resolve(labels_of(space, classes, choice)).digest for choice in labellings}
    trials = drive(Exhaustive, space, flat, trials=2000, batch=batch)
    assert sorted(trial.placement.digest for trial in trials) == sorted(expected)
    assert len(expected) > 8


def test_the_exhaustive_search_begins_with_pure_labellings(space_of, drive) -> None:
    space = space_of("digits_resnet", "Gemm", "Add")
    trials = drive(Exhaustive, space, flat, trials=2000)
    pure = [space.resolve(labels) for labels in ({}, space.everything())]
    assert [trial.placement for trial in trials[:2]] == pure
    assert [trial.phase for trial in trials[:2]] == ["pure", "pure"]
    assert trials[-1].phase == "exhaustive"


def test_the_default_budget_is_the_whole_space(space_of, drive) -> None:
    space = space_of("digits_resnet", "Gemm", "Add")
    budget = Exhaustive.default_trials("quick", space)
    assert budget == math.prod(len(tied.codes) for tied in tie(space))
    assert len(drive(Exhaustive, space, flat, trials=budget + 1)) <= budget


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10", "ultraface_rfb320"])
def test_a_large_space_is_an_error_with_its_size(space_of, drive, name: str) -> None:
    space = space_of(name)
    with pytest.raises(ConfigError, match=r"can be labelled in (2,097,152|10\^\d+|[\d,]+) ways") as caught:
        Exhaustive.default_trials("default", space)
    assert "attribution" in (caught.value.cure or "")
    assert f"{name}.onnx" in str(caught.value)
    with pytest.raises(ConfigError, match="ways"):
        Exhaustive.refuse(space)


def test_the_exhaustive_search_proposes_seeds_after_the_reference(space_of, drive) -> None:
    space = space_of("digits_resnet", "Gemm", "Add")
    seed = space.resolve({space.units[0].id: space.units[0].full})
    trials = drive(Exhaustive, space, flat, trials=2000, seeds=(seed,))
    assert (trials[1].placement, trials[1].phase) == (seed, "seed")
