"""The nearest placement that a space offers to one that comes from elsewhere. May import floors 0 to 2.

A placement of another tool or model may name what this backend cannot run, or leave an operator half
quantized. Projected, it is a choice of labels like any other, with this case's formats and numbers.
"""

from __future__ import annotations

from qdqspec.placement.space import SchemeSpace
from qdqspec.placement.units import Unit
from qdqspec.types import Consumer, Label, Placement


def project(space: SchemeSpace, placement: Placement) -> Placement:
    """The placement of the labels that are read off the sites. One that the space made comes back as it was."""
    return space.resolve(labels_of(space, placement))


def labels_of(space: SchemeSpace, *placements: Placement) -> dict[str, Label]:
    """The label of each unit that is quantized whole: all its inputs, its weight, and for ``in+out`` its outputs.

    Several placements count together. Formats and axes do not count: they are the space's.
    """
    covered = {end for placement in placements for site in placement.sites for end in site.consumers}
    found = {unit.id: _label(space, unit, covered) for unit in space.units}
    return {name: label for name, label in found.items() if label != "fp"}


def _label(space: SchemeSpace, unit: Unit, covered: set[Consumer]) -> Label:
    ends = [end for _, end in unit.edges] + [end for site in unit.constants for end in site.consumers]
    if not covered.issuperset(ends):
        return "fp"
    has_integer_bias = any(end in covered for site in unit.biases for end in site.consumers)
    is_result_covered = covered.issuperset(end for _, end in space.result_edges(unit))
    if "in+out" in unit.labels and is_result_covered and not has_integer_bias:
        return "in+out"
    return "in-only" if "in-only" in unit.labels else "fp"
