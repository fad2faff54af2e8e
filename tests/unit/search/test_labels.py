"""Tied classes: units at the same position of the same pattern, which have one label."""

from __future__ import annotations

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search.labels import gathered, pure_choices, spread, tied_classes


def test_classes_partition_the_units(space_of) -> None:
    space = space_of("squeezenet10")
    names = [name for tied in tied_classes(space) for name in tied.units]
    assert sorted(names) == sorted(unit.id for unit in space.units)


def test_units_of_one_class_have_one_operator_and_one_pattern(space_of) -> None:
    space = space_of("digits_resnet")
    patterns = {
        node: region.pattern for region in space.regions if not region.children for node in region.nodes
    }
    classes = tied_classes(space)
    assert any(len(tied.units) > 1 for tied in classes)
    for tied in classes:
        assert len({space.by_id[name].op_type for name in tied.units}) == 1
        assert {patterns[name] for name in tied.units} == {tied.pattern}


def test_without_regions_every_unit_is_a_separate_class(space_of) -> None:
    space = space_of()
    bare = SchemeSpace.__new__(SchemeSpace)
    bare.__dict__.update({**space.__dict__, "regions": ()})
    assert [tied.units for tied in tied_classes(bare)] == [(unit.id,) for unit in space.units]


def test_the_pure_choices_are_float_everything_inputs_only_and_dynamic_ranges(space_of) -> None:
    space = space_of()
    classes = tied_classes(space)
    placements = [space.resolve(spread(space, classes, choice)) for choice in pure_choices(space, classes)]
    assert [placement.digest for placement in placements] == [
        space.resolve(labels).digest
        for labels in ({}, space.everything(), space.uniform("in-only"), space.uniform("dynamic"))
    ]


def test_labels_of_classes_are_recovered_from_labels_of_units(space_of) -> None:
    space = space_of("squeezenet10")
    classes = tied_classes(space)
    for choice in pure_choices(space, classes):
        assert gathered(classes, spread(space, classes, choice)) == choice
