"""Projects a foreign placement onto the nearest one in a search space.

A placement of another tool or model may contain sites that this backend cannot run, or quantize an operator
only in part. Projected, it is a choice of labels, with this case's formats and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qdqspec.placement.forms import Form
from qdqspec.placement.space import SchemeSpace
from qdqspec.placement.units import Unit
from qdqspec.quantize.formats import RUN_TIME
from qdqspec.types import Consumer, Kind, Label, Placement, label_of


def project(space: SchemeSpace, placement: Placement) -> Placement:
    """The placement of the labels derived from the sites. A placement of the space itself is unchanged."""
    return space.resolve(labels_of(space, placement))


def labels_of(space: SchemeSpace, *placements: Placement) -> dict[str, Label]:
    """The label of each unit that is wholly quantized: all inputs, its weight, and for integers out its outputs.

    Several placements are merged. Of the formats of a unit, it gets the one most similar to its sites;
    otherwise formats and axes are ignored and taken from the space.
    """
    covered = {end: site.format for p in placements for site in p.sites for end in site.consumers}
    forms = {unit.id: form for unit in space.units if (form := _form(unit, covered)) is not None}
    weights_alone = {name for name, form in forms.items() if form.choice.activation is None}
    floats = {end for name in weights_alone for _, end in space.by_id[name].edges}
    found = {name: _label(space, space.by_id[name], form, covered, floats) for name, form in forms.items()}
    return {name: label for name, label in found.items() if label != "fp"}


def _form(unit: Unit, covered: Mapping[Consumer, str]) -> Form | None:
    """The format that a unit's inputs are all quantized in, or the most similar one."""
    fitting = [
        form
        for form in unit.forms
        if covered.keys() >= {end for end, _ in (*_constants(form), *_activations(unit, form))}
    ]
    return max(fitting, key=lambda form: _likeness(unit, form, covered), default=None)


def _label(
    space: SchemeSpace, unit: Unit, form: Form, covered: Mapping[Consumer, str], floats: Collection[Consumer]
) -> Label:
    """Integers out if all readers of its results are quantized, except those that read floats."""
    has_integer_bias = any(end in covered for site in form.biases for end in site.consumers)
    results = [end for _, end in space.result_edges(unit)]
    quantized = [end for end in results if end in covered]
    is_result_covered = bool(quantized) and all(end in covered or end in floats for end in results)
    wanted: Kind = "in+out" if is_result_covered and not has_integer_bias else "in-only"
    if {covered.get(end) for _, end in unit.edges} == {RUN_TIME} and "dynamic" in form.kinds:
        wanted = "dynamic"
    kind = wanted if wanted in form.kinds else "in-only"
    return label_of(form.choice.name, kind) if kind in form.kinds else "fp"


def _constants(form: Form) -> list[tuple[Consumer, str]]:
    """The readers of a unit's constants, and the format that stores them."""
    return [(end, site.format) for site in form.constants for end in site.consumers]


def _activations(unit: Unit, form: Form) -> list[tuple[Consumer, str]]:
    """The readers of its activations, and the format that stores them; none for weight-only formats."""
    fmt = form.choice.activation
    return [] if fmt is None else [(end, fmt) for _, end in unit.edges]


def _likeness(unit: Unit, form: Form, covered: Mapping[Consumer, str]) -> tuple[int, int, int]:
    """Sort key: number of constants stored as in this format, then of activations, then their total number."""
    ends = _constants(form), _activations(unit, form)
    constants, activations = (sum(covered[end] == stored for end, stored in group) for group in ends)
    return constants, activations, sum(map(len, ends))
