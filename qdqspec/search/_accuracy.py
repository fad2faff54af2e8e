"""What noise a labelling makes, and which labellings trade latency for accuracy. Pure; floors 0 to 3.

Noise power at the output adds up over blocks above about 20 dB in total (HAWQ-V3, Yao et al. 2021, uses the same
additivity); below that the sum overestimates, which errs on the safe side. Each block is measured alone once;
the whole, measured too, calibrates the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import FP, Codes, Floats

PRICES = 12  # prices of noise that are tried between free and prohibitive
TARGETS_DB = (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0)  # accuracies a front is sampled at


def power(sqnr_db: float) -> float:
    """Noise power over signal power."""
    return float(10 ** (-sqnr_db / 10))


class NoiseModel:
    """Noise of a labelling as the sum over its quantized blocks, whatever their label."""

    def __init__(self, alone_db: Sequence[float], together_db: float | None) -> None:
        """``alone_db`` is the SQNR with one block quantized, by block; ``together_db`` with all of them."""
        self.powers: Floats = np.array([power(value) for value in alone_db], dtype=np.float64)
        total = float(self.powers.sum())
        if together_db is not None and total > 0:
            self.powers *= power(together_db) / total

    def sqnr_db(self, codes: Codes) -> float:
        """The predicted SQNR of a labelling, in dB."""
        noise = float(self.powers[codes != FP].sum())
        return float("inf") if noise <= 0 else -10 * float(np.log10(noise))


def priced(costs: CostModel, noise: NoiseModel) -> Iterator[Codes]:
    """Labellings that are quickest at rising prices of noise: the convex part of the model's front."""
    if not noise.powers.sum():
        return
    rate = float(costs.times[:, FP].sum()) / float(noise.powers.sum())
    for exponent in np.linspace(-2, 4, PRICES):
        penalty = np.zeros_like(costs.times)
        penalty[:, FP + 1 :] = (rate * 10**exponent * noise.powers)[:, None]
        yield costs.compose(1.0, penalty)


def noisiest_first(start: Codes, noise: NoiseModel, target_db: float) -> Codes:
    """The labelling left when the noisiest blocks go back to float until the target is reached."""
    codes = start.copy()
    for index in np.argsort(-noise.powers):
        if noise.sqnr_db(codes) >= target_db:
            break
        codes[index] = FP
    return codes
