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

    moments: Moments  # (group, column, column)
    sums: Means
    rows: int = 0

    @property
    def means(self) -> Means:
        """The mean of each column."""
        return Means(*(np.asarray(each / max(self.rows, 1), np.float32) for each in self.sums))

    def add(self, rows: Moments, stored: Moments) -> None:
        """Add real and quantized rows (group, row, column). Changes these statistics."""
        self.moments += np.matmul(rows.transpose(0, 2, 1), rows)
        self.sums = Means(self.sums.real + rows.sum(axis=1), self.sums.quantized + stored.sum(axis=1))
        self.rows += rows.shape[1]


def observed_statistics(
    layers: Iterable[LinearLayer],
    feeds: Callable[[], Iterable[Feed]],
    samples: int,
    observe: Observe,
    pairs: Mapping[str, QuantParams] | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[LinearLayer, InputStatistics, InputStatistics]]:
    """The statistics of each layer over even and over odd samples, in batches that fit into memory.

    ``samples`` is the number of ``feeds``: of many samples, fewer rows of each are enough. Layers whose inputs
    are not observed in both parts are omitted. ``pairs`` are as in `observed_means`. Once it ``is_late``, a batch
    ends with the samples it has, and no other begins.
    """
    for batch in _batches([layer for layer in layers if layer.columns <= MOST_COLUMNS]):
        if is_late():
            return
        found: tuple[dict[str, InputStatistics], ...] = {}, {}
        sources = list(dict.fromkeys(layer.source for layer in batch))
        for index, values in enumerate(observe(sources, feeds())):
            for layer in batch:
                value = values.get(layer.source)
                rows = None if value is None or not value.size else layer.rows(value, _rows(layer, samples))
                if rows is not None and np.isfinite(rows).all():
                    _of(found[index % 2], layer).add(rows, _stored(rows, layer, pairs))
            if is_late():
                break
        for layer in batch:
            if all(layer.weight in part for part in found):
                yield layer, found[0][layer.weight], found[1][layer.weight]


def observed_means(
    layers: Sequence[LinearLayer],
    feeds: Callable[[], Iterable[Feed]],
    samples: int,
    observe: Observe,
    pairs: Mapping[str, QuantParams] | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[LinearLayer, Means, Means]]:
    """The means of the columns of each layer's input over even and over odd samples, those until it ``is_late``.

    ``pairs`` are the parameters by which inputs are quantized, by weight; without them inputs are exact.
    """
    sums: tuple[dict[str, Means], ...] = {}, {}
    counts: tuple[dict[str, int], ...] = {}, {}
    sources = list(dict.fromkeys(layer.source for layer in layers))
    for index, values in enumerate(observe(sources, feeds())):
        part, count = sums[index % 2], counts[index % 2]
        for layer in layers:
            value = values.get(layer.source)
            rows = None if value is None or not value.size else layer.rows(value, _rows(layer, samples))
            if rows is not None and np.isfinite(rows).all():
                stored = _stored(rows, layer, pairs)
                known = part.get(layer.weight, Means(np.zeros((), np.float32), np.zeros((), np.float32)))
                part[layer.weight] = Means(
                    known.real + rows.sum(axis=1), known.quantized + stored.sum(axis=1)
                )
                count[layer.weight] = count.get(layer.weight, 0) + rows.shape[1]
        if is_late():
            break
    for layer in layers:
        if all(layer.weight in part for part in sums):
            fit, held_out = (
                Means(*(np.asarray(each / c[layer.weight], np.float32) for each in p[layer.weight]))
                for p, c in zip(sums, counts, strict=True)
            )
            yield layer, fit, held_out


def _rows(layer: LinearLayer, samples: int) -> int:
    """The number of rows of each sample."""
    wanted = max(ROWS, ROWS_A_COLUMN * layer.columns)
    return min(MOST_ROWS, -(-2 * wanted // max(samples, 1)))


def _stored(rows: Moments, layer: LinearLayer, pairs: Mapping[str, QuantParams] | None) -> Moments:
    """The values that the layer reads where its input is quantized."""
    params = (pairs or {}).get(layer.weight)
    return rows if params is None else dequantize(quantize(rows, params), params)


def _of(found: dict[str, InputStatistics], layer: LinearLayer) -> InputStatistics:
    if layer.weight not in found:
        groups, columns = layer.groups, layer.columns
        found[layer.weight] = InputStatistics(
            moments=np.zeros((groups, columns, columns), np.float32),
            sums=Means(np.zeros((groups, columns), np.float32), np.zeros((groups, columns), np.float32)),
        )
    return found[layer.weight]


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
