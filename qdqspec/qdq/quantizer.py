"""Quantization parameters of every Q/DQ site of a model, and corrections that replace those of calibration."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array
from qdqspec.errors import ModelError, PlacementError
from qdqspec.graph import Model
from qdqspec.qdq.formats import BIAS_FORMAT, QuantParams, number_format
from qdqspec.qdq.ranges import Saturation, TensorRange
from qdqspec.qdq.scales import (
    activation_params,
    bias_params,
    dynamic_params,
    in_type_of,
    quantize,
    run_time_params,
    weight_params,
)
from qdqspec.types import Consumer, PlacedPair, Placement, Site

WeightKey: TypeAlias = tuple[str, str, int | None]  # tensor, number format, axis of the scales

MOST_STEPS = 127  # by which an integer of a weight may differ from the nearest one: a scheme stores a byte


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrections:
    """Ranges of activations by tensor, and scales of weights, that replace those of calibration.

    ``biases`` are added to the biases of the layers whose weights are quantized, one number for each output channel.
    """

    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    weights: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)
    biases: Mapping[WeightKey, npt.NDArray[np.float32]] = field(default_factory=dict)


def weight_key(site: Site) -> WeightKey:
    """The key of a weight's numbers, which do not depend on its consumers."""
    return site.tensor, site.format, site.axis


class SumLimit(Protocol):
    """Limits the scale of an int8 weight by the inputs of its layer: see `qdqspec.accuracy.corrections.overflow`."""

    @property
    def source(self) -> str:
        """The tensor that the layer reads."""
        ...

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the tensor may be quantized in."""
        ...

    def maxima(self, params: Iterable[QuantParams]) -> Any:
        """The largest inputs of the layer with any of these parameters."""
        ...

    def scale(
        self, weight: Array, reduced: QuantParams, params: Iterable[QuantParams]
    ) -> npt.NDArray[np.float32]:
        """The smallest scale with which no sum of two products overflows."""
        ...


_Key = tuple[str, str, int | None, bool, tuple[Consumer, ...]]


@dataclass
class Quantizer:
    """Gives scale and zero point of a site, which are cached, and the integers of a weight, which are not.

    Format and axis are those of the site. ``ranges`` are those of calibration, already tied (`tie_ranges`).
    ``corrections`` replace them, and scales of weights. No range exceeds the ``saturations``.
    ``reduce_range`` uses 7 bits of an 8-bit weight, or up to 8 as its ``sum_limits`` allow, by tensor;
    ``symmetric_activations`` places the zero point of unsigned activations with values of both signs in the middle.
    ``biases`` maps the consumer of an int32 bias to the sites of the activation and weight of its product.
    """

    model: Model
    ranges: Mapping[str, TensorRange]
    reduce_range: bool = False
    symmetric_activations: bool = False
    biases: Mapping[Consumer, tuple[Site, Site]] = field(default_factory=dict)
    corrections: Corrections = field(default_factory=Corrections)
    saturations: Mapping[str, Saturation] = field(default_factory=dict)
    sum_limits: Mapping[str, SumLimit] = field(default_factory=dict)
    _params: dict[_Key, QuantParams] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._ranges = {**self.ranges, **self.corrections.ranges}
        for tensor, saturation in self.saturations.items():
            self._ranges[tensor] = saturation.within(self._ranges[tensor])

    def params(self, site: Site) -> QuantParams:
        """Scale and zero point of the site.

        Raises `PlacementError` for an activation that was not calibrated or a weight that is not a constant,
        `ModelError` for a weight that holds NaN or infinity.
        """
        # Sites of one tensor with other consumers share their numbers, except for biases.
        ends = site.consumers if site.format == BIAS_FORMAT else ()
        key = site.tensor, site.format, site.axis, site.weight, ends
        if key not in self._params:
            params = self._of_weight(site) if site.weight else self._of_activation(site)
            self._params[key] = in_type_of(params, self.model.elem_type(site.tensor))
        return self._params[key]

    def integer_weight(self, site: Site) -> Array:
        """The weight's integers, in the shape of the weight. Not cached: the caller stores them."""
        return quantize(self._floats(site), self.params(site))

    def bias_shift(self, site: Site) -> npt.NDArray[np.float32] | None:
        """The shift of the bias of the layer that reads this weight; ``None`` if its bias is unchanged."""
        return self.corrections.biases.get(weight_key(site)) if site.weight else None

    def corrected(self, corrections: Corrections) -> Quantizer:
        """A quantizer with these corrections instead of the present ones."""
        return replace(self, corrections=corrections)

    def placed(self, placement: Placement) -> tuple[PlacedPair, ...]:
        """The sites of a placement with their numbers, by tensor name and consumers."""
        sites = sorted(placement.sites, key=lambda site: (site.tensor, site.consumers))
        return tuple(
            placed_pair(site, self.params(site), bias=shift_text(self.bias_shift(site))) for site in sites
        )

    def _of_activation(self, site: Site) -> QuantParams:
        fmt = number_format(site.format)
        if fmt.at_run_time:
            return run_time_params(fmt)
        if site.tensor not in self._ranges:
            raise PlacementError(
                f"tensor '{site.tensor}' has no calibrated range, so it cannot be quantized",
                where=self.model.where,
                cure="calibrate it, or take the site out of the placement",
            )
        if fmt.dynamic:
            return dynamic_params(self._ranges[site.tensor], fmt, site.axis)
        return activation_params(self._ranges[site.tensor], fmt, symmetric=self.symmetric_activations)

    def _of_weight(self, site: Site) -> QuantParams:
        fmt = number_format(site.format)
        if site.format == BIAS_FORMAT:
            if site.consumers[0] not in self.biases:
                raise PlacementError(
                    f"'{site.tensor}' is placed as a bias of a product that is not quantized",
                    where=self.model.where,
                    cure="take the site out of the placement",
                )
            activation, weight = self.biases[site.consumers[0]]
            return bias_params(self.params(activation), self.params(weight), fmt, site.axis or 0)
        params = weight_params(self._floats(site), fmt, site.axis, reduce_range=self.reduce_range)
        own = self.corrections.weights.get(weight_key(site))
        if own is not None:
            return replace(params, scale=own)
        limit = self._sum_limit(site)
        if limit is None:
            return params
        return replace(params, scale=limit.scale(self._floats(site), params, self._inputs_of(limit)))

    def sum_bound(self, site: Site) -> Any:
        """The largest inputs of the layer that reads an int8 weight, on calibration data; ``None`` if not limited."""
        limit = self._sum_limit(site)
        return None if limit is None else limit.maxima(self._inputs_of(limit))

    def _sum_limit(self, site: Site) -> SumLimit | None:
        return self.sum_limits.get(site.tensor) if self.reduce_range and site.format == "int8" else None

    def _inputs_of(self, limit: SumLimit) -> list[QuantParams]:
        """The parameters of a layer's input in each of its formats."""
        span, middle = self._ranges.get(limit.source), self.symmetric_activations
        if span is None:
            return []
        return [activation_params(span, number_format(name), symmetric=middle) for name in limit.formats]

    def _floats(self, site: Site) -> npt.NDArray[np.floating]:
        if site.tensor not in self.model.constants:
            raise PlacementError(
                f"'{site.tensor}' is placed as a weight but is no constant of the model",
                where=self.model.where,
                cure="place it as an activation",
            )
        values = self.model.array(site.tensor).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ModelError(
                f"weight '{site.tensor}' holds NaN or infinite values",
                where=self.model.where,
                cure="export the model again; such a weight cannot be quantized",
            )
        return values


def placed_pair(site: Site, params: QuantParams, *, bias: str = "", stored: bool = True) -> PlacedPair:
    """A site with its numbers as a scheme has them; `qdqspec.qdq.scheme_file.params_of` is the inverse."""
    return PlacedPair(
        site=site,
        scale=tuple(params.scale.reshape(-1).tolist()),
        zero_point=tuple(params.zero_point.astype(np.int64).reshape(-1).tolist()),
        stored=stored,
        outer=None if params.outer is None else float(params.outer),
        bias=bias,
    )


# ---- corrections as text ----------------------------------------------------------------------------


def shift_text(shift: npt.NDArray[np.float32] | None) -> str:
    """The shift of a bias as text; empty if there is none."""
    return "" if shift is None else packed(shift.astype("<f4"))


def packed(values: Array) -> str:
    """The values as text: bytes in the order of memory, compressed with zlib, in base64."""
    return base64.b64encode(zlib.compress(values.tobytes())).decode("ascii")


def unpacked(text: str, dtype: np.dtype[np.generic], size: int) -> Array:
    """The ``size`` values of a text of `packed`; raises `ValueError` if it is damaged or holds another number."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), size * dtype.itemsize + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size * dtype.itemsize or not unpacker.eof:
        raise ValueError(f"the text does not hold {size} values")
    return np.frombuffer(data, dtype)
