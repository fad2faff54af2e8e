"""8-bit weights whose products with uint8 activations fit into 16 bits, on processors that add two of them there.

VPMADDUBSW adds the products of two neighbouring columns in 16 bits, and saturates. The kernels read columns in the
order (kernel position, input channel); a depthwise kernel adds no two products in 16 bits. With activations of up to
255 the sum fits if two weights of equal sign add up to at most 128; weights of opposite sign always fit. Most inputs
are far below that: few pairs of neighbours are both near 255 at the same position. So the largest integers of a
layer's inputs are found on calibration data (`observed_limits`): of each column, and the largest sum of each two
neighbours. For weights u <= v of a pair with inputs a and b the sum is at most u max(a + b) + (v - u) max(b).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.units import count_text
from qdqspec.accuracy.corrections.layers import LinearLayer, Observe, find_layers
from qdqspec.accuracy.data import Dataset
from qdqspec.errors import BackendError
from qdqspec.graph import Model
from qdqspec.qdq import Quantizer, QuantParams, SchemeSpace, WeightKey
from qdqspec.types import Site

_Floats: TypeAlias = npt.NDArray[np.floating]

_LIMIT = 2**15 - 1  # of a sum in 16 bits
_MOST = 255  # the largest uint8 activation
_LARGEST, _REDUCED = 127, 63  # the largest weights of 8 and 7 bits


def _neighbours(values: _Floats) -> tuple[_Floats, _Floats]:
    """The first and the second of each two neighbours on the last axis."""
    even = values.shape[-1] // 2 * 2
    return values[..., 0:even:2], values[..., 1:even:2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairMaxima:
    """The largest integers that columns of a layer read (group, column), and sums of neighbours (group, pair)."""

    layer: LinearLayer
    columns: _Floats
    pairs: _Floats
    limit: float = _LIMIT  # of a sum of two products

    @classmethod
    def of_any_input(cls, layer: LinearLayer) -> PairMaxima:
        """Those of any activations: what fits with them is proved to fit."""
        columns = np.full((layer.groups, layer.columns), float(_MOST))
        pairs = np.full((layer.groups, layer.columns // 2), 2.0 * _MOST)
        return cls(layer=layer, columns=columns, pairs=pairs)

    def sums(self, matrix: _Floats) -> _Floats:
        """A bound of each sum of two products (group, output, pair) with weights (group, output, column)."""
        first, second = _neighbours(matrix)
        one, other = np.abs(first), np.abs(second)
        both, larger = np.minimum(one, other), np.maximum(one, other)
        columns = np.where(one > other, *_neighbours(self.columns[:, None]))
        found = both * self.pairs[:, None] + (larger - both) * columns
        return np.where(np.sign(first) == np.sign(second), found, 0.0)

    def scale(self, weight: Array, reduced: QuantParams) -> npt.NDArray[np.float32]:
        """The smallest scales, in the shape of those of 7 bits, with which no sum overflows."""
        matrix = self.layer.matrix(weight).astype(np.float64)
        wanted = np.abs(matrix).max(axis=-1) / _LARGEST
        if not self.layer.is_depthwise:
            # rounding adds at most a half to each of two neighbours
            rest = self.limit - self.pairs.max(initial=0.0) / 2
            wanted = np.maximum(wanted, self.sums(matrix).max(axis=-1, initial=0.0) / rest)
        if reduced.scale.size == wanted.size:
            scale = wanted.reshape(reduced.scale.shape)
        elif reduced.scale.size == len(wanted):  # one scale for each direction of an LSTM
            scale = wanted.max(axis=-1).reshape(reduced.scale.shape)
        else:
            scale = np.full(reduced.scale.shape, wanted.max(initial=0.0))
        least = reduced.scale * (_REDUCED / _LARGEST)
        return np.asarray(np.minimum(reduced.scale, np.maximum(scale, least)), np.float32)

    def overflowing(self, integers: Array) -> npt.NDArray[np.bool_]:
        """Whether some sum of two products of each output (group, output) can overflow."""
        matrix = self.layer.matrix(integers).astype(np.float64)
        if self.layer.is_depthwise:
            return np.zeros(matrix.shape[:2], np.bool_)
        return np.asarray(self.sums(matrix).max(axis=-1, initial=0.0) > self.limit)


class InputMaxima(NamedTuple):
    """The largest values of a layer's input, by run of a kernel, which may find a range of its own.

    ``values`` are of channels (run, group, channel), ``sums`` of neighbours (run, group, pair); ``lows`` are the
    smallest values of each run. Zero, which pads, is among them.
    """

    values: _Floats
    sums: _Floats
    lows: _Floats

    @classmethod
    def of(cls, rows: _Floats) -> InputMaxima:
        """The maxima of the rows (row, group, channel) of one run."""
        return cls(
            values=rows.max(axis=0, initial=0.0)[None],
            sums=np.add(*_neighbours(rows)).max(axis=0, initial=0.0)[None],
            lows=rows.min(initial=0.0)[None].astype(np.float64),
        )

    def quantized(self, params: Iterable[QuantParams]) -> tuple[_Floats, _Floats]:
        """The largest integers of channels and of pairs, with any of these parameters, or with ranges of a run."""
        highs = self.values.max(axis=(1, 2), initial=0.0).astype(np.float64)
        scales = np.where(highs > self.lows, (highs - self.lows) / _MOST, 1.0)
        numbers = [(scales, np.rint(-self.lows / scales))]
        # int8 activations are read as uint8
        numbers += [
            (np.array(float(each.scale)), np.array(float(each.zero_point) - each.format.low))
            for each in params
        ]
        found = []
        for both in numbers:
            scale, zero_point = (one.astype(np.float32).reshape(-1, 1, 1) for one in both)
            columns = np.clip(np.rint(self.values / scale) + zero_point, 0, _MOST)
            first, second = _neighbours(columns)
            # rounding adds at most a half to each of two
            pairs = np.floor(self.sums / scale + 2 * zero_point + 1)
            pairs = np.clip(pairs, np.maximum(first, second), first + second)
            found.append((columns.max(axis=0), pairs.max(axis=0)))
        columns, pairs = (np.max(kind, axis=0) for kind in zip(*found, strict=True))
        return columns, pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumLimit:
    """The limits of a layer's weights by the largest inputs on calibration data, or by a proof without ``inputs``.

    ``formats`` are those that its input may be quantized in with known scales. A sum on other data may be larger by the
    share ``margin``: more of it protects from rarer inputs, less of it leaves smaller steps to the weights.
    """

    layer: LinearLayer
    inputs: InputMaxima | None
    formats: tuple[str, ...] = ()
    margin: float = 0.1

    @property
    def source(self) -> str:
        """The tensor that the layer reads."""
        return self.layer.source

    def maxima(self, params: Iterable[QuantParams]) -> PairMaxima:
        """The largest inputs of the layer's columns if its input is quantized by any of these, or at run time."""
        if self.inputs is None:
            return PairMaxima.of_any_input(self.layer)
        columns, pairs = self.inputs.quantized(params)
        groups, channels = self.layer.groups, columns.shape[-1]
        positions = self.layer.columns // channels
        repeated = np.tile(np.broadcast_to(columns, (groups, channels)), (1, positions))
        if channels % 2 == 0:
            neighbours = np.tile(np.broadcast_to(pairs, (groups, channels // 2)), (1, positions))
        else:  # neighbours may belong to two kernel positions
            neighbours = np.add(*_neighbours(repeated))
        limit = _LIMIT / (1 + self.margin)
        return PairMaxima(layer=self.layer, columns=repeated, pairs=neighbours, limit=limit)

    def scale(
        self, weight: Array, reduced: QuantParams, params: Iterable[QuantParams]
    ) -> npt.NDArray[np.float32]:
        """The smallest scales with which all sums fit, in the shape of those of 7 bits."""
        proved = PairMaxima.of_any_input(self.layer).scale(weight, reduced)
        return np.minimum(proved, self.maxima(params).scale(weight, reduced))


def observed_limits(
    model: Model,
    sites: Sequence[Site],
    feeds: Iterable[Feed],
    observe: Observe,
    formats: Mapping[str, Collection[str]],
) -> dict[str, SumLimit]:
    """The limits of the int8 weights among these sites, by weight, for the inputs in a run on each of the feeds.

    Weights whose inputs are not observed are limited by a proof. ``formats`` are those that a tensor may have.
    """
    layers = find_layers(model, sites)
    sources = list(dict.fromkeys(layer.source for layer in layers.values() if layer.source))
    runs: dict[str, list[InputMaxima]] = {weight: [] for weight in layers}
    lost: set[str] = set()
    for values in observe(sources, feeds) if sources else ():
        for weight, layer in layers.items():
            value = values.get(layer.source)
            if value is not None and value.size:
                parts: list[_Floats] = []  # inputs that a run of a kernel quantizes together
                if layer.node.op_type == "LSTM" and layer.source == layer.node.outputs[0]:
                    # Hidden states (step, direction, batch, state): each step is a run.
                    if value.ndim == 4 and value.shape[1] == layer.groups:
                        parts = list(value.astype(np.float32).transpose(0, 2, 1, 3))
                elif (rows := layer.rows(value)) is not None:
                    parts = [rows]
                if not parts or not np.isfinite(value).all():
                    lost.add(weight)
                else:
                    runs[weight] += map(InputMaxima.of, parts)
    return {
        weight: SumLimit(
            layer=layer,
            inputs=InputMaxima(*map(np.concatenate, zip(*runs[weight], strict=True)))
            if runs[weight] and weight not in lost
            else None,
            formats=tuple(sorted(formats.get(layer.source, ()))),
        )
        for weight, layer in layers.items()
    }


def find_sum_limits(
    model: Model,
    space: SchemeSpace,
    observe: Observe,
    data: Dataset | None,
    note: Callable[[str], None],
    samples: int = 16,
) -> dict[str, SumLimit]:
    """The limits of a model's int8 weights on data, or by a proof.

    More ``samples`` show rarer sums, and take the time of a run each.
    """
    formats: dict[str, set[str]] = {}
    for unit in space.units:
        own = {name for form in unit.forms if (name := form.choice.activation) in ("int8", "uint8")}
        for tensor, _ in unit.edges:
            formats.setdefault(tensor, set()).update(own)
    step = max(1, (0 if data is None else len(data)) // samples)
    sites, feeds = _int8_weights(space), islice(data or (), 0, step * samples, step)
    try:
        return observed_limits(model, sites, feeds, observe, formats)
    except BackendError as error:
        note(f"8-bit weights are used only where they are proved not to overflow: {error.what}")
        return observed_limits(model, sites, (), observe, formats)


def _int8_weights(space: SchemeSpace) -> list[Site]:
    forms = (form for unit in space.units for form in unit.forms)
    return [site for form in forms for site in form.constants if site.format == "int8"]


def note_wide_weights(numbers: Quantizer, space: SchemeSpace, note: Callable[[str], None]) -> None:
    """Note the weights that have more than 7 bits by calibration data, and not by a proof."""
    known = cast("Mapping[str, SumLimit]", numbers.sum_limits)  # those of `find_sum_limits`
    sites = {site.tensor: site for site in _int8_weights(space) if site.tensor in known}
    wide = sum(
        bool(PairMaxima.of_any_input(known[name].layer).overflowing(numbers.integer_weight(site)).any())
        for name, site in sites.items()
    )
    if wide:
        margin = max(limit.margin for limit in known.values())
        note(
            f"{count_text(wide, 'int8 weight')} could overflow on this processor, whose sums of two 8-bit products "
            f"saturate, and {'has' if wide == 1 else 'have'} more than 7 bits: no sum overflows on calibration "
            f"data, with a margin of {margin:.0%}. Inputs that are larger than these may saturate"
        )


def without_overflows(
    weights: Mapping[WeightKey, np.ndarray], numbers: Quantizer, note: Callable[[str], None]
) -> dict[WeightKey, np.ndarray]:
    """The scales of int8 weights, with those of ``numbers`` for channels that can overflow, where sums saturate.

    Weights of which no channel keeps its scale are left out. All that change are noted.
    """
    kept, changed = dict[WeightKey, np.ndarray](), 0
    for key, own in weights.items():
        tensor, name, axis = key
        ends = tuple(numbers.model.consumers.get(tensor, ()))
        site = Site(tensor=tensor, consumers=ends, format=name, axis=axis, weight=True)
        layer = find_layers(numbers.model, [site]).get(tensor) if name == "int8" else None
        if layer is None:  # all can overflow if the layout of the kernel is unknown
            wrong = np.full(own.shape, name == "int8")
        else:
            bound = numbers.sum_bound(site) or PairMaxima.of_any_input(layer)
            weight = numbers.model.array(tensor).astype(np.float32)
            wrong = bound.overflowing(replace(numbers.params(site), scale=own).quantize(weight))
            wrong = wrong.reshape(own.shape) if wrong.size == own.size else np.full(own.shape, wrong.any())
        changed += bool(wrong.any())
        if not wrong.all():
            kept[key] = np.where(wrong, numbers.params(site).scale, own)
    if changed:
        note(
            f"{count_text(changed, 'weight')} would overflow on this processor, whose sums of 8-bit products saturate, "
            "with the scales of the quantized model that the search starts from; channels that would get larger steps"
        )
    return kept
