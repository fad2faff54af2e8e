"""The nearest placement that a space offers to one that comes from elsewhere.

A placement of another tool or model may name what this backend cannot run, or leave an operator half
quantized. Projected, it is a choice of labels like any other, with this case's formats and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
    forms = {unit.id: form for unit in space.units if (form := _form(unit, covered)) is not None}
    weights_alone = {name for name, form in forms.items() if form.choice.activation is None}
    floats = {end for name in weights_alone for _, end in space.by_id[name].edges}
    found = {name: _label(space, space.by_id[name], form, covered, floats) for name, form in forms.items()}
    return {name: label for name, label in found.items() if label != "fp"}


def _form(unit: Unit, covered: Mapping[Consumer, str]) -> Form | None:
    """The format that a unit's inputs are all quantized in, or look most like."""
    fitting = [
        form
        for form in unit.forms
        if covered.keys() >= {end for end, _ in (*_constants(form), *_activations(unit, form))}
    ]
    return max(fitting, key=lambda form: _likeness(unit, form, covered), default=None)


def _label(
    space: SchemeSpace, unit: Unit, form: Form, covered: Mapping[Consumer, str], floats: Collection[Consumer]
) -> Label:
    """Integers out where all who read its results see them quantized, save those who want floats."""
    has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
    results = [end for _, end in space.result_edges(unit)]
    quantized = [end for end in results if end in covered]
    is_result_covered = bool(quantized) and all(end in covered or end in floats for end in results)
    wanted: Kind = "in+out" if is_result_covered and not has_integer_bias else "in-only"
    kind = wanted if wanted in form.kinds else "in-only"
    return label_of(form.choice.name, kind) if kind in form.kinds else "fp"


def _constants(form: Form) -> list[tuple[Consumer, str]]:
    """Who reads a unit's constants, and how a format stores them."""
    return [(end, site.format) for site in form.constants for end in site.consumers]


def _activations(unit: Unit, form: Form) -> list[tuple[Consumer, str]]:
    """Who reads its activations, and how a format stores them; nobody where it is for weights alone."""
    fmt = form.choice.activation
    return [] if fmt is None else [(end, fmt) for _, end in unit.edges]


def _likeness(unit: Unit, form: Form, covered: Mapping[Consumer, str]) -> tuple[int, int, int]:
    """How many constants are stored as in this format, then how many activations; then, how many there are."""
    ends = _constants(form), _activations(unit, form)
    constants, activations = (sum(covered[end] == stored for end, stored in group) for group in ends)
    return constants, activations, sum(map(len, ends))
