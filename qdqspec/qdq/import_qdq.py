"""Imports placements and scales from quantized models of other tools, of training, or made by hand.

Parts that a placement cannot express are noted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec._core.units import count_text, names_text
from qdqspec.graph import Model, load_model
from qdqspec.qdq.equalize import ScaledValues, equalizations_of
from qdqspec.qdq.formats import BIAS_FORMAT, number_format
from qdqspec.qdq.match import PASSED_OVER, Matcher, fit_pairs, positions
from qdqspec.qdq.pair_numbers import COMPUTED
from qdqspec.qdq.quantizer import (
    MOST_STEPS,
    WeightKey,
    packed,
    params_of,
    placed_pair,
    weight_key,
    weight_params,
)
from qdqspec.qdq.ranges import TensorRange, tied_groups
from qdqspec.qdq.scheme_file import IMPORTED, SchemeFile
from qdqspec.qdq.strip import FoundPair, strip_like
from qdqspec.types import Consumer, PlacedPair, Placement, Site

_SUPERSEDED = (
    "is quantized again at once, with other numbers: the readers of the last pair get that pair only"
)


@dataclass(frozen=True, kw_only=True)
class Imported(SchemeFile):
    """The scheme of a quantized model, and notes for the reader. ``unlike`` are notes on other differences from the
    reference, which no placement has.

    ``model`` is the one that `strip_qdq` makes; tensor and node names are its own.
    """

    backend: str = IMPORTED
    model: Model
    notes: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    def placement_for(self, model: Model) -> tuple[Placement, tuple[str, ...]]:
        """The placement for ``model``, the reference or a similar model, and notes on sites that it does not have.

        Sites are matched by the nodes that read them, because tools rename tensors. For warm starts: a search
        calibrates again, so that the numbers are not needed.
        """
        fitted = fit_pairs(model, self.pairs, self.positions, with_numbers=False)
        return fitted.placement, (*self.notes, *_group_notes(fitted.reasons.items(), most=3))


def import_placement(model: Model, reference: Model | None = None, *, rounded_only: bool = False) -> Imported:
    """Import the Q/DQ pairs of a model, made by any tool.

    ``reference`` is the model before quantization, for its names of weights and nodes that the tool removed. With
    ``rounded_only`` it has only weights of which the integers are roundings. Pairs that a placement cannot express
    (unknown blocks and formats, computed scales) are noted and omitted.
    """
    apart = strip_like(model, reference, rounded_only=rounded_only)
    found = apart.pairs
    reasons = {id(pair): why for pair in found if (why := _explain_inexpressible(pair))}
    floats = ScaledValues(apart.stripped)
    equalized = equalizations_of(model.flat, apart.stripped.constants)
    for change in equalized:
        floats.add(change)
    usable = (pair for pair in found if id(pair) not in reasons and pair.ends)
    placed = [_place_pair(pair, apart.model, floats) for pair in usable]
    placed.sort(key=lambda one: (one[0].site.tensor, one[0].site.consumers))
    why = "float32 cannot hold its integers" if reference is None else "the reference quantizes otherwise"
    notes = [*_group_notes((pair.tensor, reasons[id(pair)]) for pair in found if id(pair) in reasons)]
    partly = []  # expressed only in part, or replaced by a later pair of a chain
    for pair in found:
        if 0 < len(_find_consumers(pair)) < len(pair.ends):
            partly.append(
                (pair.tensor, "also makes a graph output, which is float after `apply`: it is a constant")
            )
        partly += [(earlier.tensor, _SUPERSEDED) for earlier in pair.chain]
    notes += _group_notes(partly)
    notes += [
        f"'{pair.site.tensor}' comes back up to {steps} steps away from its integers: {why}"
        for pair, steps in placed
        if steps
    ]
    if reference is not None and (unmatched := apart.found.dequantized):
        why = "a model with this scheme rounds weights of its own"
        notes.append(f"weights that the reference does not have, {names_text(unmatched)}: {why}")
    notes += apart.notes
    return Imported(
        model=apart.stripped,
        pairs=tuple(pair for pair, _ in placed),
        equalized=equalized,
        notes=tuple(notes),
        unlike=apart.unlike(),
        positions={apart.known_as[name]: at for name, at in positions(apart.stripped).items()},
        converted_from=model.converted_from or None,
    )


def _explain_inexpressible(pair: FoundPair) -> str:
    """The reason why a placement cannot express the pair; empty if it can."""
    numbers = pair.numbers
    if numbers is None:
        return COMPUTED
    if pair.ends and not _find_consumers(pair):
        return "makes a graph output of a constant, which no site names: the output is float after `apply`"
    fmt = numbers.format
    if not fmt.name:
        blocks = f" in blocks of {fmt.block or '?'}" if fmt.block or numbers.scale.ndim > 1 else ""
        return f"is {fmt.stored_type}{blocks}, which schemes do not carry"
    if numbers.axis is not None and numbers.axis < 0:
        return "has an axis counted from the end of a shape that is not known"
    if numbers.precision:
        return "is set to compute in another precision than that of its scale"
    if not (np.isfinite(numbers.step) & (numbers.step >= np.finfo(np.float32).tiny)).all():
        return "has a scale that is zero, negative, subnormal or not finite"
    return ""


def _find_consumers(pair: FoundPair) -> tuple[Consumer, ...]:
    """The consumers that a site can name: no node makes a constant that is a graph output."""
    return tuple(end for end in pair.ends if not (end.is_output and pair.weight))


def _place_pair(pair: FoundPair, model: Model, floats: ScaledValues) -> tuple[PlacedPair, int]:
    """A pair of a scheme, and by how many steps its integers come back changed.

    The stored integers may differ from the nearest ones of the float weight. A scheme has differences of up to a byte.
    """
    params = pair.numbers
    assert params is not None
    fmt = params.format
    site = Site(
        tensor=pair.tensor,
        consumers=_find_consumers(pair),
        format=fmt.name,
        axis=params.axis,
        weight=pair.weight,
    )
    placed = placed_pair(site, params, stored=pair.stored or not pair.weight, bias=pair.bias)
    if not pair.stored:
        return placed, 0
    nearest = params.quantize(floats.of(pair.tensor).astype(np.float32, copy=False))
    apart = model.array(pair.quantized).astype(np.float64) - nearest.astype(np.float64)
    steps = math.ceil(np.abs(apart).max(initial=0))
    if 0 < steps <= MOST_STEPS and not (fmt.floating or fmt.block) and fmt.high <= 255:
        return replace(placed, rounding=packed(apart.astype(np.int8))), 0
    return placed, steps


def _group_notes(reasons: Iterable[tuple[str, str]], most: int = sys.maxsize) -> Iterator[str]:
    """A note for each reason with its tensors. Reasons after the first ``most`` are one note together."""
    groups: dict[str, list[str]] = {}
    for tensor, why in reasons:
        groups.setdefault(why, []).append(tensor)
    kinds = list(groups.items())
    for why, tensors in kinds[:most]:
        yield f"{names_text(dict.fromkeys(tensors))}: {why}"
    if others := {tensor for _, tensors in kinds[most:] for tensor in tensors}:
        yield f"{count_text(len(others), 'more tensor')} without a place in this model"


# ---- scales for a similar model --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScales:
    """Ranges of activations and scales of weights, read from quantized models."""

    ranges: dict[str, TensorRange] = field(default_factory=dict)
    weights: dict[WeightKey, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, model: Model, paths: Iterable[Path], note: Callable[[str], None]) -> KeptScales:
        """The scales that quantized models among these files have for tensors of ``model``; the first file wins.

        Of pairs with constant scales, integer formats and, for weights, zero points in the middle. Zero points are kept
        with the scales of activations. Scales of weights that differ from the model's, as where a BatchNormalization is
        folded in one of both only, are not kept, and noted; nor are those of activations that another operator makes.
        """
        kept = cls()
        for path in (path for path in paths if path.suffix.lower() == ".onnx"):
            for line in kept._add_file(model, path):
                note(f"{path.name}: {line}")
        return kept

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors that have a range or a scale."""
        return frozenset((*self.ranges, *(tensor for tensor, _, _ in self.weights)))

    def replace_ranges(self, model: Model, ranges: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
        """The ranges of a model with the kept ones, also for copies of their tensors, which have the same scale.

        Operands of a Concat have ranges of their own, which the kept one may not cover.
        """
        found = {**ranges, **{tensor: span for tensor, span in self.ranges.items() if tensor in ranges}}
        joins = {
            name for node in model.nodes if node.op_type == "Concat" for name in (*node.inputs, *node.outputs)
        }
        for group in tied_groups(model, ranges):
            own = [self.ranges[tensor] for tensor in group if tensor in self.ranges]
            if own and joins.isdisjoint(group):
                found |= dict.fromkeys(group, reduce(TensorRange.union, own))
        return found

    def _add_range(self, tensor: str, pair: PlacedPair, earlier: Collection[str]) -> None:
        """Keep the range and numbers of a pair, of further formats the numbers; not of ``earlier`` tensors."""
        fmt, scale, zero_point = number_format(pair.site.format), pair.scale[0], pair.zero_point[0]
        low, high = ((end - zero_point) * scale for end in (fmt.low, fmt.high))
        span = self.ranges.get(tensor, TensorRange(low, high))
        if tensor not in earlier and fmt.name not in (name for name, _, _ in span.kept):
            self.ranges[tensor] = replace(span, kept=(*span.kept, (fmt.name, scale, zero_point)))

    def _add_file(self, model: Model, path: Path) -> Iterator[str]:
        """Keep the scales of a quantized model that no earlier one has; gives notes on them."""
        before, others, scaled, earlier = len(self.tensors), 0, 0, frozenset(self.ranges)
        imported = import_placement(load_model(path), model, rounded_only=True)
        if imported.equalized:
            yield "its scales are those of equalized channels, and are not kept"
            return
        matcher = Matcher(model, imported.positions)
        for pair in imported.pairs:
            fmt = number_format(pair.site.format)
            has_numbers = not (fmt.floating or fmt.block or fmt.at_run_time or fmt.name == BIAS_FORMAT)
            if not has_numbers or (pair.site.weight and set(pair.zero_point) != {fmt.middle}):
                continue
            maker = _find_maker(imported.model, pair.site.tensor)
            for site in matcher.find(pair.site)[0]:
                if not site.weight and _find_maker(model, site.tensor) != maker:
                    scaled += 1
                elif not site.weight:
                    self._add_range(site.tensor, pair, earlier)
                elif not _fits_weight(model.array(site.tensor), imported.model.array(pair.site.tensor), pair):
                    others += 1
                else:
                    scales = np.array(pair.scale, np.float32).reshape(() if pair.site.axis is None else (-1,))
                    self.weights.setdefault(weight_key(site), scales)
        if new := len(self.tensors) - before:
            yield (
                f"the scales of {count_text(new, 'tensor')} are kept; "
                "with `quantize: {scales: recalibrate}` or --start-scales recalibrate, calibration data gives them"
            )
        if others:
            yield (
                f"the scales of {count_text(others, 'weight')} are not kept: they are for other values, "
                "as where BatchNormalization was not folded before quantizing"
            )
        if scaled:
            yield (
                f"the scales of {count_text(scaled, 'activation')} are not kept: another operator makes "
                "them there, as where a tool scaled them before quantizing"
            )


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
        np.square(params.dequantize(params.quantize(one)) - one).sum(dtype=np.float64)
        for params in (params_of(pair, one.shape), own)
    )
    return bool(kept <= 20 * least or kept <= 1e-6 * np.square(one).sum(dtype=np.float64))
