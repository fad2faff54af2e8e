"""Explains why a search does not offer an operator or a graph output for quantization, for `qdqspec inspect`.

The search space decides, and `qdqspec.qdq.unit_finder` has the reason of each operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qdqspec.graph import Model, Node, fold_weights, with_integer_kernels
from qdqspec.graph.ops import CONTROL, is_constant_node, is_float
from qdqspec.graph.regions import Judged, flow_of
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.unit_finder import COMPUTED, NOT_ASKED, OTHER_PAIRS, type_name
from qdqspec.qdq.units import excluded_by_rule
from qdqspec.types import QuantizeRules


def judge(
    model: Model,
    capabilities: Capabilities,
    *,
    backend: str,
    note: str = "",
    rules: QuantizeRules | None = None,
) -> Judged:
    """The nodes of a model that a backend's search may quantize, and the reasons against the others.

    The model is converted from float16 and folded first, as in tuning. ``note`` is a remark about the backend.
    """
    rules = rules or QuantizeRules()
    base, _ = with_integer_kernels(model, quantizes_half=capabilities.quantizes_half)
    added = base.by_name.keys() - model.by_name.keys()  # casts
    folded = fold_weights(base)
    missing = frozenset(folded.missing)
    carried = flow_of(folded.model).carried
    words = _Reasons(folded.model, capabilities, rules, carried)
    asked = _Reasons(folded.model, capabilities, replace(rules, outputs=True), carried)
    # Folding renumbers nodes without a name: they are matched by their order. Constant nodes may be folded too.
    ours_left = (node for node in model.nodes if node.name not in missing and not is_constant_node(node))
    theirs_left = (n for n in folded.model.nodes if not is_constant_node(n) and n.name not in added)
    left = zip(ours_left, theirs_left, strict=True)
    reasons = {ours.name: words.reason(theirs) for ours, theirs in left if not ours.is_marker}
    reasons |= {
        name: f"{model.by_name[name].op_type}: folded into the operator before it" for name in folded.removed
    }
    reasons |= dict.fromkeys(folded.computed, COMPUTED)
    offered = {name for name, why in words.outputs() if not why}
    outputs = {name: "" if name in offered else why or NOT_ASKED for name, why in asked.outputs()}
    return Judged(backend=backend, note=note, reasons=reasons, outputs=outputs)


class _Reasons:
    """The reasons of one model, for one backend."""

    def __init__(
        self, model: Model, capabilities: Capabilities, rules: QuantizeRules, carried: frozenset[int]
    ) -> None:
        self._model = model
        self._space = SchemeSpace(model, capabilities, rules=rules)
        self._ruled = excluded_by_rule(self._space.stages)
        self._carried = carried

    def reason(self, node: Node) -> str:
        """The reason why a node is not offered; empty if it is."""
        if node.name in self._space.by_id:
            return ""
        op_type = node.op_type
        if node.index in self._carried:
            return COMPUTED
        if op_type in CONTROL:
            return f"{op_type}: control flow; the nodes of its bodies count by themselves"
        if node.name in self._space.unit_of:
            return f"{op_type}: quantized together with the operator before it"
        if rule := self._ruled.get(node.name):
            return f"{op_type}: rule {rule} leaves it in float"
        found = self._space.finder.examine(node)
        return found if isinstance(found, str) else f"{op_type}: {OTHER_PAIRS}"

    def outputs(self) -> Iterator[tuple[str, str]]:
        """The reason why each graph output stays float; empty if it may be quantized."""
        model, space = self._model, self._space
        offered = {tensor for unit in space.units for tensor in unit.outputs}
        for tensor in model.outputs:
            maker = model.producer.get(tensor)
            if tensor in offered:
                why = ""
            elif maker is None or tensor in model.constants:
                why = "no node computes it"
            elif not is_float(model, tensor):
                why = f"it holds {type_name(model, tensor)}"
            elif maker.name not in space.unit_of:
                why = self.reason(maker)
            else:
                why = space.finder.why_float(tensor, model.by_name[space.unit_of[maker.name]])
                why = why or f"{maker.op_type}: the backend runs it with a float output only"
            yield tensor, why
