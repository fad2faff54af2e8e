"""The pause of the garbage collector: it is enabled afterwards, and new objects are in the oldest generation."""

from __future__ import annotations

import gc

import pytest

from qdqspec._core.collector import OF_PYTHON, uncollected


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_created_in_the_pause_are_in_the_oldest_generation():
    gc.collect()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(2000)]
    assert gc.isenabled()
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert not young & set(map(id, made))


def test_objects_frozen_before_stay_frozen():
    kept = [[number] for number in range(OF_PYTHON)]
    gc.freeze()
    with uncollected():
        pass
    assert gc.get_freeze_count() > OF_PYTHON
    assert id(kept) not in {id(one) for one in gc.get_objects()}
