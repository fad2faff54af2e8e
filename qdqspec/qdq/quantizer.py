"""Scales and zero points from ranges and weights, and the numbers of each Q/DQ site of a model.

Corrections replace the numbers of calibration.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqspec._core.arrays import Array
from qdqspec.errors import ModelError, PlacementError
from qdqspec.graph import Model
from qdqspec.graph.trt import EXPONENTS
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.formats import BIAS_FORMAT, NumberFormat, QuantParams, number_format
from qdqspec.qdq.ranges import Saturation, TensorRange, saturations, tie_ranges
from qdqspec.types import Consumer, PlacedPair, Placement, Site

Scales = npt.NDArray[np.float32]

_SMALLEST = np.finfo(np.float32).smallest_normal  # kernels flush subnormal scales to zero
_SCALE_OF_ZERO = np.float32(2.0**-10)  # for a tensor of zeros, where any scale is exact
# A channel's scale is at least this share of the largest one's. Runtimes store a bias as int32 in steps of input scale
# times weight scale, which a channel of tiny weights makes overflow: with weights of 1e-9 beside weights of 1, ONNX
# Runtime 1.31 turned a bias of 0.3 into 0.
_LEAST_SHARE = 2.0**-16

REALS: dict[int, np.dtype[np.generic]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_FP8_HIGH, _FP8_LOW = 448.0, 2.0**-9  # the largest and smallest positive float8e4m3fn
_BYTES = (TensorProto.INT8, TensorProto.UINT8)


def run_time_params(fmt: NumberFormat) -> QuantParams:
    """The placeholder parameters of an activation whose scale and zero point are computed when the model runs."""
    return replace(_make_per_tensor(fmt, 1.0, 0), is_dynamic=True)


def dynamic_params(span: TensorRange, fmt: NumberFormat, axis: int | None) -> QuantParams:
    """The parameters known in advance of an activation that is quantized in blocks at run time.

    The outer scale of NVFP4 maps the largest value of ``span`` to the largest block scale; larger values are clipped.
    Source: NVIDIA Model-Optimizer, ``export_fp4`` (amax / 6 / 448).
    """
    outer = _make_usable(np.asarray(span.largest / fmt.high / _FP8_HIGH)) if fmt.two_level else None
    return replace(run_time_params(fmt), axis=axis, outer=outer)


def activation_params(span: TensorRange, fmt: NumberFormat, *, symmetric: bool = False) -> QuantParams:
    """Per-tensor scale and zero point that cover ``span``.

    Signed formats are symmetric with zero point 0. Unsigned ones are asymmetric, or, if ``symmetric`` is set and the
    data is signed, symmetric around the middle of the format (128 for uint8). Kept numbers are as they are, unless
    ``symmetric`` excludes their zero point.
    """
    middle = fmt.middle if symmetric and (fmt.signed or span.low < 0) else None
    for name, kept_scale, kept_zero in span.kept:
        if name == fmt.name and middle in (None, kept_zero):
            return _make_per_tensor(fmt, kept_scale, kept_zero)
    if fmt.signed:
        return _make_per_tensor(fmt, span.largest / fmt.high, 0)
    if symmetric and span.low < 0:
        return _make_per_tensor(fmt, span.largest / (fmt.middle - 1), fmt.middle)
    scale = _make_usable(np.asarray((span.high - span.low) / (fmt.high - fmt.low)))
    zero_point = np.clip(np.rint(fmt.low - span.low / float(scale)), fmt.low, fmt.high)
    return _make_per_tensor(fmt, float(scale), int(zero_point))


def weight_params(
    weight: npt.NDArray[np.floating], fmt: NumberFormat, axis: int | None, *, reduce_range: bool = False
) -> QuantParams:
    """Symmetric scales, zero point 0 (the middle for unsigned formats); per channel if ``axis`` is set.

    A blocked format has one scale per block along ``axis``; scales are stored as the format has them: as powers of two,
    or as 8-bit floats with one scale for all of them. ``reduce_range`` uses one bit less of an 8-bit integer
    format, for processors whose 8-bit products saturate; not of one in blocks, whose kernels do not.
    """
    axis = None if axis is None else axis % weight.ndim
    if axis is not None and fmt.block:
        starts = np.arange(0, weight.shape[axis], fmt.block)
        largest = np.maximum.reduceat(np.abs(weight), starts, axis=axis)
    else:
        others = None if axis is None else tuple(d for d in range(weight.ndim) if d != axis)
        largest = np.max(np.abs(weight), axis=others, initial=0.0)
    largest = np.asarray(largest, np.float64)
    steps = (fmt.high - fmt.low) // 2
    if reduce_range and fmt.elem_type in _BYTES and not fmt.block:
        steps //= 2
    scale = _make_usable(np.maximum(largest, largest.max(initial=0.0) * _LEAST_SHARE) / steps)
    outer = None
    if fmt.scale_type == TensorProto.FLOAT8E8M0:
        # Rounded up, so that no value of a block is clipped (the OCP specification rounds down and saturates).
        exponents = np.clip(np.ceil(np.log2(scale.astype(np.float64))), *EXPONENTS)
        scale = np.exp2(exponents).astype(np.float32)
    elif fmt.two_level:
        outer = _make_usable(np.asarray(scale.max(initial=0.0) / _FP8_HIGH))
        inside = np.clip(scale / outer, _FP8_LOW, _FP8_HIGH)  # none is rounded to zero
        scale = np.asarray(inside.astype(ml_dtypes.float8_e4m3fn), np.float32)
    zero_point = np.full(scale.shape, fmt.middle).astype(fmt.dtype)
    return QuantParams(fmt, scale, zero_point, axis, outer)


def in_type_of(params: QuantParams, elem_type: int | None) -> QuantParams:
    """The parameters with scales rounded to a tensor's element type.

    Q and DQ compute in the type of their scale, which is the model's own in float16 and bfloat16 models: quantization
    has to use the rounded scale. A scale that rounds to zero becomes the smallest positive number.
    """
    real = REALS.get(elem_type or 0)
    if real is None or real == np.float32:
        return params
    if params.outer is not None:
        return replace(params, outer=_round_scale(params.outer, real))
    return params if params.format.scale_type else replace(params, scale=_round_scale(params.scale, real))


def _round_scale(scale: Scales, real: np.dtype[np.generic]) -> Scales:
    limits = ml_dtypes.finfo(real)  # type: ignore[no-untyped-call]  # its stub leaves it so
    inside = np.clip(scale, float(limits.smallest_subnormal), float(limits.max))
    return np.asarray(inside.astype(real).astype(np.float32))


def bias_params(activation: QuantParams, weight: QuantParams, fmt: NumberFormat, axis: int) -> QuantParams:
    """Scale of a bias that is added to integer products: the product of the other two scales, zero point 0."""
    scale = np.asarray(activation.scale * weight.scale, dtype=np.float32)
    zero_point = np.zeros(scale.shape, dtype=fmt.dtype)
    return QuantParams(fmt, np.maximum(scale, _SMALLEST), zero_point, axis if scale.ndim else None)


def _make_per_tensor(fmt: NumberFormat, scale: float, zero_point: int) -> QuantParams:
    return QuantParams(fmt, _make_usable(np.asarray(scale)), np.asarray(zero_point, dtype=fmt.dtype))


def _make_usable(scale: npt.NDArray[np.floating]) -> Scales:
    """The scale as float32, never zero, subnormal or infinite."""
    clipped = np.clip(scale, _SMALLEST, np.finfo(np.float32).max).astype(np.float32)
    return np.where(np.asarray(scale) == 0, _SCALE_OF_ZERO, clipped)


# ---- the numbers of sites ----------------------------------------------------------------------------

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

    @classmethod
    def of_backend(
        cls,
        model: Model,
        ranges: Mapping[str, TensorRange],
        capabilities: Capabilities,
        *,
        biases: Mapping[Consumer, tuple[Site, Site]],
        kept: Collection[str],
        sum_limits: Mapping[str, SumLimit],
    ) -> Quantizer:
        """The numbers of a model on a backend, by ranges of calibration; no ends are cut of ``kept`` tensors."""
        tied = tie_ranges(model, ranges)
        return cls(
            model,
            tied,
            reduce_range=capabilities.reduce_range,
            symmetric_activations=capabilities.symmetric_activations,
            biases=biases,
            saturations=saturations(model, tied, kept),
            sum_limits=sum_limits,
        )

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
        floats = self._floats(site)
        return self.params(site).quantize(floats)

    def bias_shift(self, site: Site) -> npt.NDArray[np.float32] | None:
        """The shift of the bias of the layer that reads this weight; ``None`` if its bias is unchanged."""
        return self.corrections.biases.get(weight_key(site)) if site.weight else None

    def corrected(self, **changes: Mapping[Any, Any]) -> Quantizer:
        """A quantizer with these fields of `Corrections` instead of the present ones."""
        return replace(self, corrections=replace(self.corrections, **changes))

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
    """A site with its numbers as a scheme has them; `params_of` is the inverse."""
    return PlacedPair(
        site=site,
        scale=tuple(params.scale.reshape(-1).tolist()),
        zero_point=tuple(params.zero_point.astype(np.int64).reshape(-1).tolist()),
        stored=stored,
        outer=None if params.outer is None else float(params.outer),
        bias=bias,
    )


def params_of(pair: PlacedPair, shape: Sequence[int] = ()) -> QuantParams:
    """The numbers of a pair as arithmetic parameters; scales of blocks need the shape of the weight."""
    fmt, axis = number_format(pair.site.format), pair.site.axis
    along: tuple[int, ...] = () if axis is None else (-1,)
    is_dynamic = fmt.dynamic and not pair.site.weight
    if is_dynamic:
        along = ()
    elif fmt.block and axis is not None:
        along = tuple(-(-d // fmt.block) if i == axis else d for i, d in enumerate(shape))
    scale = np.array(pair.scale, np.float32).reshape(along)
    zero_point = np.array(pair.zero_point).astype(fmt.dtype).reshape(along)
    outer = None if pair.outer is None else np.asarray(pair.outer, np.float32)
    return QuantParams(fmt, scale, zero_point, axis, outer, is_dynamic)


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
