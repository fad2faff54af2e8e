"""A model of the quantization noise of a labelling, and labellings that trade latency for accuracy. Pure.

Noise power at the output is additive over blocks above about 20 dB in total (HAWQ-V3, Yao et al. 2021, uses the same
additivity); below that the sum overestimates, which is conservative. Each block is measured alone once; the measurement
of the whole calibrates the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import FP, Codes
from qdqspec.types import Label, format_of

PRICES = 12  # prices of noise, from free to prohibitive
TARGETS_DB = (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0)  # SQNR targets at which a front is sampled


def power(sqnr_db: float) -> float:
    """Noise power over signal power."""
    return float(10 ** (-sqnr_db / 10))


class NoiseModel:
    """The noise of a labelling as the sum over its blocks."""

    def __init__(self, powers: Floats) -> None:
        """``powers`` is the noise of each block alone under each code."""
        self.powers = powers

    @classmethod
    def measured(
        cls,
        labels: Sequence[Label],
        alone_db: Sequence[Mapping[str, float]],
        together_db: Mapping[str, float],
    ) -> NoiseModel:
        """The model from builds of single blocks.

        ``alone_db`` is, for each block, the SQNR with only that block quantized, by name of the format in ``labels``.
        ``together_db`` is the SQNR with all blocks quantized. A label that was not measured gets the largest noise of
        the block's labels.
        """
        alone = [{name: power(value) for name, value in found.items()} for found in alone_db]
        for name, value in together_db.items():
            total = sum(block.get(name, 0.0) for block in alone)
            for block in alone if total else ():
                block |= {name: block[name] * power(value) / total} if name in block else {}
        powers: Floats = np.zeros((len(alone), len(labels)))
        for row, block in zip(powers, alone, strict=True):
            largest = max(block.values(), default=0.0)
            row[FP + 1 :] = [block.get(format_of(label), largest) for label in labels[FP + 1 :]]
        return cls(powers)

    def sqnr_db(self, codes: Codes) -> float:
        """The predicted SQNR of a labelling, in dB."""
        noise = float(self.powers[np.arange(len(codes)), codes].sum())
        return float("inf") if noise <= 0 else -10 * float(np.log10(noise))


def priced(costs: CostModel, noise: NoiseModel) -> Iterator[Codes]:
    """The fastest labellings at rising prices of noise: the convex part of the model's Pareto front."""
    loudest = float(noise.powers.max(axis=1, initial=0.0).sum())
    if not loudest:
        return
    rate = float(costs.times[:, FP].sum()) / loudest
    for exponent in np.linspace(-2, 4, PRICES):
        yield costs.compose(1.0, rate * 10**exponent * noise.powers)
