"""The placement rule of ONNX Runtime: a constraint on pairs beyond single operators."""

from __future__ import annotations

from dataclasses import replace

from qdqspec.graph.model import Model
from qdqspec.graph.ops import copies_values, is_default
from qdqspec.qdq.units import Unit, Units, with_results


def copies_read_in_bodies(model: Model, units: Units) -> Units:
    """No pair is before operators that only copy values, if a body of If, Loop or Scan reads the copy.

    ONNX Runtime moves a DequantizeLinear past Reshape, Transpose, MaxPool and the like, and ends the process where the
    reader of the result is in a body.

    Source: ONNX Runtime 1.32 on models of one pair and one such operator, each in a process of its own: MaxPool,
    Reshape and Transpose whose result an If or a Loop reads end it, Relu does not
    (tests/unit/backends/test_ort_placement.py).
    """
    if not model.captured:
        return units
    moved: set[str] = set()  # nodes past which a DequantizeLinear would be moved, up to a body
    for node in reversed(model.nodes):
        readers = {end.node for name in node.outputs for end in model.ends(name) if not end.is_output}
        leads = not model.captured.isdisjoint(node.outputs) or not moved.isdisjoint(readers)
        if leads and (copies_values(node) or (node.op_type == "MaxPool" and is_default(node))):
            moved.add(node.name)

    def without(unit: Unit) -> Unit:
        edges = tuple(edge for edge in unit.edges if edge[1].node not in moved)
        readers = {name: {end.node for end in model.ends(name)} for name in unit.outputs}
        outputs = tuple(name for name in unit.outputs if moved.isdisjoint(readers[name]))
        if (edges, outputs) == (unit.edges, unit.outputs):
            return unit
        if unit.edges and not edges:
            return replace(unit, forms=())  # its only input would be moved past it
        return with_results(replace(unit, edges=edges), outputs, unit.out_edges)

    return tuple(without(unit) for unit in units) if moved else units
