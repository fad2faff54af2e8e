"""The contract suite for search strategies: inherit `StrategyContract` and set ``strategy``::

    class TestMine(StrategyContract):
        strategy = MyStrategy

A strategy searches a small residual network with invented costs: each operator has a time in floating point
and one in integers, and each tensor that is converted between the two costs extra. Nothing is built.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import onnx
import pytest

from qdqspec.backends import Capabilities
from qdqspec.graph import Model
from qdqspec.qdq import SchemeSpace, Unit
from qdqspec.search import Proposal, SearchSetup, Strategy
from qdqspec.types import NOT_CANDIDATES, Kind, Label, LayerTime, Placement, Race, Samples, Trial

_TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,8,8,8] x) => (float[1,8] y)
{
    a = Conv<pads = [1,1,1,1]>(x, w0)
    b = Relu(a)
    c = Conv<pads = [1,1,1,1]>(b, w1)
    d = Add(b, c)
    e = Relu(d)
    f = Conv<pads = [1,1,1,1]>(e, w2)
    h = GlobalAveragePool(f)
    i = Flatten(h)
    y = MatMul(i, g)
}"""
_WEIGHTS = {"w0": (8, 8, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 8, 3, 3), "g": (8, 8)}
_MOST = 400  # proposals after which a strategy counts as endless


def small_space() -> SchemeSpace:
    """The space of a residual network of nine operators; weights are zero, as nothing runs it."""
    proto = onnx.parser.parse_model(_TEXT)
    for name, shape in _WEIGHTS.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    both: tuple[Kind, ...] = ("in+out", "in-only")
    capabilities = Capabilities(
        formats=("int8",),
        labels={
            **dict.fromkeys(("Conv", "Add", "GlobalAveragePool", "Flatten"), ("in+out",)),
            "MatMul": both,
        },
        activations={"int8": "uint8"},
        weights={"int8": "int8"},
        absorbs=frozenset({"Relu"}),
    )
    return SchemeSpace(Model(proto), capabilities)


class Oracle:
    """Simulates a device for a strategy: invented times; a race is won if a placement is faster.

    ``fails`` selects placements that do not build. ``seed`` chooses the costs. A difference must exceed
    ``eps`` to count. ``asked`` are the proposals so far.
    """

    def __init__(
        self,
        space: SchemeSpace,
        seed: int = 0,
        fails: Callable[[Placement], bool] = lambda _: False,
        eps: float = 0.01,
    ) -> None:
        lots = np.random.default_rng(seed)
        self.space = space
        self.asked: list[Proposal] = []
        self._float = {unit.id: lots.uniform(0.5, 2) for unit in space.units}
        self._gain = {unit.id: lots.uniform(0.3, 1.2) for unit in space.units}
        self._crossing = 0.15
        self._rest = 0.05  # time of the operators that are in no unit, and always float
        self._fails = fails
        self._eps = eps
        self._best: float | None = None
        self._reference = self.cost(space.resolve({}))

    def cost(self, placement: Placement) -> float:
        """Milliseconds of a placement: each kernel, and each pair between float and integer neighbours."""
        labels = dict(placement.labels)
        total = sum(self._kernel_ms(unit, labels) for unit in self.space.units)
        return self._rest + total + self._crossing * len(self._crossings(labels))

    def answer(self, proposal: Proposal) -> Trial:
        """The trial of a proposal."""
        number = len(self.asked)
        self.asked.append(proposal)
        blank = Trial(number=number, phase=proposal.phase, placement=proposal.placement, eps=self._eps)
        if number and self._fails(proposal.placement):
            return replace(blank, status="failed", error="no")
        cost = self.cost(proposal.placement)
        won = self._best is None or cost < (1 - self._eps) * self._best
        race = None
        if self._best is not None:
            is_close = cost <= (1 + self._eps) * self._best
            race = Race(
                opponent="best",
                ratio=cost / self._best,
                p_value=0.001,
                pairs=12,
                verdict="faster" if won else "no difference" if is_close else "slower",
            )
        self._best = cost if won or self._best is None else self._best
        return replace(
            blank,
            samples=Samples(wall_ms=(cost,), cpu_ms=(cost,)),
            layers=self._layers(proposal.placement) if proposal.profile else (),
            race=race,
            incumbent=won,
            ratio=cost / self._reference,
        )

    def _kernel_ms(self, unit: Unit, labels: Mapping[str, Label]) -> float:
        return self._float[unit.id] * (self._gain[unit.id] if labels.get(unit.id, "fp") != "fp" else 1)

    def _crossings(self, labels: Mapping[str, Label]) -> list[str]:
        """Tensors that are made in float and read in integers, or the reverse."""
        made = {t: labels.get(u.id) == "in+out" for u in self.space.units for t in u.outputs}
        read = [(t, labels.get(u.id, "fp") != "fp") for u in self.space.units for t, _ in u.edges]
        return sorted({tensor for tensor, integer in read if integer != made.get(tensor, False)})

    def _layers(self, placement: Placement) -> tuple[LayerTime, ...]:
        labels = dict(placement.labels)
        kernels = [
            LayerTime(
                name=u.id,
                op_type=u.op_type,
                milliseconds=self._kernel_ms(u, labels),
                nodes=u.nodes,
                integer=labels.get(u.id, "fp") != "fp",
            )
            for u in self.space.units
        ]
        conversions = [
            LayerTime(
                name=f"q {t}", op_type="Quantize", milliseconds=self._crossing, tensors=(t,), boundary=True
            )
            for t in self._crossings(labels)
        ]
        return (*kernels, *conversions)


def drive(strategy: Strategy, oracle: Oracle, *, trials: int = _MOST, batch: int = 1) -> list[Trial]:
    """Ask, answer and tell until the strategy is done or the number of ``trials`` is reached."""
    made: list[Trial] = []
    while len(made) < trials and (proposals := strategy.ask(min(batch, trials - len(made)))):
        answers = [oracle.answer(proposal) for proposal in proposals]
        made += answers
        strategy.tell(answers)
    return made


class StrategyContract:
    """The contract of each strategy. Set ``strategy`` to the class."""

    strategy: ClassVar[type[Strategy]]
    __test__ = False

    def __init_subclass__(cls) -> None:
        """Only subclasses are collected."""
        cls.__test__ = True

    @pytest.fixture
    def space(self) -> SchemeSpace:
        """The space to search; override it for a strategy that needs another."""
        return small_space()

    def make(
        self, space: SchemeSpace, seed: int = 0, trials: int = 60, seeds: Sequence[Placement] = ()
    ) -> Strategy:
        """A new strategy; ``seeds`` are its warm starts."""
        setup = SearchSetup(space=space, trials=trials, seeds=tuple(seeds))
        return self.strategy(setup, np.random.default_rng(seed))

    def test_it_begins_with_the_reference(self, space: SchemeSpace) -> None:
        """The reference is proposed first, because all ratios refer to it."""
        first = self.make(space).ask(1)
        assert [proposal.placement.sites for proposal in first] == [frozenset()]

    def test_it_never_asks_twice(self, space: SchemeSpace) -> None:
        """No candidate is built twice, whatever labels it has."""
        trials = drive(self.make(space), Oracle(space))
        digests = [trial.placement.digest for trial in trials if trial.phase not in NOT_CANDIDATES]
        assert len(digests) == len(set(digests))

    def test_it_comes_to_an_end(self, space: SchemeSpace) -> None:
        """The strategy ends without external limit, and stays done; with an open proposal it is not done."""
        strategy = self.make(space)
        strategy.ask(1)
        assert not strategy.done()
        strategy = self.make(space)
        assert len(drive(strategy, Oracle(space))) < _MOST
        assert strategy.done()
        assert not strategy.ask(1)
        assert strategy.done()

    def test_it_is_deterministic(self, space: SchemeSpace) -> None:
        """The same seed and answers give the same proposals; global generators are neither used nor changed."""
        first, second = Oracle(space), Oracle(space)
        for seed, oracle in enumerate((first, second)):
            random.seed(seed)
            np.random.seed(seed)
            before = random.getstate(), repr(np.random.get_state(legacy=False))
            drive(self.make(space, seed=7), oracle)
            assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before
        assert first.asked == second.asked

    def test_warm_starts_come_right_after_the_reference(self, space: SchemeSpace) -> None:
        """Warm starts come first, because they are known to be good."""
        seeds = [space.resolve({unit.id: unit.full}) for unit in space.units[:2]]
        strategy, oracle = self.make(space, seeds=seeds), Oracle(space)
        first = drive(strategy, oracle, trials=1 + len(seeds))
        assert [trial.placement.digest for trial in first[1:]] == [seed.digest for seed in seeds]
        assert drive(strategy, oracle)  # and it continues

    def test_an_empty_space_ends_with_the_reference(self, space: SchemeSpace) -> None:
        """In an empty space only the reference is proposed."""
        empty = space.known(())
        strategy = self.make(empty)
        trials = drive(strategy, Oracle(empty))
        assert [trial.placement.sites for trial in trials] == [frozenset()]
        assert strategy.done()

    @pytest.mark.parametrize("batch", [1, 3])
    def test_it_gives_no_more_than_was_requested(self, space: SchemeSpace, batch: int) -> None:
        """At most as many proposals are returned as requested."""
        strategy = self.make(space)
        oracle = Oracle(space)
        while proposals := strategy.ask(batch):
            assert len(proposals) <= batch
            strategy.tell([oracle.answer(proposal) for proposal in proposals])

    def test_it_stays_in_its_space(self, space: SchemeSpace) -> None:
        """Only units of the space are labelled, and with labels they offer."""
        offered: dict[str, Sequence[Label]] = {unit.id: (*unit.labels, *unit.halves) for unit in space.units}
        for trial in drive(self.make(space), Oracle(space)):
            labels = dict(trial.placement.labels)
            assert all(label in offered.get(name, ()) for name, label in labels.items())
            assert space.resolve(labels).digest == trial.placement.digest

    @pytest.mark.parametrize("seed", range(3))
    def test_failures_do_not_stop_it(self, space: SchemeSpace, seed: int) -> None:
        """A candidate that does not build is a normal answer; candidates that build are still found."""
        refused: list[Placement] = []

        def fails(placement: Placement) -> bool:
            """The first three candidates, then every third."""
            bad = len(refused) < 3 or int(placement.digest, 16) % 3 == 0
            refused.extend([placement] if bad else [])
            return bad

        trials = drive(self.make(space), Oracle(space, seed, fails=fails))
        assert sum(not trial.ok for trial in trials) >= 3
        assert any(trial.ok and trial.placement.sites for trial in trials)

    def test_all_but_the_reference_may_fail(self, space: SchemeSpace) -> None:
        """It ends without an exception if all candidates fail."""
        strategy = self.make(space)
        drive(strategy, Oracle(space, fails=lambda _: True))
        assert strategy.done()

    @pytest.mark.parametrize("seed", range(5))
    def test_it_finds_what_pure_labels_find(self, space: SchemeSpace, seed: int) -> None:
        """The result is at least as good as the better of nothing and everything quantized."""
        oracle = Oracle(space, seed)
        found = min(oracle.cost(t.placement) for t in drive(self.make(space), oracle) if t.ok)
        pure = [space.resolve({}), space.resolve(space.everything())]
        assert found <= min(map(oracle.cost, pure)) + 1e-9
