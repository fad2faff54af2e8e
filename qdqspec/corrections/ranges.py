"""Corrections of ranges: the calibration method of each activation, by its effect on the outputs, and margins.

The rehearsal takes scales and zero points as inputs, so that evaluating a choice needs a run and no build.

Margins are ranges of activations wider than the calibration samples, which other samples exceed: the largest value of a
few samples is smaller than that of many. Values beyond a range are clipped, with an error that may be larger than that
of all rounding, which grows by the factor of a margin only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from qdqspec.arrays import Feed, Floats
from qdqspec.corrections.judge import Errors, Judge, lower_bound_db, powers_at
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange, tie_ranges, tied_groups
from qdqspec.rehearsal.graph import Values
from qdqspec.types import Placement

Ranges = Mapping[str, TensorRange]

LEAST_DB = 0.02  # smallest gain of one choice over all samples
FIT_SAMPLES = 6  # samples on which single choices are tried
LOST_SAMPLES = 2  # of these, on which a choice that loses on each is given up
PATIENCE = 16  # groups of tensors in a row without a better choice, after which the rest is not tried
FACTORS = (1.025, 1.05, 1.125)  # by which ranges are widened
PARTS = (0.9, 0.8, 0.7)  # of a range, in place of all of it
_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def chosen_ranges(
    judge: Judge,
    placement: Placement,
    numbers: Callable[[Ranges], Quantizer],
    groups: Sequence[tuple[str, ...]],
    options: Sequence[Ranges],
    seconds: float,
) -> tuple[Ranges, Ranges]:
    """The best of the ``options`` on the fit samples, and a combination in which each choice gained there.

    ``groups`` are the tensors that share a range. Those whose options differ most come first, until the time is up.
    Only tensors that the ``placement`` quantizes are chosen for. Each group may also get a part of its range (`PARTS`):
    values beyond it are clipped, and all others have smaller steps.
    """
    until = time.monotonic() + seconds
    feeds = islice(judge.rehearsal(numbers(options[0]), "fit")[0].references(), FIT_SAMPLES)
    fit = _Fit(judge, placement, list(feeds))
    quantized = {site.tensor for site in placement.sites}
    found = [(fit.errors(numbers(option)), option) for option in options]
    best, first = max(found, key=lambda pair: pair[0].total_db)
    current, winless = dict(first), 0
    able = [group for group in groups if not quantized.isdisjoint(group)]
    for group in sorted(able, key=lambda group: -_spread(group, options)):
        winless += 1
        for option in (*_distinct(group, current, options), *_parts(judge.model, group, current)):
            if time.monotonic() > until:
                return first, current
            tried = current | {tensor: option[tensor] for tensor in group if tensor in option}
            errors = fit.errors(numbers(tried), best)
            if errors.gain_db(best) >= LEAST_DB and lower_bound_db(errors.gains_db(best)) >= 0:
                current, best, winless = tried, errors, 0
        if winless == PATIENCE:
            break
    return first, current


def _spread(group: Sequence[str], options: Sequence[Ranges]) -> float:
    sizes = [option[t].high - option[t].low for option in options for t in group if t in option]
    return max(sizes, default=0.0) / max(min(sizes, default=1.0), 1e-30)


def _distinct(group: Sequence[str], current: Ranges, options: Sequence[Ranges]) -> Iterator[Ranges]:
    """The options that give a group ranges different from its own and from each other's."""
    seen = [tuple(current.get(tensor) for tensor in group)]
    for option in options:
        own = tuple(option.get(tensor) for tensor in group)
        if not any(_nearly_equal(own, other) for other in seen):
            seen.append(own)
            yield option


def _parts(model: Model, group: Sequence[str], ranges: Ranges) -> Iterator[Ranges]:
    """Parts of the range of a group; none of bounded tensors."""
    if not any(_is_bounded(model, tensor) for tensor in group):
        for part in PARTS:
            known = ((tensor, ranges[tensor]) for tensor in group if tensor in ranges)
            yield {tensor: TensorRange(part * span.low, part * span.high) for tensor, span in known}


def _nearly_equal(one: Sequence[TensorRange | None], other: Sequence[TensorRange | None]) -> bool:
    """Whether ranges are equal within two hundredths of their size."""
    return all(
        a is None or b is None or abs(a.high - b.high) + abs(a.low - b.low) <= 0.02 * (b.high - b.low)
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """A placement on the samples of the fit."""

    judge: Judge
    placement: Placement
    feeds: Sequence[tuple[Feed, Values]]

    def errors(self, numbers: Quantizer, best: Errors | None = None) -> Errors:
        """The error with these numbers; of the first samples only if each of these has a larger error than ``best``."""
        rehearsal, adjusted = self.judge.rehearsal(numbers, "fit")
        setting = rehearsal.switches.setting(self.placement)

        def rows(feeds: Sequence[tuple[Feed, Values]]) -> list[Floats]:
            each = rehearsal.values_each(((setting, feed) for feed, _ in feeds), adjusted)
            return [
                powers_at(rehearsal.guiding_edges, reference, values)
                for (_, reference), values in zip(feeds, each, strict=True)
            ]

        first = rows(self.feeds[:LOST_SAMPLES])
        errors = Errors(np.array(first))
        if best is not None and errors.gains_db(best).max() < 0 and errors.gain_db(best) < 0:
            return errors
        return Errors(np.array([*first, *rows(self.feeds[LOST_SAMPLES:])]))


def widened(
    model: Model, ranges: Ranges, factor: float, kept: Collection[str] = ()
) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of inputs, of bounded tensors, and of the tensors ``kept``.

    Tied tensors have one range again; those tied to one that is ``kept`` are kept as well.
    """
    if factor == 1.0:
        return dict(ranges)
    groups = tied_groups(model, ranges)
    same = {tensor for group in groups if not {*kept}.isdisjoint(group) for tensor in group}
    found = {
        tensor: span
        if tensor in same or _is_bounded(model, tensor)
        else TensorRange(factor * span.low, factor * span.high)
        for tensor, span in ranges.items()
    }
    return tie_ranges(model, found)


def _is_bounded(model: Model, tensor: str) -> bool:
    """Whether a tensor has the values of a graph input, or of an operator with bounded results."""
    node = model.producer.get(tensor)
    while node is not None and is_default(node) and _copies(node):
        tensor = node.inputs[0]
        node = model.producer.get(tensor)
    return tensor in model.inputs or (node is not None and is_default(node) and node.op_type in _BOUNDED)


def _copies(node: Node) -> bool:
    return copies_values(node) or is_nearest(node) or node.op_type in ("Dropout", "MaxPool")
