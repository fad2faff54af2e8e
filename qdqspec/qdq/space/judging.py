"""Explains why a search does not offer an operator or a graph output for quantization, for `qdqspec inspect`.

The search space decides. For each node without labels, the same conditions are evaluated again, with a message
for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import onnx

from qdqspec.graph.float32 import with_integer_kernels
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import (
    CONTROL,
    FLOATS,
    NEVER,
    data_inputs,
    is_constant_node,
    is_default,
    is_float,
    is_fused_attention,
    reads_data,
)
from qdqspec.graph.regions.flow import flow_of
from qdqspec.graph.regions.inspect import Judged
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.qdq.space.units import (
    NEEDS_WEIGHT,
    excluded_by_rule,
    is_dynamic_linear,
    weight_input,
    weight_inputs,
)
from qdqspec.types import QuantizeRules

_UNKNOWN = "an unknown type"
_FLOATS = frozenset(onnx.TensorProto.DataType.Name(kind) for kind in FLOATS)
_RECURRENT_FLOAT = frozenset({"GRU", "RNN"})
COMPUTED = "computed from shapes or constants alone"
SIZING = "its values set the size of a tensor, which quantization would change"
NOT_ASKED = "the spec must request it: quantize: {outputs: true}"


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
        self,
        model: Model,
        capabilities: Capabilities,
        rules: QuantizeRules,
        carried: frozenset[int],
    ) -> None:
        self._model = model
        self._can = capabilities
        self.space = SchemeSpace(model, capabilities, rules=rules)
        self._finder = self.space.finder
        self._of_shapes = self._finder.of_shapes
        self._carried = carried

    def reason(self, node: Node) -> str:
        """The reason why a node is not offered; empty if it is."""
        if node.name in self.space.by_id:
            return ""
        return next(self._reasons(node))

    def outputs(self) -> Iterator[tuple[str, str]]:
        """The reason why each graph output stays float; empty if it may be quantized."""
        offered = {tensor for unit in self.space.units for tensor in unit.outputs}
        for tensor in self._model.outputs:
            yield tensor, "" if tensor in offered else self._why_not_made(tensor)

    def _why_not_made(self, tensor: str) -> str:
        maker = self._model.producer.get(tensor)
        if maker is None or tensor in self._model.constants:
            return "no node computes it"
        if not is_float(self._model, tensor):
            return f"it holds {self._type(tensor)}"
        if maker.name not in self.space.unit_of:
            return next(self._reasons(maker))
        head = self._model.by_name[self.space.unit_of[maker.name]]
        return (
            self._float_reason(tensor, head)
            or f"{maker.op_type}: the backend runs it with a float output only"
        )

    def _reasons(self, node: Node) -> Iterator[str]:
        op_type = node.op_type
        if node.index in self._carried or not self._of_shapes.isdisjoint(node.outputs):
            yield COMPUTED
        if op_type in CONTROL:
            yield f"{op_type}: control flow; the nodes of its bodies count by themselves"
        yield from (f"{op_type}: {why}" for why in self._of_dynamic(node))
        if not is_default(node):
            yield f"{node.domain}:{op_type}: an operator that the backend does not know"
        if node.name in self.space.unit_of:
            yield f"{op_type}: quantized together with the operator before it"
        if rule := self._ruled.get(node.name):
            yield f"{op_type}: rule {rule} leaves it in float"
        if op_type in NEVER:
            yield f"{op_type}: never quantized by itself"
        if node.name in self._finder.sizing and any(is_float(self._model, tensor) for tensor in node.outputs):
            yield SIZING
        types = {self._type(node.inputs[index]) for index in data_inputs(node)}
        if types and types.isdisjoint({*_FLOATS, _UNKNOWN}):
            yield f"{op_type}: no floating point input of 16 or 32 bits"
        kinds = (self._can.kinds(name, op_type) for name in self._can.formats)
        if not any(kinds) and op_type not in self._can.blocked_axes:
            yield f"{op_type}: the backend runs it in floating point only"
        yield from (f"{op_type}: {why}" for why in self._operands(node))
        made = self._finder.chain(node)[-1].outputs
        yield from (
            f"{op_type}: {why}" for tensor in made if tensor and (why := self._float_reason(tensor, node))
        )
        if op_type in self._can.integer_bias:
            yield f"{op_type}: its bias is not one constant a channel, which integer kernels need"
        yield f"{op_type}: the compiler needs other pairs around it"

    @cached_property
    def _ruled(self) -> dict[str, str]:
        """The placement rule that excluded a node that the operators alone would offer, by node."""
        return excluded_by_rule(self.space.stages)

    def _operands(self, node: Node) -> Iterator[str]:
        types = [self._type(node.inputs[index]) for index in data_inputs(node)]
        if _UNKNOWN in types:
            yield "element type not known"
        if other := [name for name in types if name not in _FLOATS]:
            yield f"an input holds {other[0]}"
        needs_weight = node.op_type in NEEDS_WEIGHT | self._can.constant_weight
        if needs_weight and weight_input(self._model, node) is None:
            yield "its weight is computed, and integer kernels need a constant one"
        constants = [index for index in data_inputs(node) if node.inputs[index] in self._model.constants]
        if len(constants) == len(data_inputs(node)):
            yield "all its inputs are constants"
        elif not all(self._finder.has_range(node, index) for index in constants):
            yield "one of its constants is empty, infinite or not a number, so that it has no scale"

    def _of_dynamic(self, node: Node) -> Iterator[str]:
        """The reasons against kernels of whole LSTM and attentions with ranges found at run time."""
        can = {op_type for ops in self._can.dynamic.values() for op_type in ops}
        if node.op_type in _RECURRENT_FLOAT and "LSTM" in can:
            yield "there is no integer kernel of it, as DynamicQuantizeLSTM is of LSTM"
        if node.op_type == "LSTM" and "LSTM" in can:
            yield from self._of_lstm(node)
        if is_fused_attention(node) and "Attention" in can:
            yield from self._of_attention(node)

    def _of_lstm(self, node: Node) -> Iterator[str]:
        """The reason why DynamicQuantizeLSTM does not compute an LSTM."""
        if not weight_inputs(self._model, node):
            yield "its weights W and R are computed from inputs, and DynamicQuantizeLSTM needs constant ones"
        elif node.attributes.get("layout", 0):
            yield "it has attribute layout 1, which DynamicQuantizeLSTM lacks"
        elif not is_dynamic_linear(self._model, node):
            yield "DynamicQuantizeLSTM takes float32 only"

    def _of_attention(self, node: Node) -> Iterator[str]:
        """The reason why QAttention does not compute a fused attention."""
        if not weight_inputs(self._model, node):
            yield "QAttention needs a constant weight, and a bias"
        elif not is_dynamic_linear(self._model, node):
            yield "QAttention takes float32, equal sizes of queries, keys and values, and here no earlier ones"

    def _float_reason(self, tensor: str, head: Node) -> str:
        """The reason why a tensor cannot be integer for all its readers; empty if it can."""
        ends = self._model.ends(tensor)
        if not is_float(self._model, tensor):
            return f"its output is of {self._type(tensor)}"
        if not ends and tensor not in self._model.captured:
            return "no node reads its output"
        if tensor in self._model.captured:
            return "a body of If, Loop or Scan reads its output"
        if any(self._model.by_name[end.node].is_marker for end in ends if not end.is_output):
            return "it makes an output of a body of If, Loop or Scan"
        if not all(reads_data(self._model, end) for end in ends if not end.is_output):
            return "its output is read as a bound, a scale or a shape"
        if any(end.is_output for end in ends) and not self._finder.may_end(head):
            return f"it makes a graph output, and {NOT_ASKED}"
        return ""

    def _type(self, tensor: str) -> str:
        known = self._model.elem_type(tensor)
        return _UNKNOWN if not known else str(onnx.TensorProto.DataType.Name(known))
