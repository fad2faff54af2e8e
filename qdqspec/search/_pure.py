"""Placements defined by one rule: everything, only linear operators, one label everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from qdqspec.placement.space import SchemeSpace
from qdqspec.types import Label, kind_of

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

Labels = dict[str, Label]


def pure_labels(space: SchemeSpace) -> Iterator[Labels]:
    """For each format: everything, each label with float outputs on all units, and only linear operators."""
    for choice in space.choices:
        everything = space.everything(choice.name)
        yield everything
        yield from (space.uniform(label) for label in _giving_floats(choice.labels))
        yield {name: label for name, label in everything.items() if space.by_id[name].op_type in LINEAR}


def weighted_linear(space: SchemeSpace) -> Iterator[Labels]:
    """Linear operators with weights under each label with float outputs, as in manual quantization."""
    weighted = {
        unit.id
        for unit in space.units
        if unit.op_type in LINEAR and any(form.constants for form in unit.forms)
    }
    for choice in space.choices:
        for label in _giving_floats(choice.labels):
            yield {name: given for name, given in space.uniform(label).items() if name in weighted}


def _giving_floats(labels: tuple[Label, ...]) -> Iterator[Label]:
    return (label for label in labels if kind_of(label) != "in+out")
