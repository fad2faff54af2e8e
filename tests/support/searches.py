"""Spaces, simulated devices and oracles of known accuracy, for tests of searches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from onnx_text import parsed

from qdqspec._core.arrays import Floats
from qdqspec.accuracy.compare import power_of
from qdqspec.backends.base import Capabilities
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.base import Proposal
from qdqspec.search.blocks import Codes, pure_labels
from qdqspec.search.energy import Energy
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.testing.strategies import Oracle
from qdqspec.types import EXACT_DB, LabelNoise, LayerTime, Placement, QuantizeRules, SearchLimits, Trial


def residual_space(*formats: str) -> SchemeSpace:
    """Two convolutions with a residual, pooled, and two products: six units with the names of their nodes.

    The format is int8 unless others are given.
    """
    formats = formats or ("int8",)
    shapes = {"w1": (8, 4, 3, 3), "w2": (8, 8, 3, 3), "fc1": (8, 16), "fc2": (16, 4)}
    model = parsed(
        """residual (float[1,4,8,8] x) => (float[1,4] y) {
            [conv1] a = Conv<pads = [1,1,1,1]>(x, w1)
            [relu] b = Relu(a)
            [conv2] c = Conv<pads = [1,1,1,1]>(b, w2)
            [add] d = Add(b, c)
            [pool] e = GlobalAveragePool(d)
            [flatten] f = Flatten(e)
            [gemm1] g = Gemm(f, fc1)
            [gemm2] y = Gemm(g, fc2)
        }""",
        **{name: np.ones(shape, np.float32) for name, shape in shapes.items()},
    )
    capabilities = Capabilities(
        formats=formats,
        labels={
            **dict.fromkeys(("Conv", "Add", "GlobalAveragePool"), ("in+out",)),
            "Gemm": ("in+out", "in-only"),
        },
        activations={name: "uint8" if name == "int8" else name for name in formats},
        weights={name: name for name in formats},
        absorbs=frozenset({"Relu"}),
    )
    return SchemeSpace(model, capabilities, rules=QuantizeRules(format="+".join(formats)))


def kernel(*nodes: str, ms: float = 1.0, integer: bool = False) -> LayerTime:
    """A kernel that computes these nodes."""
    return LayerTime(name="+".join(nodes), op_type="K", milliseconds=ms, nodes=nodes, integer=integer)


def pure_placements(space: SchemeSpace) -> list[Placement]:
    """The reference, then those of `pure_labels`."""
    return [space.resolve({}), *map(space.resolve, pure_labels(space))]


def all_placements(space: SchemeSpace) -> list[Placement]:
    """The placements of all labellings of the units of a small space."""
    choices = itertools.product(*(unit.labels for unit in space.units))
    return [space.resolve(dict(zip(space.by_id, labels, strict=True))) for labels in choices]


def distance(
    trials: Sequence[Trial], oracle: Oracle, admits: Callable[[Placement], bool] = lambda _: True
) -> float:
    """The true time of the last winner over that of the best of all admitted placements of a small space."""
    winner = [trial.placement for trial in trials if trial.incumbent][-1]
    return oracle.cost(winner) / min(oracle.cost(p) for p in all_placements(oracle.space) if admits(p))


def all_labellings(energy: Energy) -> list[Codes]:
    """All labellings of the blocks of a small space."""
    choices = itertools.product(*(block.codes for block in energy.blocks))
    return [np.array(codes, dtype=np.int8) for codes in choices]


def drawn_noise(energy: Energy, seed: int) -> Floats:
    """Noise of blocks that differs by several decades; none in float."""
    noise: Floats = 10.0 ** np.random.default_rng(seed).uniform(-5, -1, energy.times.shape)
    noise[:, 0] = 0.0
    return noise


def separate_noise(powers: dict[tuple[str, str], float]) -> LabelNoise:
    """Noise whose parts belong to one label each."""
    return LabelNoise(tuple(powers.values()), {key: (number,) for number, key in enumerate(powers)})


def limited(least_db: float | None = None, least_score: float | None = None) -> Limits:
    """Limits of the SQNR and of a task metric, which measure nothing themselves."""
    metric = None if least_score is None else MetricLimit(least=least_score)
    return Limits(asked=SearchLimits(min_sqnr_db=least_db), metric=metric)


class Additive:
    """An accuracy oracle of additive noise, in which the second unit has most.

    Its predictions are too high by ``offset`` until the first result. It counts predictions in ``asked``. Without
    ``noise`` it predicts nothing. ``expects`` is what it knows of the task metric.
    """

    doubt_db = 0.1
    expects: Callable[[Placement], bool | None] = staticmethod(lambda _: None)

    def __init__(self, space: SchemeSpace, offset: float = 0.0, *, noise: bool = True) -> None:
        self.powers = {unit.id: power_of(45.0 - 12 * (index == 1)) for index, unit in enumerate(space.units)}
        self._space, self._offset, self._has_noise = space, offset, noise
        self.asked = 0

    def truth(self, placement: Placement) -> float:
        """The SQNR of a build."""
        noise = sum(self.powers[name] for name, _ in placement.labels)
        return EXACT_DB if noise == 0 else -10 * float(np.log10(noise))

    def noise(self) -> LabelNoise | None:
        """The noise of each unit under each of its labels."""
        labels = (
            (unit.id, label) for unit in self._space.units for label in (*unit.labels[1:], *unit.halves)
        )
        return separate_noise({key: self.powers[key[0]] for key in labels}) if self._has_noise else None

    def predicted_db(self, placement: Placement) -> float | None:
        """The SQNR, and the offset."""
        self.asked += 1
        return self.truth(placement) + self._offset if self._has_noise else None

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the metric is expected to meet its limit."""
        return self.expects(placement)

    def learn(self, trial: Trial) -> None:
        """The first result corrects the offset."""
        if trial.placement.sites:
            self._offset = 0.0


class Device(Oracle):
    """A simulated device with the SQNRs of an oracle, on which candidates below ``least`` do not win."""

    def __init__(self, space: SchemeSpace, seed: int, truth: Additive, least: float | None) -> None:
        super().__init__(space, seed)
        self.truth, self.least = truth, least

    def answer(self, proposal: Proposal) -> Trial:
        """The trial of a proposal."""
        best = self._best
        trial = replace(super().answer(proposal), sqnr_db=self.truth.truth(proposal.placement))
        if self.least is None or trial.reaches(self.least):
            return trial
        self._best = best
        return replace(trial, incumbent=False, race=None)


class ScoringDevice(Device):
    """A device that scores race winners: those with less than ``least`` do not win."""

    def __init__(
        self,
        space: SchemeSpace,
        seed: int,
        truth: Additive,
        least: float,
        score: Callable[[Placement], float],
    ) -> None:
        super().__init__(space, seed, truth, None)
        self.least_score, self.score = least, score
        self.scored: list[Placement] = []

    def answer(self, proposal: Proposal) -> Trial:
        """The trial of a proposal."""
        best, trial = self._best, super().answer(proposal)
        if trial.incumbent and trial.placement.sites:
            self.scored.append(trial.placement)
            trial = replace(trial, accuracy=self.score(trial.placement))
        if trial.reaches(None, self.least_score):
            return trial
        self._best = best
        return replace(trial, incumbent=False)
