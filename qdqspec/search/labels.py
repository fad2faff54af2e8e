"""Labels of units by simple rules, and the time of units. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from qdqspec.graph.ops import WEIGHT_INPUT
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Label, LayerTime, kind_of

LINEAR = frozenset(WEIGHT_INPUT)

Labels: TypeAlias = dict[str, Label]


def spent_by_unit(space: SchemeSpace, layers: Sequence[LayerTime]) -> dict[str, float]:
    """Milliseconds of each unit; a kernel's time is divided among its units. Without a profile all are equal."""
    if not layers:
        return dict.fromkeys((unit.id for unit in space.units), 1.0)
    spent = dict.fromkeys((unit.id for unit in space.units), 0.0)
    for layer in layers:
        owners = {space.unit_of[node] for node in layer.nodes if node in space.unit_of}
        for owner in owners:
            spent[owner] += layer.milliseconds / len(owners)
    return spent


def pure_labels(space: SchemeSpace) -> Iterator[Labels]:
    """For each format: everything, each label with float outputs on all units, and only linear operators."""
    for choice in space.choices:
        everything = space.everything(choice.name)
        yield everything
        yield from (space.uniform(label) for label in _giving_floats(choice.labels))
        yield {name: label for name, label in everything.items() if space.by_id[name].op_type in LINEAR}


def simple_labels(space: SchemeSpace) -> Iterator[Labels]:
    """Those that other tools give: only linear operators with weights, with float outputs; then `pure_labels`."""
    weighted = {
        unit.id
        for unit in space.units
        if unit.op_type in LINEAR and any(form.constants for form in unit.forms)
    }
    for choice in space.choices:
        for label in _giving_floats(choice.labels):
            yield {name: given for name, given in space.uniform(label).items() if name in weighted}
    yield from pure_labels(space)


def _giving_floats(labels: tuple[Label, ...]) -> Iterator[Label]:
    return (label for label in labels if kind_of(label) != "in+out")
