"""The start of a search: placements of earlier searches, and scales of quantized models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qdqspec.corrections.overflow import layers_of, overflowing_outputs
from qdqspec.errors import ConfigError, StateError
from qdqspec.graph.model import Model, load_model
from qdqspec.measurement.journal import read_journal
from qdqspec.placement.edit.equalize import EQUALIZED
from qdqspec.placement.read.import_qdq import Imported, import_placement, placement_for
from qdqspec.placement.read.recognize import along
from qdqspec.placement.scheme.cache import read_cache
from qdqspec.placement.scheme.cache import warm_starts as cached_starts
from qdqspec.placement.scheme.match import Matcher
from qdqspec.placement.scheme.scheme_file import read_scheme
from qdqspec.placement.space.search_space import SchemeSpace, project
from qdqspec.quantize.corrections import WeightKey, WeightNumbers, weight_key
from qdqspec.quantize.formats import BIAS_FORMAT, number_format
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import PlacedPair, Placement, Site
from qdqspec.units import count_text

MOST = 2  # placements taken from a journal; each costs the next search a build


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The target of a warm start: a space, and the backend and device that its placements are measured on."""

    space: SchemeSpace
    backend: str
    device: str
    note: Callable[[str], None]


def warm_starts(paths: Iterable[Path], start: Start) -> tuple[Placement, ...]:
    """The placements in the files, each once. Raises for a file that is damaged or of another backend.

    Each is a placement of this model that the backend supports. It is a candidate like any other: a poor one costs one
    build. A file without a placement for this model is noted.
    """
    found: dict[str, Placement] = {}
    for path in paths:
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise ConfigError(
                "tune.start_from takes pattern caches (.yaml), journals (.jsonl), schemes (.json) and Q/DQ models "
                "(.onnx)",
                where=path,
                cure="name a file that a tuning run has left, or a quantized model",
            )
        starts = list(reader(path, start))
        if not starts:
            start.note(f"{path.name} contains no placement for this model")
        found |= {placement.digest: placement for placement in starts}
    return tuple(found.values())


def _of_cache(path: Path, start: Start) -> Iterable[Placement]:
    try:
        return cached_starts(read_cache(path), start.space.regions, start.space, start.backend, start.device)
    except StateError as error:
        raise StateError(error.what, where=error.where or path, cure=error.cure) from None


def _of_scheme(path: Path, start: Start) -> Iterable[Placement]:
    known = read_scheme(path)
    _require_backend("scheme", known.backend, path, start)
    return _projected([known.placement], start.space)


def _of_journal(path: Path, start: Start) -> Iterable[Placement]:
    """The best placements of an earlier search: by confirmation, or by races if it was interrupted."""
    header, trials = read_journal(path)
    _require_backend("journal", str(header.get("backend")), path, start)
    confirmed = [trial for trial in trials if trial.phase == "confirm" and trial.ok]
    ranked = sorted(confirmed or (t for t in trials if t.incumbent), key=lambda t: (t.ratio or 1.0, t.number))
    placements = dict.fromkeys(trial.placement for trial in ranked)
    return _projected(list(placements)[:MOST], start.space)


def _projected(placements: Iterable[Placement], space: SchemeSpace) -> list[Placement]:
    """The parts of placements that a space has; placements without such a part are left out."""
    return [fitted for placement in placements if (fitted := project(space, placement)).sites]


def _require_backend(what: str, backend: str, path: Path, start: Start) -> None:
    if backend != start.backend:
        raise StateError(
            f"the {what} was made on {backend}, not on {start.backend}: speed differs between backends",
            where=path,
            cure=f"start from a {path.name} that a run on {start.backend} has left",
        )


def _of_model(path: Path, start: Start) -> Iterable[Placement]:
    fitted = placement_for(start.space.model, load_model(path))
    for line in fitted.notes:
        start.note(f"{path.name}: {line}")
    return _projected([fitted.placement], start.space)


_READERS: Mapping[str, Callable[[Path, Start], Iterable[Placement]]] = {
    ".yaml": _of_cache,
    ".yml": _of_cache,
    ".json": _of_scheme,
    ".jsonl": _of_journal,
    ".onnx": _of_model,
}


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
                kept.ranges.setdefault(site.tensor, _range(pair))
            elif not _is_same_weight(model.array(site.tensor), imported.model.array(pair.site.tensor)):
                others += 1
            else:
                kept.weights.setdefault(weight_key(site), WeightNumbers(scale=_scale(pair)))
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


def _range(pair: PlacedPair) -> TensorRange:
    """The range that an activation's format represents with its scale and zero point."""
    fmt, scale, zero_point = number_format(pair.site.format), pair.scale[0], pair.zero_point[0]
    return TensorRange((fmt.low - zero_point) * scale, (fmt.high - zero_point) * scale)


def _scale(pair: PlacedPair) -> np.ndarray:
    return np.array(pair.scale, np.float32).reshape(() if pair.site.axis is None else (-1,))


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
    layer = layers_of(numbers.model, [site]).get(site.tensor)
    if layer is None:
        return np.ones(scale.shape, bool)
    step = along(scale, layer.shape, site.axis or 0, 0)
    integers = np.clip(np.rint(numbers.model.array(site.tensor).astype(np.float32) / step), -128, 127)
    found = overflowing_outputs(layer, integers, numbers.sum_bound(site))
    return found.reshape(scale.shape) if found.size == scale.size else np.full(scale.shape, found.any())
