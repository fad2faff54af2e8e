"""Labels of units by simple rules, tied classes of units that get the same label, and the time of units. Pure.

A tied class has the units at the same position of the same pattern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qdqspec.graph.ops import WEIGHT_INPUT
from qdqspec.placement.scheme.relative import Frames
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.placement.space.units import Unit
from qdqspec.types import Label, LayerTime, format_of, kind_of

LINEAR = frozenset(WEIGHT_INPUT)

Labels: TypeAlias = dict[str, Label]
ClassLabels: TypeAlias = tuple[Label, ...]  # one label for each class


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedClass:
    """Units of one position in one pattern. ``labels`` are those that at least one of them offers."""

    pattern: str
    units: tuple[str, ...]
    labels: tuple[Label, ...]


def tied_classes(space: SchemeSpace) -> tuple[TiedClass, ...]:
    """The classes of a space, in order of their first units. Without regions each unit is a class of its own."""
    frames = Frames(space.model, space.regions)
    groups: dict[tuple[str, int], list[Unit]] = {}
    for unit in space.units:
        place = unit.id, 0
        if unit.id in frames.leaf_of:
            frame = frames.of(frames.leaf_of[unit.id])
            place = frame.pattern, frame.position[unit.id]
        groups.setdefault(place, []).append(unit)
    found = []
    for (pattern, _), units in groups.items():
        offered = {label for unit in units for label in unit.labels}
        labels = tuple(label for label in space.labels if label in offered)
        found.append(TiedClass(pattern=pattern, units=tuple(unit.id for unit in units), labels=labels))
    return tuple(found)


def spread(space: SchemeSpace, classes: Sequence[TiedClass], choice: ClassLabels) -> dict[str, Label]:
    """Labels of units from labels of classes. A unit that does not offer the label gets the nearest one."""
    pairs = zip(classes, choice, strict=True)
    return {name: _nearest(space.by_id[name], label) for tied, label in pairs for name in tied.units}


def _nearest(unit: Unit, label: Label) -> Label:
    if label in unit.labels:
        return label
    return unit.full_in(format_of(label)) if kind_of(label) == "in+out" else "fp"


def gathered(classes: Sequence[TiedClass], labels: Mapping[str, Label]) -> ClassLabels:
    """The most frequent label of each class; units not named are ``fp``."""
    counts = (Counter(labels.get(name, "fp") for name in tied.units) for tied in classes)
    return tuple(count.most_common(1)[0][0] for count in counts)


def pure_choices(space: SchemeSpace, classes: Sequence[TiedClass]) -> Iterator[ClassLabels]:
    """One label everywhere, float first; a class that does not offer the label gets the nearest one."""
    seen: set[ClassLabels] = set()
    for wanted in space.labels:
        choice = tuple(_nearest_of(tied, wanted) for tied in classes)
        if choice not in seen:
            seen.add(choice)
            yield choice


def _nearest_of(tied: TiedClass, label: Label) -> Label:
    if label in tied.labels:
        return label
    alike = [offered for offered in tied.labels[1:] if format_of(offered) == format_of(label)]
    return alike[0] if alike and kind_of(label) == "in+out" else "fp"


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
