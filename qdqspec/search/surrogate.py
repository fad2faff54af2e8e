"""A Bayesian linear model of latency over labelled classes of blocks, with proposals by Thompson sampling.

Deterministic for the generator it is given. Blocks of one class have the same operators, attributes and shapes; the
model learns one time for each class under each label and one factor for the conversions between each two domains (float
and integer, for example). The prior mean comes from profiles (the cost model). Thompson sampling (Thompson 1933)
proposes: draw one model from the posterior, take its best labelling. A model is drawn from the prior and then corrected
by each observation with noise of its own (Papandreou and Yuille, "Gaussian sampling by local perturbations", NeurIPS
2010). Nothing here calls BLAS or LAPACK: on matrices of this size their threads cost more than they save, and keep
spinning while candidates are timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Floats
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.regions.flow import flow_of
from qdqspec.regions.pattern import PatternMaker
from qdqspec.search.blocks import CostModel, UnitBlock
from qdqspec.search.crossings import FP, Codes

# standard deviations of the prior, relative to its mean: of times in profiles, and of assumed ones
MEASURED_DOUBT, ASSUMED_DOUBT = 0.15, 0.5
LEAST_DOUBT = 0.002  # lower bound of the standard deviation, relative to the reference's time


def classes_of(space: SchemeSpace, blocks: Sequence[UnitBlock]) -> npt.NDArray[np.int64]:
    """A class number for each block: equal if operators, attributes and shapes are equal."""
    maker = PatternMaker(flow_of(space.model), "structure+shapes")
    numbers: dict[str, int] = {}
    found = []
    for block in blocks:
        nodes = [space.model.by_name[name].index for unit in block.units for name in space.by_id[unit].nodes]
        digest = maker.make(index for index in nodes if index in maker.place).digest
        found.append(numbers.setdefault(digest, len(numbers)))
    return np.array(found, dtype=np.int64)


class Surrogate:
    """Predicts a labelling's time relative to the reference. Observations are such ratios.

    Its columns are one for every class under every label, then one for the conversions between each two domains, then a
    constant.
    """

    def __init__(self, costs: CostModel, noise: float) -> None:
        """``noise`` is the standard deviation of an observation."""
        self._costs = costs
        self._classes = classes_of(costs.space, costs.blocks)
        self._members: list[list[int]] = [[] for _ in range(int(self._classes.max(initial=-1)) + 1)]
        for block, number in enumerate(self._classes.tolist()):
            self._members[number].append(block)  # the blocks of each class
        self._labels = costs.times.shape[1]
        self._cells = len(self._members) * self._labels
        self._reference_ms = costs.reference_ms or float(costs.times[:, FP].sum()) or 1.0
        self._descent = costs.descent(
            [costs.blocks[blocks[-1]].codes for blocks in self._members], self._members
        )
        self._noise = noise
        self._prior = self._prior_mean()
        self._doubt: Floats = np.maximum(LEAST_DOUBT, self._relative_doubt() * np.abs(self._prior))
        self._mean = self._prior
        self._covariance: Floats = np.diag(self._doubt**2)
        self._learnt: list[tuple[Floats, Floats, float]] = []  # features, gain and ratio of each observation

    def observe(self, codes: Codes, ratio: float) -> None:
        """Update the posterior with one measured labelling."""
        features = self._features(codes)
        doubted = np.einsum("ij,j->i", self._covariance, features)
        spread = self._noise**2 + float((features * doubted).sum())
        self._covariance -= doubted[:, None] * doubted / spread
        self._learnt.append((features, doubted / spread, ratio))
        self._mean = _corrected(self._mean, *self._learnt[-1])

    def predict(self, codes: Codes) -> float:
        """The expected ratio of a labelling."""
        return float((self._features(codes) * self._mean).sum())

    def expected_gain(self, codes: Codes, best: float) -> float:
        """Expected improvement: the mean reduction below ``best``, counting increases as 0, as a share of ``best``.

        Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", Journal of Global
        Optimization 13, 1998.
        """
        features = self._features(codes)
        below = best - float((features * self._mean).sum())
        variance = float((features * np.einsum("ij,j->i", self._covariance, features)).sum())
        doubt = math.sqrt(max(1e-18, variance))
        z = below / doubt
        chance = (1 + math.erf(z / math.sqrt(2))) / 2
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return (below * chance + doubt * density) / best

    def propose(self, start: Codes, random: np.random.Generator) -> Codes:
        """The best labelling of a model drawn from the posterior, by coordinate descent from ``start`` over classes."""
        drawn = self._drawn(random)
        times = drawn[: self._cells].reshape(-1, self._labels)[self._classes]
        converting = self._costs.converting * drawn[self._cells : -1] / self._reference_ms
        return self._descent.settle(start, times, converting)

    def _drawn(self, random: np.random.Generator) -> Floats:
        drawn = self._prior + self._doubt * random.standard_normal(len(self._prior))
        for features, gain, ratio in self._learnt:
            drawn = _corrected(drawn, features, gain, ratio + self._noise * random.standard_normal())
        return drawn

    def _prior_mean(self) -> Floats:
        """The cost model's times relative to the reference's; blocks of one class share their mean."""
        whole = self._reference_ms
        sums = np.zeros((len(self._members), self._labels))
        np.add.at(sums, self._classes, self._costs.times / whole)
        members = np.array(list(map(len, self._members))).reshape(-1, 1)
        unexplained = max(0.0, 1 - float(self._costs.times[:, FP].sum()) / whole)
        factors = np.ones(self._costs.converting.shape[1])
        return np.concatenate([(sums / np.maximum(members, 1)).ravel(), factors, [unexplained]])

    def _relative_doubt(self) -> Floats:
        """The standard deviation of each number of the prior, relative to it."""
        measured = np.zeros((len(self._members), self._labels), dtype=bool)
        np.logical_or.at(measured, self._classes, self._costs.is_measured)
        doubt = np.where(measured, MEASURED_DOUBT, ASSUMED_DOUBT)
        return np.concatenate(
            [doubt.ravel(), np.full(self._costs.converting.shape[1], ASSUMED_DOUBT), [ASSUMED_DOUBT]]
        )

    def _features(self, codes: Codes) -> Floats:
        columns = self._classes * self._labels + codes
        counts = np.bincount(columns, minlength=self._cells)
        crossings = self._costs.crossings_ms(codes) / self._reference_ms
        return np.concatenate([counts, crossings, [1.0]])


def _corrected(model: Floats, features: Floats, gain: Floats, ratio: float) -> Floats:
    """Kalman update (Kalman 1960): the model after an observation, moved along the gain by the prediction error."""
    return model + gain * (ratio - float((features * model).sum()))
