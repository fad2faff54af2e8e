"""Scales of the quantized models that a search starts from, such as those of quantization-aware training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qdqspec.corrections.bits import overflows
from qdqspec.corrections.layers import find_layers
from qdqspec.graph.model import Model, load_model
from qdqspec.placement.import_qdq import import_placement
from qdqspec.placement.match import Matcher
from qdqspec.quantize.corrections import WeightKey, WeightNumbers, weight_key
from qdqspec.quantize.formats import BIAS_FORMAT, number_format
from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import PlacedPair, Site
from qdqspec.units import count_text

_SUFFIX = ".onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScales:
    """Ranges of activations and scales of weights, read from quantized models."""

    ranges: dict[str, TensorRange] = field(default_factory=dict)
    weights: dict[WeightKey, WeightNumbers] = field(default_factory=dict)

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors that have a range or a scale."""
        return frozenset((*self.ranges, *(tensor for tensor, _, _ in self.weights)))


def kept_scales(
    model: Model, paths: Iterable[Path], note: Callable[[str], None], *, saturates: bool
) -> KeptScales:
    """The scales that quantized models among these files have for tensors of ``model``; the first file wins.

    Zero points are kept with the scales of activations. Scales of int8 weights that could overflow where sums of two
    products saturate (``saturates``) are not kept, and noted.
    """
    kept = KeptScales()
    for path in (path for path in paths if path.suffix.lower() == _SUFFIX):
        before, refused = len(kept.tensors), 0
        for site, pair in _fitted(model, load_model(path)):
            if not site.weight:
                kept.ranges.setdefault(site.tensor, _range(pair))
            elif saturates and _can_overflow(model, site, _scale(pair)):
                refused += 1
            else:
                kept.weights.setdefault(weight_key(site), WeightNumbers(scale=_scale(pair)))
        note(
            f"{path.name}: the scales of {count_text(len(kept.tensors) - before, 'tensor')} are kept; "
            "`quantize: {scales: recalibrate}` computes them from calibration data instead"
        )
        if refused:
            note(
                f"{path.name}: {count_text(refused, 'weight')} would overflow with these scales on this processor, "
                "whose sums of 8-bit products saturate, and are quantized to 7 bits"
            )
    return kept


def _fitted(model: Model, quantized: Model) -> Iterator[tuple[Site, PlacedPair]]:
    """The pairs with integer formats and, for weights, zero point 0, as sites of the model."""
    imported = import_placement(quantized, model)
    matcher = Matcher(model, imported.positions)
    for pair in imported.pairs:
        fmt = number_format(pair.site.format)
        usable = not fmt.floating and not fmt.block and fmt.name != BIAS_FORMAT
        if usable and not (pair.site.weight and any(pair.zero_point)):
            for site in matcher.find(pair.site).sites:
                yield site, pair


def _range(pair: PlacedPair) -> TensorRange:
    """The range that an activation's format represents with its scale and zero point."""
    fmt, scale, zero_point = number_format(pair.site.format), pair.scale[0], pair.zero_point[0]
    return TensorRange((fmt.low - zero_point) * scale, (fmt.high - zero_point) * scale)


def _scale(pair: PlacedPair) -> np.ndarray:
    return np.array(pair.scale, np.float32).reshape(() if pair.site.axis is None else (-1,))


def _can_overflow(model: Model, site: Site, scale: np.ndarray) -> bool:
    """Whether int8 weights with this scale can overflow; also true if the layout of the kernel is unknown."""
    if site.format != "int8":
        return False
    layer = find_layers(model, [site]).get(site.tensor)
    if layer is None:
        return True
    along = [-1 if index == site.axis else 1 for index in range(len(layer.shape))]
    step = scale.reshape(along) if scale.ndim else scale
    integers = np.clip(np.rint(model.array(site.tensor).astype(np.float32) / step), -128, 127)
    return overflows(layer, integers)
