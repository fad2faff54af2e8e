"""Blocks of units that share kernels, their labels and classes, and the tensors between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import kernel, residual_space

from qdqspec.search.blocks import (
    Domains,
    Edge,
    block_codes,
    block_labels,
    classes_of,
    edges_between,
    fuse,
    labels_of,
    tie,
    uniform_codes,
)
from qdqspec.testing.strategies import small_space
from qdqspec.types import LABELS, LayerTime

FP, FULL, IN = (LABELS.index(label) for label in ("fp", "in+out", "in-only"))
SPACE = residual_space()
UNITS = [unit.id for unit in SPACE.units]


def test_conversions_and_nodes_outside_units_do_not_join_blocks() -> None:
    reorder = LayerTime(name="r", op_type="R", milliseconds=1, nodes=("conv1", "conv2"), boundary=True)
    assert len(fuse(SPACE, [[reorder, kernel("flatten", "gemm1"), kernel("nobody")]])) == len(UNITS)


@given(st.lists(st.lists(st.sampled_from(UNITS), min_size=1, max_size=3), max_size=6))
def test_blocks_are_the_connected_components_in_graph_order(kernels: list[list[str]]) -> None:
    blocks = fuse(SPACE, [[kernel(*nodes) for nodes in kernels]])
    assert sorted(unit for block in blocks for unit in block.units) == sorted(UNITS)
    home = {unit: block.index for block in blocks for unit in block.units}
    assert all(len({home[unit] for unit in nodes}) == 1 for nodes in kernels)
    assert len(blocks) >= len(UNITS) - sum(len({*nodes}) - 1 for nodes in kernels)
    firsts = [UNITS.index(block.units[0]) for block in blocks]
    assert firsts == sorted(firsts)


def test_in_only_applies_to_the_units_of_a_block_that_offer_it() -> None:
    (block,) = fuse(SPACE, [[kernel(*UNITS)]])
    assert block.codes == (FP, FULL, IN)
    assert block_labels(SPACE, block, FULL) == SPACE.everything()
    partly = block_labels(SPACE, block, IN)
    assert {name for name, label in partly.items() if label == "in-only"} == {"gemm1", "gemm2"}
    assert block_codes(SPACE, [block], partly).tolist() == [IN]


def test_similar_blocks_are_one_class() -> None:
    space = small_space()
    blocks = fuse(space, [])
    classes = classes_of(space, blocks)
    kinds = [space.by_id[block.units[0]].op_type for block in blocks]
    assert len(set(classes)) < len(blocks)
    convolutions = {number for number, kind in zip(classes, kinds, strict=True) if kind == "Conv"}
    assert len(convolutions) == 2  # with and without a Relu


# ---- tied classes: units at the same position of the same pattern, which have one label --------------


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


def test_labels_of_classes_are_recovered_from_labels_of_units(space_of) -> None:
    space = space_of("squeezenet10")
    classes = tie(space)
    assert sorted(name for tied in classes for name in tied.units) == sorted(space.by_id)
    for choice in uniform_codes(space, classes):
        assert tuple(block_codes(space, classes, labels_of(space, classes, choice))) == choice


# ---- tensors between blocks ------------------------------------------------------------------------

OTHER_FULL, OTHER_IN, WEIGHTS = 3, 4, 6
# two formats of activations, and one weight-only format
DOMAINS = Domains((0, 1, 1, 2, 2, 0, 0), (0, 1, 0, 2, 0, 0, 0))


def edge(producer: int, *consumers: int, outside: bool = False) -> Edge:
    return Edge("t", 1.0, producer, consumers, outside)


def test_graph_inputs_and_readers_outside_blocks_are_float() -> None:
    assert edge(-1, 0).conversions([FULL], DOMAINS) == [0]
    assert edge(-1, 0).conversions([FP], DOMAINS) == []
    assert edge(0, outside=True).conversions([FULL], DOMAINS) == [0]
    assert edge(0, outside=True).conversions([IN], DOMAINS) == []


@pytest.mark.parametrize(
    ("producer", "readers", "kinds"),
    [
        (FP, (FP,), []),
        (FP, (FULL, FULL), [(0, 1)]),  # once for all readers
        (FULL, (FP, FP), [(0, 1)]),
        (FULL, (FULL, IN), []),
        (IN, (FP,), []),  # the producer outputs floats
        (FULL, (OTHER_FULL,), [(1, 2)]),  # produced in one format, read in the other
        (FULL, (FULL, OTHER_FULL), [(1, 2)]),
        (FULL, (FP, OTHER_IN), [(0, 1), (1, 2)]),
        (IN, (FULL, OTHER_FULL), [(0, 1), (0, 2)]),  # produced in float, converted to each
        (OTHER_FULL, (WEIGHTS,), [(0, 2)]),  # weight-only blocks read and produce floats
        (WEIGHTS, (FP, WEIGHTS), []),
        (WEIGHTS, (IN,), [(0, 1)]),
    ],
)
def test_each_pair_of_formats_is_a_separate_conversion(
    producer: int, readers: tuple[int, ...], kinds: list[tuple[int, int]]
) -> None:
    found = edge(0, *range(1, 1 + len(readers))).conversions([producer, *readers], DOMAINS)
    assert sorted(DOMAINS.pairs[pair] for pair in found) == kinds


def test_edges_connect_blocks_and_list_other_readers() -> None:
    space = residual_space()
    found = {e.tensor: e for e in edges_between(space, {"conv1": 0, "relu": 0, "conv2": 1, "add": 1})}
    assert found["x"].producer == -1
    assert found["b"].blocks == (0, 1)
    assert "c" not in found  # inside block 1
    assert found["d"].outside  # read by pool, which is not in a block
    assert found["b"].elements == 8 * 8 * 8
