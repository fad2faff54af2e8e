"""Second moments and means of the inputs of linear layers, over calibration samples of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Feed
from qdqspec.corrections.layers import LinearLayer
from qdqspec.quantize.formats import QuantParams
from qdqspec.quantize.scales import dequantize, quantize

Observe: TypeAlias = Callable[[Sequence[str], Iterable[Feed]], Iterator[Mapping[str, Array]]]
Moments: TypeAlias = npt.NDArray[np.float32]

MOST_ROWS = 512  # per sample: positions of an image, or tokens
ROWS, ROWS_A_COLUMN = 4096, 8  # of all samples of a part together: at least, and for each column
MOST_COLUMNS = 2304  # more columns take too long to invert
MOST_BYTES = 256 << 20  # of moments in one batch


class Means(NamedTuple):
    """The means of the columns of a layer's input, (group, column): of the real values, and of the quantized ones."""

    real: Moments
    quantized: Moments


@dataclass(slots=True, kw_only=True)
class InputStatistics:
    """Sums of ``x x^T``, of ``x`` and of quantized ``x`` over ``rows`` rows of one layer's input, by group."""

    moments: Moments  # (group, column, column); of no dimension if only means are wanted
    sums: Means
    noise: Moments  # sums of the squared error of quantized columns, (group, column)
    rows: int = 0

    @classmethod
    def none_of(cls, layer: LinearLayer, *, moments: bool) -> InputStatistics:
        """Those of no rows."""
        groups, columns = layer.groups, layer.columns
        return cls(
            moments=np.zeros((groups, columns, columns) if moments else (), np.float32),
            sums=Means(*np.zeros((2, groups, columns), np.float32)),
            noise=np.zeros((groups, columns), np.float32),
        )

    def add(self, layer: LinearLayer, patches: Moments, params: QuantParams | None) -> None:
        """Add inputs of a layer, in patches, that reads them quantized by ``params``, or exact. Changes these."""
        stored = patches if params is None else dequantize(quantize(patches, params), params)
        totals = (layer.grouped(each.sum(axis=0)[None])[:, 0] for each in (patches, stored))
        self.sums = Means(*(old + new for old, new in zip(self.sums, totals, strict=True)))
        self.noise = self.noise + layer.grouped(((stored - patches) ** 2).sum(axis=0)[None])[:, 0]
        self.rows += len(patches)
        if self.moments.ndim:
            rows = layer.grouped(patches)
            self.moments += np.matmul(rows.transpose(0, 2, 1), rows)

    @property
    def means(self) -> Means:
        """The mean of each column."""
        return Means(*(np.asarray(each / max(self.rows, 1), np.float32) for each in self.sums))


def observed_statistics(
    layers: Iterable[LinearLayer],
    feeds: Callable[[], Iterable[Feed]],
    observe: Observe,
    pairs: Mapping[str, QuantParams] | None = None,
    is_late: Callable[[], bool] = lambda: False,
    *,
    moments: bool = True,
) -> Iterator[tuple[LinearLayer, InputStatistics, InputStatistics]]:
    """The statistics of each layer over even and over odd samples, in batches that fit into memory.

    Of many ``feeds``, fewer rows of each are enough. Layers whose inputs are not observed in both parts are omitted.
    ``pairs`` are the parameters by which inputs are quantized, by weight; without them inputs are exact. Once it
    ``is_late``, a batch ends with the samples it has, and no other begins. Without ``moments`` only means are
    collected, of all layers at once.
    """
    samples = sum(1 for _ in feeds())
    small = [layer for layer in layers if layer.columns <= MOST_COLUMNS] if moments else list(layers)
    for batch in _batches(small) if moments else [small]:
        if is_late():
            return
        found: tuple[dict[str, InputStatistics], ...] = {}, {}
        sources = list(dict.fromkeys(layer.source for layer in batch))
        for index, values in enumerate(observe(sources, feeds())):
            for layer in batch:
                value = values.get(layer.source)
                if value is None or not value.size:
                    continue
                patches = layer.patches(value, _rows(layer, samples))
                if patches is not None and np.isfinite(patches).all():
                    own = found[index % 2]
                    if layer.weight not in own:
                        own[layer.weight] = InputStatistics.none_of(layer, moments=moments)
                    own[layer.weight].add(layer, patches, (pairs or {}).get(layer.weight))
            if is_late():
                break
        for layer in batch:
            if all(layer.weight in part for part in found):
                yield layer, found[0][layer.weight], found[1][layer.weight]


def _rows(layer: LinearLayer, samples: int) -> int:
    """The number of rows of each sample."""
    wanted = max(ROWS, ROWS_A_COLUMN * layer.columns)
    return min(MOST_ROWS, -(-2 * wanted // max(samples, 1)))


def _batches(layers: Sequence[LinearLayer]) -> Iterator[list[LinearLayer]]:
    batch: list[LinearLayer] = []
    taken = 0
    for layer in layers:
        size = 8 * layer.groups * layer.columns**2
        if batch and taken + size > MOST_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(layer)
        taken += size
    if batch:
        yield batch
