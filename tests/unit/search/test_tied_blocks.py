"""Tied classes: units at the same position of the same pattern, which have one label."""

from __future__ import annotations

from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.blocks import block_codes, labels_of, tie, uniform_codes


def test_classes_partition_the_units(space_of) -> None:
    space = space_of("squeezenet10")
    names = [name for tied in tie(space) for name in tied.units]
    assert sorted(names) == sorted(unit.id for unit in space.units)


def test_units_of_one_class_have_one_operator_and_one_pattern(space_of) -> None:
    space = space_of("digits_resnet")
    patterns = {
        node: region.pattern for region in space.regions if not region.children for node in region.nodes
    }
    classes = tie(space)
    assert any(len(tied.units) > 1 for tied in classes)
    for tied in classes:
        assert len({space.by_id[name].op_type for name in tied.units}) == 1
        assert {patterns[name] for name in tied.units} == {tied.pattern}


def test_without_regions_every_unit_is_a_separate_class(space_of) -> None:
    space = space_of()
    bare = SchemeSpace.__new__(SchemeSpace)
    bare.__dict__.update({**space.__dict__, "regions": ()})
    assert [tied.units for tied in tie(bare)] == [(unit.id,) for unit in space.units]


def test_the_pure_choices_are_float_everything_inputs_only_and_dynamic_ranges(space_of) -> None:
    space = space_of()
    classes = tie(space)
    placements = [
        space.resolve(labels_of(space, classes, choice)) for choice in uniform_codes(space, classes)
    ]
    assert [placement.digest for placement in placements] == [
        space.resolve(labels).digest
        for labels in ({}, space.everything(), space.uniform("in-only"), space.uniform("dynamic"))
    ]


def test_labels_of_classes_are_recovered_from_labels_of_units(space_of) -> None:
    space = space_of("squeezenet10")
    classes = tie(space)
    for choice in uniform_codes(space, classes):
        assert tuple(block_codes(space, classes, labels_of(space, classes, choice))) == choice
