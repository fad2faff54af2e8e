"""The share of results of a changed model that agree with the float model, by the measure of its task.

The keys of `RULES` are the beginnings of the entries ``judged`` in ``models.json``. Each function receives the outputs
of the float and of the other model for one sample and returns a number between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from independent import Outputs

Rule: TypeAlias = Callable[[Outputs, Outputs], float]


def _first(outputs: Outputs) -> np.ndarray:
    return next(iter(outputs.values()))


def same_text(reference: Outputs, other: Outputs) -> float:
    """Whether the best class is the same at every step of the last axis but one."""
    return float((_first(reference).argmax(-1) == _first(other).argmax(-1)).all())


def same_class(reference: Outputs, other: Outputs) -> float:
    """Whether the largest value of the first output is at the same position."""
    return float(_first(reference).argmax() == _first(other).argmax())


def overlap(reference: Outputs, other: Outputs, threshold: float) -> float:
    """Intersection over union of the values above a threshold; 1 if both outputs have none."""
    one, two = _first(reference) > threshold, _first(other) > threshold
    union = int((one | two).sum())
    return float((one & two).sum()) / union if union else 1.0


def within(reference: Outputs, other: Outputs, limit: float) -> float:
    """Whether all values of the first output differ by at most a limit."""
    return float((np.abs(_first(reference) - _first(other)) <= limit).all())


def same_detection(reference: Outputs, other: Outputs) -> float:
    """The share of anchors with a face score above 0.7 in the other model, of those in the float model."""
    one, two = (_first(outputs)[..., 1] > 0.7 for outputs in (reference, other))
    return overlap({"": one.astype(np.float32)}, {"": two.astype(np.float32)}, 0.5)


RULES: dict[str, Rule] = {
    "same text": same_text,
    "intersection over union of the map above 0.3": partial(overlap, threshold=0.3),
    "same class": same_class,
    "scores within 0.1": partial(within, limit=0.1),
    "probability within 0.02": partial(within, limit=0.02),
    "same detections": same_detection,
}


def rule_for(judged: str) -> tuple[str, Rule] | None:
    """The rule whose name is at the beginning of the text."""
    return next(((name, rule) for name, rule in RULES.items() if judged.startswith(name)), None)


def agreement(judged: str, reference: Iterable[Outputs], other: Iterable[Outputs]) -> float | None:
    """The mean over all samples; ``None`` without a rule."""
    found = rule_for(judged)
    if found is None:
        return None
    return float(np.mean([found[1](one, two) for one, two in zip(reference, other, strict=True)]))


def recall_at_1(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> float:
    """The share of queries whose nearest document is their own; both are normalized sentence embeddings."""
    nearest = (np.stack(queries) @ np.stack(documents).T).argmax(1)
    return float((nearest == np.arange(len(queries))).mean())
