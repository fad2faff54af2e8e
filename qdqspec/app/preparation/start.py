"""What a search starts from: float form, placements and scales of quantized models, and earlier searches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec._core.units import count_text, names_text
from qdqspec.errors import ConfigError, StateError
from qdqspec.graph import Model, OwnCopy, is_quantized, load_model
from qdqspec.graph.trt import is_pair_op
from qdqspec.qdq import (
    BIAS_FORMAT,
    PASSED_OVER,
    Imported,
    Matcher,
    PatternCache,
    TensorRange,
    WeightKey,
    dequantize,
    import_placement,
    number_format,
    params_of,
    placement_for,
    project,
    quantize,
    read_scheme,
    strip_qdq,
    weight_key,
    weight_params,
)
from qdqspec.search import read_journal
from qdqspec.types import PlacedPair, Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared


class FloatForm(OwnCopy):
    """A copy of a ``quantized`` model without its pairs, which are ``imported`` with their numbers."""

    def __init__(self, quantized: Model, imported: Imported) -> None:
        self.quantized = quantized
        self.imported = imported
        count = count_text(len(imported.placement.sites), "tensor")
        note = (
            f"the model is given quantized ({count}): the reference is its float form, a copy without Q/DQ, and the "
            "model as given is a candidate; if you have the original float model, tune that with --start-from this one"
        )
        super().__init__(
            quantized,
            strip_qdq(quantized).proto,
            sha256=hashlib.sha256(f"{quantized.sha256} float form".encode()).hexdigest(),
            fixed=quantized.fixed,
            notes=[note, *imported.notes],
        )


def with_float_form(model: Model) -> Model:
    """The model, or its float form if it has pairs that a placement expresses."""
    if not (is_quantized(model) or any(is_pair_op(node.proto) for node in model.nodes)):
        return model
    imported = import_placement(model)
    return FloatForm(model, imported) if imported.placement.sites else model


def float_form_of(model: Model) -> FloatForm | None:
    """The float form that a model is, or a copy of; ``None`` for a model that was given in float."""
    while not isinstance(model, FloatForm):
        if not isinstance(model, OwnCopy):
            return None
        model = model.origin
    return model


def warm_starts(prepared: Prepared) -> tuple[Placement, ...]:
    """The placements of this model in the files of ``tune.start_from``, each once; a file without one is noted.

    Raises for a file that is damaged or of another backend.
    """
    found: dict[str, Placement] = {}
    for path in prepared.case.tune.start_from:
        starts = list(_placements_in(path, prepared))
        if not starts:
            prepared.note_once(f"{path.name} contains no placement for this model")
        found |= {placement.digest: placement for placement in starts}
    return tuple(found.values())


def _placements_in(path: Path, prepared: Prepared, most: int = 2) -> Iterable[Placement]:
    """The parts of the placements in a file that the space has; other pairs, except biases, are noted.

    Placements without such a part are left out. Of a journal the ``most`` best placements, confirmed or else raced:
    each costs a build.
    """
    space, backend = prepared.space, prepared.backend.target
    match path.suffix.lower():
        case ".yaml" | ".yml":
            try:
                return PatternCache.read(path).warm_starts(space, backend, prepared.device.key)
            except StateError as error:
                raise StateError(error.what, where=error.where or path, cure=error.cure) from None
        case ".json":
            scheme = read_scheme(path)
            _require_backend("scheme", scheme.backend, path, backend)
            placements: Iterable[Placement] = [scheme.placement]
        case ".jsonl":
            header, trials = read_journal(path)
            _require_backend("journal", str(header.get("backend")), path, backend)
            confirmed = [trial for trial in trials if trial.phase == "confirm" and trial.ok]
            raced = confirmed or [trial for trial in trials if trial.incumbent]
            ranked = sorted(raced, key=lambda trial: (trial.ratio or 1.0, trial.number))
            placements = islice(dict.fromkeys(trial.placement for trial in ranked), most)
        case ".onnx":
            found, notes = placement_for(space.model, load_model(path))
            for line in notes:
                prepared.note_once(f"{path.name}: {line}")
            placements = [found]
        case _:
            raise ConfigError(
                "tune.start_from takes pattern caches (.yaml), journals (.jsonl), schemes (.json) and Q/DQ models "
                "(.onnx)",
                where=path,
                cure="name a file that a tuning run has left, or a quantized model",
            )
    starts = []
    for placement in placements:
        own = project(space, placement)
        covered = {end for site in own.sites for end in site.consumers}
        others = (site for site in placement.ordered if site.format != BIAS_FORMAT)
        lost = dict.fromkeys(site.tensor for site in others if not covered.issuperset(site.consumers))
        if own.sites:
            starts.append(own)
        if own.sites and lost:
            why = "the search has no labels with these pairs, so that the candidate is without them"
            prepared.note_once(f"{path.name}: {names_text(lost)}: {why}")
    return starts


def _require_backend(what: str, backend: str, path: Path, here: str) -> None:
    if backend != here:
        raise StateError(
            f"the {what} was made on {backend}, not on {here}: speed differs between backends",
            where=path,
            cure=f"start from a {path.name} that a run on {here} has left",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScales:
    """Ranges of activations and scales of weights, read from quantized models."""

    ranges: dict[str, TensorRange] = field(default_factory=dict)
    weights: dict[WeightKey, np.ndarray] = field(default_factory=dict)

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors that have a range or a scale."""
        return frozenset((*self.ranges, *(tensor for tensor, _, _ in self.weights)))

    def add_range(self, tensor: str, pair: PlacedPair, earlier: Collection[str]) -> None:
        """Keep the range and numbers of a pair, of further formats the numbers; not of ``earlier`` tensors."""
        fmt, scale, zero_point = number_format(pair.site.format), pair.scale[0], pair.zero_point[0]
        low, high = ((end - zero_point) * scale for end in (fmt.low, fmt.high))
        span = self.ranges.get(tensor, TensorRange(low, high))
        if tensor not in earlier and fmt.name not in (name for name, _, _ in span.kept):
            self.ranges[tensor] = replace(span, kept=(*span.kept, (fmt.name, scale, zero_point)))


def kept_scales(model: Model, paths: Iterable[Path], note: Callable[[str], None]) -> KeptScales:
    """The scales that quantized models among these files have for tensors of ``model``; the first file wins.

    Of pairs with constant scales, integer formats and, for weights, zero points in the middle. Zero points are kept
    with the scales of activations. Scales of weights that differ from the model's, as where a BatchNormalization is
    folded in one of both only, are not kept, and noted; nor are those of activations that another operator makes.
    """
    kept = KeptScales()
    for path in (path for path in paths if path.suffix.lower() == ".onnx"):
        before, others, scaled, earlier = len(kept.tensors), 0, 0, frozenset(kept.ranges)
        imported = import_placement(load_model(path), model, rounded_only=True)
        if imported.equalized:
            note(f"{path.name}: its scales are those of equalized channels, and are not kept")
            continue
        matcher = Matcher(model, imported.positions)
        for pair in imported.pairs:
            fmt = number_format(pair.site.format)
            has_numbers = not (fmt.floating or fmt.block or fmt.at_run_time or fmt.name == BIAS_FORMAT)
            if not has_numbers or (pair.site.weight and set(pair.zero_point) != {fmt.middle}):
                continue
            for site in matcher.find(pair.site)[0]:
                if not site.weight and _find_maker(model, site.tensor) != _find_maker(
                    imported.model, pair.site.tensor
                ):
                    scaled += 1
                elif not site.weight:
                    kept.add_range(site.tensor, pair, earlier)
                elif not _fits_weight(model.array(site.tensor), imported.model.array(pair.site.tensor), pair):
                    others += 1
                else:
                    scales = np.array(pair.scale, np.float32).reshape(() if pair.site.axis is None else (-1,))
                    kept.weights.setdefault(weight_key(site), scales)
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
        if scaled:
            note(
                f"{path.name}: the scales of {count_text(scaled, 'activation')} are not kept: another operator makes "
                "them there, as where a tool scaled them before quantizing"
            )
    return kept


def _find_maker(model: Model, tensor: str) -> str:
    """The operator that makes a tensor, before those that tools remove and insert; empty for an input."""
    node = model.producer.get(tensor)
    while node is not None and node.op_type in PASSED_OVER and node.inputs:
        node = model.producer.get(node.inputs[0])
    return "" if node is None else node.op_type


def _fits_weight(mine: Array, its: Array, pair: PlacedPair) -> bool:
    """Whether the scales of a pair on the weight ``its`` are for ``mine`` too.

    The two differ by a quantization error at most: the power of the difference is below a tenth. And few values are
    clipped: the noise is not far above that of scales that clip none. It is 4 times as high with a bit less, or with
    the next power of two.
    """
    if mine.shape != its.shape:
        return False
    one, other = mine.astype(np.float32), its.astype(np.float32)
    if np.square(one - other).sum(dtype=np.float64) > 0.1 * np.square(one).sum(dtype=np.float64):
        return False
    own = weight_params(one, number_format(pair.site.format), pair.site.axis)
    kept, least = (
        np.square(dequantize(quantize(one, params), params) - one).sum(dtype=np.float64)
        for params in (params_of(pair, one.shape), own)
    )
    return bool(kept <= 20 * least or kept <= 1e-6 * np.square(one).sum(dtype=np.float64))
