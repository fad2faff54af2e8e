"""What noise a labelling makes, and which labellings trade latency for accuracy. Pure; floors 0 to 3.

Noise power at the output adds up over blocks above about 20 dB in total (HAWQ-V3, Yao et al. 2021, uses the same
additivity); below that the sum overestimates, which errs on the safe side. Each block is measured alone once;
the whole, measured too, calibrates the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import FP, Codes, Floats
from qdqspec.types import Label, format_of

PRICES = 12  # prices of noise that are tried between free and prohibitive
TARGETS_DB = (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0)  # accuracies a front is sampled at


def power(sqnr_db: float) -> float:
    """Noise power over signal power."""
    return float(10 ** (-sqnr_db / 10))


class NoiseModel:
    """Noise of a labelling as the sum over its blocks."""

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

        ``alone_db`` is, by block, the SQNR with it alone quantized, by the format's name in ``labels``.

        ``together_db`` is that with all of them. A label that was not heard counts as the block's loudest.
        """
        alone = [{name: power(value) for name, value in heard.items()} for heard in alone_db]
        for name, value in together_db.items():
            total = sum(heard.get(name, 0.0) for heard in alone)
            for heard in alone if total else ():
                heard |= {name: heard[name] * power(value) / total} if name in heard else {}
        powers: Floats = np.zeros((len(alone), len(labels)))
        for block, heard in zip(powers, alone, strict=True):
            loudest = max(heard.values(), default=0.0)
            block[FP + 1 :] = [heard.get(format_of(label), loudest) for label in labels[FP + 1 :]]
        return cls(powers)

    def sqnr_db(self, codes: Codes) -> float:
        """The predicted SQNR of a labelling, in dB."""
        noise = float(self.powers[np.arange(len(codes)), codes].sum())
        return float("inf") if noise <= 0 else -10 * float(np.log10(noise))


def priced(costs: CostModel, noise: NoiseModel) -> Iterator[Codes]:
    """Labellings that are quickest at rising prices of noise: the convex part of the model's front."""
    loudest = float(noise.powers.max(axis=1, initial=0.0).sum())
    if not loudest:
        return
    rate = float(costs.times[:, FP].sum()) / loudest
    for exponent in np.linspace(-2, 4, PRICES):
        yield costs.compose(1.0, rate * 10**exponent * noise.powers)
