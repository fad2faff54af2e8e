"""The pause of the garbage collector: on again afterwards, new objects count as old, frozen ones stay frozen."""

from __future__ import annotations

import gc

import pytest

from qdqspec.collector import OF_PYTHON, uncollected


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_of_the_pause_count_as_old():
    gc.collect()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(2000)]
    assert gc.isenabled()
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert not young & set(map(id, made))


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_a_program_has_frozen_stays_frozen():
    kept = [[number] for number in range(OF_PYTHON)]
    gc.freeze()
    with uncollected():
        pass
    assert gc.get_freeze_count() > OF_PYTHON
    assert id(kept) not in {id(one) for one in gc.get_objects()}
