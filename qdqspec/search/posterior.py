"""The belief about the time of labellings: a Bayesian linear model over classes of blocks.

Blocks of one class have the same operators, attributes and shapes. The prior mean is that of the energy, learnt from
profiles. Nothing here calls BLAS or LAPACK: on matrices of this size their threads cost more than they save, and keep
spinning while candidates are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from qdqspec._core.arrays import Floats
from qdqspec.search.blocks import FP, Codes
from qdqspec.search.energy import Energy
from qdqspec.types import Trial


class Posterior:
    """Predicts a labelling's time relative to the reference, by the ratios of ``trials``.

    The linear model has one coefficient for each class of blocks under each label, one for each pair of domains, and a
    constant. ``deviation`` is that of a measured ratio. The deviations of the prior are relative to its mean:
    ``measured_doubt`` for times in profiles, ``assumed_doubt`` for others. With larger ones a search makes more builds.
    """

    def __init__(
        self,
        energy: Energy,
        deviation: float,
        trials: Iterable[Trial] = (),
        *,
        measured_doubt: float = 0.15,
        assumed_doubt: float = 0.5,
        least_doubt: float = 0.002,  # of the reference's time
    ) -> None:
        self._energy = energy
        self._deviation = deviation
        self._classes = np.array(energy.classes, dtype=np.int64)
        self._labels = len(energy.space.labels)
        self._cells = self._labels * (int(self._classes.max(initial=-1)) + 1)
        self._reference_ms = energy.reference_ms or float(energy.times[:, FP].sum()) or 1.0
        unexplained = max(0.0, 1 - float(energy.times[:, FP].sum()) / self._reference_ms)
        factors, times = np.ones(energy.converting.shape[1]), energy.times / self._reference_ms
        self._mean = np.concatenate([self._class_means(times), factors, [unexplained]])  # of the prior
        doubt = np.full(len(self._mean), assumed_doubt)
        doubt[: self._cells][self._class_means(energy.is_measured) > 0] = measured_doubt
        self._covariance: Floats = np.diag(np.maximum(least_doubt, doubt * np.abs(self._mean)) ** 2)
        for trial in trials:
            if trial.ratio is not None:  # else it missed a limit, and was not timed
                self.observe(energy.codes_of(trial.placement), trial.ratio)

    def observe(self, codes: Codes, ratio: float) -> None:
        """Update mean and covariance by one measured labelling (Kalman 1960)."""
        features = self._features(codes)
        doubted = np.einsum("ij,j->i", self._covariance, features)
        gain = doubted / (self._deviation**2 + float((features * doubted).sum()))
        self._mean = self._mean + gain * (ratio - float((features * self._mean).sum()))
        self._covariance -= doubted[:, None] * gain

    def predict(self, codes: Codes) -> float:
        """The expected ratio of a labelling."""
        return float((self._features(codes) * self._mean).sum())

    def expected_gain(self, codes: Codes, best: float) -> float:
        """Expected improvement: the mean reduction below ``best``, counting increases as 0, as a share of ``best``.

        Jones, Schonlau and Welch, Journal of Global Optimization 13, 1998.
        """
        features = self._features(codes)
        below = best - float((features * self._mean).sum())
        variance = float((features * np.einsum("ij,j->i", self._covariance, features)).sum())
        doubt = math.sqrt(max(1e-18, variance))
        z = below / doubt
        chance = (1 + math.erf(z / math.sqrt(2))) / 2
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return (below * chance + doubt * density) / best

    def _class_means(self, values: Floats) -> Floats:
        """The mean over the blocks of each class, by class and label."""
        sums = np.zeros((self._cells // self._labels, self._labels))
        np.add.at(sums, self._classes, values)
        means: Floats = sums / np.bincount(self._classes).reshape(-1, 1)
        return means.ravel()

    def _features(self, codes: Codes) -> Floats:
        columns = self._classes * self._labels + codes
        counts = np.bincount(columns, minlength=self._cells)
        crossings = np.array(self._energy.conversions_ms(codes)) / self._reference_ms
        return np.concatenate([counts, crossings, [1.0]])
