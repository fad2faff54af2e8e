"""The noise of labelled blocks. A tensor between blocks is quantized once, whichever of them require it. Pure.

So the noise of a labelling is that of each block alone, its weights for example, and that of each shared tensor that
at least one of its blocks quantizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from qdqspec.arrays import Floats
from qdqspec.search.crossings import Codes, Domains


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """Noise that is there once if at least one of several blocks has one of its ``codes``, which are by block."""

    power: float
    codes: Mapping[int, frozenset[int]]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indexes of the blocks."""
        return tuple(self.codes)

    def active(self, codes: Codes | Sequence[int]) -> list[int]:
        """The blocks that cause it in a labelling."""
        return [block for block, own in self.codes.items() if codes[block] in own]

    def converted(self, codes: Codes | Sequence[int], _domains: Domains, /) -> list[int]:
        """As an edge of a descent: its only cost if it is there."""
        return [0] if self.active(codes) else []


class BlockNoise:
    """Noise power over signal power by block and code: ``own`` of one block, and ``shared``, of several."""

    def __init__(self, own: Floats, shared: Sequence[SharedNoise] = ()) -> None:
        self.own = own
        self.shared = tuple(shared)
        self._around: list[list[SharedNoise]] = [[] for _ in own]
        for each in self.shared:
            for block in each.blocks:
                self._around[block].append(each)

    @classmethod
    def of_parts(
        cls, own: Floats, parts: Mapping[int, Mapping[int, set[int]]], powers: Sequence[float]
    ) -> Self:
        """``parts`` are the codes of each block that cause a part, whose noise is in ``powers``, added to ``own``.

        Changes ``own``.
        """
        together: dict[tuple[tuple[int, frozenset[int]], ...], float] = {}
        for part, by_block in parts.items():
            if len(by_block) > 1:
                key = tuple((block, frozenset(codes)) for block, codes in sorted(by_block.items()))
                together[key] = together.get(key, 0.0) + powers[part]
                continue
            for block, codes in by_block.items():
                own[block, list(codes)] += powers[part]
        return cls(own, [SharedNoise(power, dict(key)) for key, power in together.items() if power])

    @property
    def largest(self) -> float:
        """An upper bound over all labellings."""
        return float(self.own.max(axis=1, initial=0.0).sum()) + sum(each.power for each in self.shared)

    @property
    def largest_part(self) -> float:
        """The largest noise of a block, or of a shared tensor."""
        return max(float(self.own.max(initial=0.0)), *(each.power for each in self.shared), 0.0)

    def of(self, codes: Codes) -> float:
        """The noise of a labelling."""
        return float(self.own[np.arange(len(codes)), codes].sum()) + self.of_shared(codes)

    def of_shared(self, codes: Codes) -> float:
        """The noise of the shared tensors of a labelling."""
        listed = codes.tolist()
        return sum(each.power for each in self.shared if each.active(listed))

    def added(self, codes: Codes, block: int, code: int) -> float:
        """The noise that changing one block adds."""
        changed = float(self.own[block, code] - self.own[block, codes[block]])
        for each in self._around[block]:
            others = any(codes[other] in own for other, own in each.codes.items() if other != block)
            if not others:
                changed += each.power * (
                    (code in each.codes[block]) - (int(codes[block]) in each.codes[block])
                )
        return changed

    def around(self, block: int) -> Sequence[SharedNoise]:
        """The shared noise of a block."""
        return self._around[block]


class FairShares:
    """The noise that each block would save under each other code, where blocks share that of a tensor equally.

    By what a block saves alone, a noisy tensor between two blocks would never be left out. Kept up to date by `change`.
    """

    def __init__(self, noise: BlockNoise, codes: Codes) -> None:
        self._noise = noise
        self.codes = codes.copy()
        self.total = noise.of(codes)
        self.saved: Floats = noise.own[np.arange(len(codes)), codes][:, None] - noise.own
        self._add(noise.shared, 1.0)

    def change(self, block: int, code: int) -> None:
        """Give a block another code. Changes this object."""
        noise, around = self._noise, self._noise.around(block)
        self.total += noise.added(self.codes, block, code)
        self._add(around, -1.0)
        self.saved[block] += noise.own[block, code] - noise.own[block, self.codes[block]]
        self.codes[block] = code
        self._add(around, 1.0)

    def _add(self, shared: Iterable[SharedNoise], sign: float) -> None:
        """Add or remove what blocks save of shared noise."""
        for each in shared:
            active = each.active(self.codes)
            for block in active or each.blocks:
                causing = list(each.codes[block])
                if active:
                    part = sign * each.power / len(active)
                    self.saved[block] += part
                    self.saved[block, causing] -= part
                else:
                    self.saved[block, causing] -= sign * each.power
