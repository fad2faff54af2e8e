"""Imports placements from quantized models of other tools, of training, or made by hand.

Parts that a placement cannot express are noted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qdqspec._core.units import count_text, names_text
from qdqspec.graph import Model
from qdqspec.qdq.equalize import ScaledValues, equalizations_of
from qdqspec.qdq.match import fit_pairs, positions
from qdqspec.qdq.pair_numbers import COMPUTED
from qdqspec.qdq.quantizer import MOST_STEPS, packed, placed_pair, quantize
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


def placement_for(model: Model, quantized: Model) -> tuple[Placement, tuple[str, ...]]:
    """The placement of a quantized model for ``model``, its float original or a similar one, and notes on other sites.

    Sites are matched by the nodes that read them, because tools rename tensors. For warm starts: a search
    calibrates again, so that the numbers are not needed.
    """
    imported = import_placement(quantized, model)
    fitted = fit_pairs(model, imported.pairs, imported.positions, with_numbers=False)
    return fitted.placement, (*imported.notes, *_group_notes(fitted.reasons.items(), most=3))


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
    nearest = quantize(floats.of(pair.tensor).astype(np.float32, copy=False), params)
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
