"""The nearest placement that a space offers to one that comes from elsewhere. May import floors 0 to 2.

A placement of another tool or model may name what this backend cannot run, or leave an operator half
quantized. Projected, it is a choice of labels like any other, with this case's formats and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qdqspec.placement.forms import Form
from qdqspec.placement.space import SchemeSpace
from qdqspec.placement.units import Unit
from qdqspec.types import Consumer, Kind, Label, Placement, label_of


def project(space: SchemeSpace, placement: Placement) -> Placement:
    """The placement of the labels that are read off the sites. One that the space made comes back as it was."""
    return space.resolve(labels_of(space, placement))


def labels_of(space: SchemeSpace, *placements: Placement) -> dict[str, Label]:
    """The label of each unit that is quantized whole: all its inputs, its weight, and for integers out its outputs.

    Several placements count together. Of the formats a unit has, it gets the one that its sites look most like;
    otherwise formats and axes do not count: they are the space's.
    """
    covered = {end: site.format for p in placements for site in p.sites for end in site.consumers}
    found = {unit.id: _label(space, unit, covered) for unit in space.units}
    return {name: label for name, label in found.items() if label != "fp"}


def _label(space: SchemeSpace, unit: Unit, covered: Mapping[Consumer, str]) -> Label:
    fitting = [form for form in unit.forms if covered.keys() >= set(_ends(unit, form))]
    if not fitting:
        return "fp"
    form = max(fitting, key=lambda form: _likeness(unit, form, covered))
    has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
    is_result_covered = covered.keys() >= {end for _, end in space.result_edges(unit)}
    wanted: Kind = "in+out" if is_result_covered and not has_integer_bias else "in-only"
    kind = wanted if wanted in form.kinds else "in-only"
    return label_of(form.choice.name, kind) if kind in form.kinds else "fp"


def _ends(unit: Unit, form: Form) -> Iterator[Consumer]:
    """Who reads what is quantized of a unit's inputs in one format."""
    yield from form.ends
    yield from (end for _, end in unit.edges if form.choice.activation is not None)


def _likeness(unit: Unit, form: Form, covered: Mapping[Consumer, str]) -> tuple[int, int]:
    """How many constants are stored as in this format; then, how much of the unit it quantizes."""
    alike = sum(covered[end] == site.format for site in form.constants for end in site.consumers)
    return alike, len(list(_ends(unit, form)))
