"""Blocks and crossings: joined units, converted tensors, and the costs learned from profiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from searches import pure_placements

from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._descent import Descent
from qdqspec.search.attribution import Attribution
from qdqspec.search.base import SearchSetup
from qdqspec.search.blocks import LINEAR_TIME, CostModel, block_codes, fuse, unit_labels
from qdqspec.search.crossings import RUN_ELEMENTS, Crossing, Crossings, Domains, Times, edges_between
from qdqspec.testing.strategies import Oracle
from qdqspec.types import LABELS, LayerTime, Placement, Trial

FP, FULL, IN = (LABELS.index(label) for label in ("fp", "in+out", "in-only"))
OTHER_FULL, OTHER_IN, WEIGHTS = 3, 4, 6
DOMAINS = Domains((0, 1, 1), (0, 1, 0))
THREE = Domains(
    (0, 1, 1, 2, 2, 0, 0), (0, 1, 0, 2, 0, 0, 0)
)  # two formats of activations, and one weight-only format
CAPABILITIES = Capabilities(
    formats=("int8",),
    labels={
        **dict.fromkeys(("Conv", "Add", "GlobalAveragePool"), ("in+out",)),
        "Gemm": ("in+out", "in-only"),
    },
    activations={"int8": "uint8"},
    weights={"int8": "int8"},
    absorbs=frozenset({"Relu"}),
)


def residual_space() -> SchemeSpace:
    """Two convolutions with a residual, pooled, and two products: six units."""
    shapes = {"w1": (8, 4, 3, 3), "w2": (8, 8, 3, 3), "fc1": (8, 16), "fc2": (16, 4)}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"], "add"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "pool"),
        helper.make_node("Flatten", ["e"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc1"], ["g"], "gemm1"),
        helper.make_node("Gemm", ["g", "fc2"], ["y"], "gemm2"),
    ]
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 4))],
        [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return SchemeSpace(Model(proto), CAPABILITIES)


SPACE = residual_space()
UNITS = [unit.id for unit in SPACE.units]


def kernel(*nodes: str, ms: float = 1.0) -> LayerTime:
    return LayerTime(name="+".join(nodes), op_type="K", milliseconds=ms, nodes=nodes)


def conversion(*tensors: str, ms: float) -> LayerTime:
    return LayerTime(name="q", op_type="Q", milliseconds=ms, tensors=tensors, boundary=True)


def trial(placement: Placement, *layers: LayerTime) -> Trial:
    return Trial(number=0, phase="p", placement=placement, layers=layers)


# ---- fusion -------------------------------------------------------------------------------------


def test_units_in_one_kernel_of_any_profile_are_one_block() -> None:
    profiles = [[kernel("conv1", "relu"), kernel("conv2", "add")], [kernel("add", "pool")]]
    blocks = fuse(SPACE, profiles)
    assert [block.units for block in blocks] == [("conv1",), ("conv2", "add", "pool"), ("gemm1",), ("gemm2",)]


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
    assert unit_labels(SPACE, [block], np.array([FULL], dtype=np.int8)) == SPACE.everything()
    partly = unit_labels(SPACE, [block], np.array([IN], dtype=np.int8))
    assert {name for name, label in partly.items() if label == "in-only"} == {"gemm1", "gemm2"}
    assert block_codes(SPACE, [block], partly).tolist() == [IN]


# ---- crossings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "reader", "crosses"),
    [
        (FP, FP, False),
        (FP, FULL, True),
        (FP, IN, True),
        (FULL, FP, True),
        (FULL, FULL, False),
        (FULL, IN, False),
        (IN, FP, False),  # the producer outputs floats
        (IN, FULL, True),
        (IN, IN, True),
    ],
)
def test_a_tensor_is_converted_between_float_and_integer_blocks(
    producer: int, reader: int, crosses: bool
) -> None:
    edge = Crossing("t", 1.0, 0, (1,), outside=False)
    assert bool(edge.converted(np.array([producer, reader], dtype=np.int8), DOMAINS)) == crosses


def test_a_tensor_is_converted_once_for_all_its_readers() -> None:
    edges = (Crossing("t", 1.0, 0, (1, 2), outside=False),)
    assert Crossings(edges, DOMAINS).of(np.array([FP, FULL, FULL], dtype=np.int8)).sum() == 1


def test_an_integer_tensor_with_a_reader_outside_blocks_is_converted() -> None:
    edge = Crossing("t", 1.0, 0, (), outside=True)
    assert edge.converted(np.array([FULL], dtype=np.int8), DOMAINS)
    assert not edge.converted(np.array([IN], dtype=np.int8), DOMAINS)


def test_a_graph_input_is_float() -> None:
    edge = Crossing("x", 1.0, -1, (0,), outside=False)
    assert edge.converted(np.array([FULL], dtype=np.int8), DOMAINS)
    assert not edge.converted(np.array([FP], dtype=np.int8), DOMAINS)


EDGES = st.builds(
    Crossing,
    st.just("t"),
    st.just(1.0),
    st.integers(-1, 4),
    st.lists(st.integers(0, 4), max_size=3, unique=True).map(tuple),
    st.booleans(),
).filter(
    lambda edge: edge.blocks and edge.producer not in edge.consumers
)  # no tensor is produced and read by the same block


@given(st.lists(EDGES, max_size=6), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_conversions_of_all_edges_at_once_equal_those_of_single_edges(
    edges: list[Crossing], codes: list[int]
) -> None:
    labelling = np.array(codes, dtype=np.int8)
    alone = [sorted(edge.converted(labelling, THREE)) for edge in edges]
    assert [np.flatnonzero(row).tolist() for row in Crossings(edges, THREE).of(labelling)] == alone


@pytest.mark.parametrize(
    ("producer", "readers", "kinds"),
    [
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
    edge = Crossing("t", 1.0, 0, tuple(range(1, 1 + len(readers))), outside=False)
    converted = edge.converted(np.array([producer, *readers], dtype=np.int8), THREE)
    assert sorted(THREE.ordered[kind] for kind in converted) == kinds


def test_edges_connect_blocks_and_list_other_readers() -> None:
    block_of = {"conv1": 0, "relu": 0, "conv2": 1, "add": 1}
    edges = {edge.tensor: edge for edge in edges_between(SPACE, block_of)}
    assert edges["x"].producer == -1
    assert edges["b"].blocks == (0, 1)
    assert "c" not in edges  # inside block 1
    assert edges["d"].outside  # read by pool, which is not in a block
    assert edges["b"].elements == 8 * 8 * 8


@given(st.lists(EDGES, max_size=8), st.integers(0, 2**32 - 1))
def test_a_descent_ends_where_no_change_of_one_block_is_better(edges: list[Crossing], seed: int) -> None:
    random = np.random.default_rng(seed)
    offered = [tuple(random.permutation(7)[: random.integers(1, 8)].tolist()) for _ in range(5)]
    times, costs = random.uniform(0, 2, (5, 7)), random.uniform(0, 1, (len(edges), 3))

    def cost(codes: np.ndarray) -> float:
        return float(times[np.arange(5), codes].sum() + costs[Crossings(edges, THREE).of(codes)].sum())

    start = np.array([codes[0] for codes in offered], dtype=np.int8)
    settled = Descent(offered, edges, THREE).settle(start, times, costs)
    assert cost(settled) <= cost(start) + 1e-12
    for index, codes in enumerate(offered):
        assert settled[index] in codes
        for code in codes:
            other = settled.copy()
            other[index] = code
            assert cost(settled) <= cost(other) + 1e-9


@given(st.lists(EDGES, max_size=8), st.integers(0, 2**32 - 1), st.data())
def test_a_descent_changes_the_blocks_of_a_group_together(
    edges: list[Crossing], seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    group_of = np.array(data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)))
    groups = [np.flatnonzero(group_of == number).tolist() for number in range(3)]
    times, costs = random.uniform(0, 2, (5, 7)), random.uniform(-0.2, 1, (len(edges), 3))
    start = random.integers(0, 7, 5).astype(np.int8)

    def cost(codes: np.ndarray) -> float:
        return float(times[np.arange(5), codes].sum() + costs[Crossings(edges, THREE).of(codes)].sum())

    settled = Descent([tuple(range(7))] * 3, edges, THREE, groups).settle(start, times, costs)
    for blocks in groups:
        assert len({*settled[blocks]}) <= 1 or (settled[blocks] == start[blocks]).all()
        for code in range(7):
            other = settled.copy()
            other[blocks] = code
            assert cost(settled) <= cost(other) + 1e-9


def test_an_edge_with_many_readers_costs_one_conversion() -> None:
    readers = tuple(range(1, 12))
    edge = Crossing("x", 1.0, 0, readers, outside=False)
    descent = Descent([(FP, FULL)] * 12, [edge], DOMAINS)
    costs = [[1.0]]
    assert descent.crossing(3, [FULL] + [FP] * 11, costs) == 1.0
    assert descent.crossing(3, [FULL] * 12, costs) == 0.0


# ---- costs learned from profiles ----------------------------------------------------------------


def costs_of(*trials: Trial) -> CostModel:
    costs = CostModel(SPACE, fuse(SPACE, []))
    costs.learn(trials)
    return costs


def test_the_cost_of_a_block_is_the_measured_time_of_its_label() -> None:
    reference = trial(SPACE.resolve({}), kernel("conv1", ms=4.0), kernel("conv2", ms=2.0))
    full = trial(SPACE.resolve({"conv1": "in+out"}), kernel("conv1", ms=1.0), kernel("conv2", ms=2.2))
    times = costs_of(reference, full).times
    assert times[0] == pytest.approx([4.0, 1.0, 4.0 * LINEAR_TIME])  # in-only was not measured
    share = (1.0 + 2.1 * LINEAR_TIME) / (4.0 + 2.1)  # of the other convolution, and of what is assumed
    assert times[1] == pytest.approx([2.1, 2.1 * share, 2.1 * LINEAR_TIME])


def test_a_slowdown_of_one_block_does_not_raise_the_estimate_of_another() -> None:
    reference = trial(SPACE.resolve({}), kernel("conv1", ms=4.0), kernel("conv2", ms=2.0))
    full = trial(SPACE.resolve({"conv1": "in+out"}), kernel("conv1", ms=8.0), kernel("conv2", ms=2.0))
    assert costs_of(reference, full).times[1, FULL] == 2.0


def test_a_slow_small_block_hardly_changes_what_is_assumed_of_a_large_one() -> None:
    reference = trial(SPACE.resolve({}), kernel("conv1", ms=0.1), kernel("conv2", ms=10.0))
    full = trial(SPACE.resolve({"conv1": "in+out"}), kernel("conv1", ms=0.3), kernel("conv2", ms=10.0))
    assert costs_of(reference, full).times[1, FULL] == pytest.approx(10.0 * LINEAR_TIME, rel=0.05)


def test_the_time_of_a_kernel_of_two_blocks_is_divided_between_them() -> None:
    costs = costs_of(trial(SPACE.resolve({}), kernel("conv1", "conv2", ms=3.0)))
    assert costs.times[:2, FP].tolist() == [1.5, 1.5]


def test_the_time_of_the_reference_is_that_of_the_first_trial() -> None:
    costs = costs_of(
        trial(SPACE.resolve({}), kernel("conv1", ms=4.0), kernel("flatten", ms=1.0)),
        trial(SPACE.resolve(SPACE.everything()), kernel("conv1", ms=2.0)),
    )
    assert costs.reference_ms == 5.0


def test_without_profiles_each_block_takes_the_same_share_of_the_time() -> None:
    costs = costs_of(trial(SPACE.resolve({})))
    assert costs.times[:, FP] == pytest.approx(1 / len(costs.blocks))
    assert not costs.is_measured.any()


def test_conversions_cost_the_measured_time_else_an_estimate_by_size() -> None:
    costs = costs_of(
        trial(SPACE.resolve({}), kernel("conv1", ms=1.0)),
        trial(SPACE.resolve({"conv2": "in+out"}), conversion("b", ms=0.512)),
    )
    element = 0.512 / (8 * 64 + RUN_ELEMENTS)
    only_first = np.array([FULL, FP, FP, FP, FP, FP], dtype=np.int8)
    only_second = np.array([FP, FULL, FP, FP, FP, FP], dtype=np.int8)
    assert costs.crossings_ms(only_first).sum() == pytest.approx(
        0.512 + (RUN_ELEMENTS + 4 * 64) * element
    )  # b measured, x estimated by its size
    assert costs.crossings_ms(only_second).sum() == pytest.approx(
        0.512 + (RUN_ELEMENTS + 8 * 64) * element
    )  # b measured, c estimated by its size


@given(
    sizes=st.lists(st.integers(0, 10**7), min_size=2, max_size=9),
    run=st.floats(1e-4, 1e-1),
    elements=st.floats(RUN_ELEMENTS, 1e8),
)
def test_times_of_conversions_follow_the_line_of_those_measured(
    sizes: list[int], run: float, elements: float
) -> None:
    """``elements`` take as long as the start of a kernel."""
    line = Times(run, run / elements)
    found = Times.fitted((size, line.of(size)) for size in sizes)
    for size in (0, 1000, 10**6) if len({*sizes}) > 1 else sizes:
        assert found.of(size) == pytest.approx(line.of(size), rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1e3)), min_size=1, max_size=9))
def test_estimated_times_of_conversions_are_not_negative_and_rise_with_the_size(
    points: list[tuple[int, float]],
) -> None:
    found = Times.fitted(points)
    assert 0 <= found.element * RUN_ELEMENTS <= found.run + 1e-9


@given(st.integers(0, 4), st.data())
def test_the_local_cost_of_a_block_is_the_change_of_the_predicted_time(
    seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    costs = costs_of(
        *(
            trial(
                SPACE.resolve(labels),
                *(kernel(unit, ms=float(random.uniform(1, 3))) for unit in UNITS),
                *(conversion(tensor, ms=float(random.uniform(0, 1))) for tensor in SPACE.tensors),
            )
            for labels in ({}, SPACE.everything(), SPACE.uniform("in-only"))
        )
    )
    codes = np.array([data.draw(st.sampled_from(block.codes)) for block in costs.blocks], dtype=np.int8)
    block = data.draw(st.sampled_from(costs.blocks))
    other = codes.copy()
    other[block.index] = data.draw(st.sampled_from(block.codes))
    before = codes.copy()
    ours, theirs = (costs.local_ms(block, int(c[block.index]), codes) for c in (other, codes))
    assert ours - theirs == pytest.approx(costs.predict(other) - costs.predict(codes), abs=1e-9)
    assert codes.tolist() == before.tolist()


# ---- the search that uses the cost model --------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_strategy_accepts_results_one_by_one_and_in_any_order(batch: int) -> None:
    """The next step is computed after all results of the previous one."""
    oracle = Oracle(SPACE, 1)
    strategy = Attribution(SearchSetup(space=SPACE, clock="cpu"), np.random.default_rng(1))
    seen: list[str] = []
    while proposals := strategy.ask(batch):
        answers = [oracle.answer(proposal) for proposal in proposals]
        for answer in reversed(answers):
            assert not strategy.done()
            strategy.tell([answer])
        seen += [answer.placement.digest for answer in answers]
    assert strategy.done()
    assert len(seen) == len({*seen}) > len(pure_placements(SPACE))


def test_the_search_works_without_profiles() -> None:
    """A backend without layer times."""

    class Unprofiled(Oracle):
        def _layers(self, placement: Placement) -> tuple[LayerTime, ...]:
            return ()

    oracle = Unprofiled(SPACE, 0)
    strategy = Attribution(SearchSetup(space=SPACE, clock="cpu"), np.random.default_rng(0))
    found: list[float] = []
    while proposals := strategy.ask(1):
        answers = [oracle.answer(proposal) for proposal in proposals]
        strategy.tell(answers)
        found += [answer.ratio for answer in answers if answer.ratio is not None]
    assert len(found) > len(pure_placements(SPACE))
    pure = [oracle.cost(placement) for placement in pure_placements(SPACE)]
    assert min(found) <= min(pure) / oracle.cost(SPACE.resolve({})) + 1e-9
