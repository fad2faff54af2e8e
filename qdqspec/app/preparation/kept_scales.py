"""The scales of quantized models that a search keeps for its own model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qdqspec._core.units import count_text
from qdqspec.accuracy.corrections.layers import find_layers
from qdqspec.accuracy.corrections.overflow import PairMaxima
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.edit.equalize import EQUALIZED
from qdqspec.qdq.quantize.corrections import WeightKey, WeightNumbers, weight_key
from qdqspec.qdq.quantize.formats import BIAS_FORMAT, number_format
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.qdq.read.import_qdq import Imported, import_placement
from qdqspec.qdq.read.recognize import along
from qdqspec.qdq.scheme.match import Matcher
from qdqspec.types import PlacedPair, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScales:
    """Ranges of activations and scales of weights, read from quantized models."""

    ranges: dict[str, TensorRange] = field(default_factory=dict)
    weights: dict[WeightKey, WeightNumbers] = field(default_factory=dict)

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors that have a range or a scale."""
        return frozenset((*self.ranges, *(tensor for tensor, _, _ in self.weights)))


def kept_scales(model: Model, paths: Iterable[Path], note: Callable[[str], None]) -> KeptScales:
    """The scales that quantized models among these files have for tensors of ``model``; the first file wins.

    Zero points are kept with the scales of activations. Scales of weights that differ from the model's, as where a
    BatchNormalization is folded in one of both only, are not kept, and noted.
    """
    kept = KeptScales()
    for path in (path for path in paths if path.suffix.lower() == ".onnx"):
        before, others = len(kept.tensors), 0
        quantized = load_model(path)
        if any(prop.key == EQUALIZED for prop in quantized.flat.metadata_props):
            note(f"{path.name}: its scales are those of equalized channels, and are not kept")
            continue
        imported = import_placement(quantized, model)
        for site, pair in _fitted(model, imported):
            if not site.weight:
                fmt, scale, zero_point = number_format(pair.site.format), pair.scale[0], pair.zero_point[0]
                own = TensorRange((fmt.low - zero_point) * scale, (fmt.high - zero_point) * scale)
                kept.ranges.setdefault(site.tensor, own)
            elif not _is_same_weight(model.array(site.tensor), imported.model.array(pair.site.tensor)):
                others += 1
            else:
                scales = np.array(pair.scale, np.float32).reshape(() if pair.site.axis is None else (-1,))
                kept.weights.setdefault(weight_key(site), WeightNumbers(scale=scales))
        if new := len(kept.tensors) - before:
            note(
                f"{path.name}: the scales of {count_text(new, 'tensor')} are kept; "
                "with `quantize: {scales: recalibrate}` or --start-scales recalibrate, calibration data gives them"
            )
        if others:
            note(
                f"{path.name}: the scales of {count_text(others, 'weight')} are not kept: they are for other values, "
                "as where BatchNormalization was not folded before quantizing"
            )
    return kept


def _fitted(model: Model, imported: Imported) -> Iterator[tuple[Site, PlacedPair]]:
    """The pairs with integer formats and, for weights, symmetric scales, as sites of the model."""
    matcher = Matcher(model, imported.positions)
    for pair in imported.pairs:
        fmt = number_format(pair.site.format)
        usable = not fmt.floating and not fmt.block and fmt.name != BIAS_FORMAT
        if usable and not (pair.site.weight and set(pair.zero_point) != {fmt.middle}):
            for site in matcher.find(pair.site).sites:
                yield site, pair


def _is_same_weight(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two weights differ by a quantization error at most: the power of the difference is below a tenth."""
    if one.shape != other.shape:
        return False
    one, other = one.astype(np.float64), other.astype(np.float64)
    return bool(((one - other) ** 2).sum() <= 0.1 * (one**2).sum())


def without_overflows(
    weights: Mapping[WeightKey, WeightNumbers], numbers: Quantizer, note: Callable[[str], None]
) -> dict[WeightKey, WeightNumbers]:
    """The scales of int8 weights, with those of ``numbers`` for channels that can overflow, where sums saturate.

    Inputs are judged by `Quantizer.sum_bound`: by those on calibration data, if known. Weights of which no channel
    keeps its scale are left out. All that change are noted.
    """
    kept, changed = dict[WeightKey, WeightNumbers](), 0
    for key, own in weights.items():
        tensor, name, axis = key
        ends = tuple(numbers.model.consumers.get(tensor, ()))
        site = Site(tensor=tensor, consumers=ends, format=name, axis=axis, weight=True)
        wrong = _overflowing(numbers, site, own.scale)
        changed += bool(wrong.any())
        if not wrong.all():
            kept[key] = WeightNumbers(scale=np.where(wrong, numbers.params(site).scale, own.scale))
    if changed:
        note(
            f"{count_text(changed, 'weight')} would overflow on this processor, whose sums of 8-bit products saturate, "
            "with the scales of the quantized model that the search starts from; channels that would get larger steps"
        )
    return kept


def _overflowing(numbers: Quantizer, site: Site, scale: np.ndarray) -> np.ndarray:
    """The scales of an int8 weight with which it can overflow; all if the layout of the kernel is unknown."""
    if site.format != "int8":
        return np.zeros(scale.shape, bool)
    layer = find_layers(numbers.model, [site], recurrent=True).get(site.tensor)
    if layer is None:
        return np.ones(scale.shape, bool)
    step = along(scale, layer.shape, site.axis or 0, 0)
    integers = np.clip(np.rint(numbers.model.array(site.tensor).astype(np.float32) / step), -128, 127)
    found = (numbers.sum_bound(site) or PairMaxima.of_any_input(layer)).overflowing(integers)
    return found.reshape(scale.shape) if found.size == scale.size else np.full(scale.shape, found.any())
