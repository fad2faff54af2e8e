"""Corrections of ranges: wider or narrower ones for all activations.

Both are judged by ranges of the even samples on the odd ones. Wider is a margin around the values of the samples, which
other data exceeds: values beyond a range are clipped, with an error that may be larger than that of all rounding, which
grows by the factor of the margin only. Narrower are ranges without the rarest values (`NARROW`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qdqspec.graph import Model
from qdqspec.graph.ops import copies_values, is_default, is_nearest
from qdqspec.qdq import Corrections, TensorRange, tie_ranges
from qdqspec.types import Method

if TYPE_CHECKING:
    from qdqspec.accuracy.corrections.find import CorrectionTask, IsOver, Problem, Ranges

NARROW: Method = "percentile"  # the best method on SqueezeNet, the second best on a face detector
_BOUNDED = frozenset({"Clip", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})


def choose_ranges(task: CorrectionTask, problem: Problem, is_over: IsOver, margin: float = 1.125) -> Problem:
    """The problem with ranges wider by ``margin``, which is for rarer values, or with narrower ones, if one gains."""
    own = problem.numbers.ranges
    able = {site.tensor for site in task.sites if not site.weight} - task.fixed

    def corrections(ranges: Ranges, factor: float) -> Corrections:
        wider = widened(problem.model, tie_ranges(problem.model, ranges), factor)
        changed = {t: span for t, span in wider.items() if t in able and span != own.get(t)}
        return replace(problem.numbers.corrections, ranges=changed)

    by_even = task.ranges(problem.model, True)
    before = best = problem.with_numbers(corrections(by_even[task.method], 1.0))
    chosen = task.method, 1.0
    for method, factor in dict.fromkeys([(task.method, margin), (NARROW, 1.0)]):
        if is_over():
            break
        other = problem.with_numbers(corrections(by_even[method], factor))
        if other.gains_over(best):
            best, chosen = other, (method, factor)
    if best is before:
        return problem
    method, factor = chosen
    taken = corrections(task.ranges(problem.model, False)[method], factor)
    gains = before.choose("ranges", best, len(taken.ranges)).gains
    return replace(problem.with_numbers(taken), gains=gains)


def widened(model: Model, ranges: Ranges, factor: float) -> dict[str, TensorRange]:
    """The ranges widened by a factor, without those of inputs and of bounded tensors. Tied tensors have one again."""
    if factor == 1.0:
        return dict(ranges)
    found = {
        tensor: span if _is_bounded(model, tensor) else TensorRange(factor * span.low, factor * span.high)
        for tensor, span in ranges.items()
    }
    return tie_ranges(model, found)


def _is_bounded(model: Model, tensor: str) -> bool:
    """Whether a tensor has the values of a graph input, or of an operator with bounded results."""
    node = model.producer.get(tensor)
    while node is not None and is_default(node):
        if not (copies_values(node) or is_nearest(node) or node.op_type in ("Dropout", "MaxPool")):
            return node.op_type in _BOUNDED
        tensor = node.inputs[0]
        node = model.producer.get(tensor)
    return tensor in model.inputs
