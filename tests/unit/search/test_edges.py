"""Tensors between blocks, and the conversions that they take under a labelling."""

from __future__ import annotations

import pytest
from searches import residual_space

from qdqspec.search.edges import Domains, Edge, edges_between

FP, FULL, IN, OTHER_FULL, OTHER_IN, WEIGHTS = 0, 1, 2, 3, 4, 6
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
