"""Placement rules: constraints of some compilers on pairs beyond single operators, one function per rule.

A rule takes the units of a model and returns them with pairs moved or removed. The backend selects the rules
(`Capabilities.rules`), and may declare rules of its own (`qdqspec.config.hooks`): some runtimes need both sides of a
residual Add quantized, others the skip side only. All inputs of a weighted operator are quantized together for each
backend, by construction of units in `qdqspec.placement.units`; tensors that are copied, pooled or joined share their
scales by `qdqspec.quantize.ranges.tie_ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from qdqspec.config import hooks
from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import WEIGHT_INPUT, copies_values, is_default
from qdqspec.placement.forms import Form
from qdqspec.placement.rule_attention import transpose_to_matmul, whole_attention
from qdqspec.placement.rule_sizes import FP8, few_channel_conv, large_fp8_kernel, small_gemm
from qdqspec.placement.units import Edge, Unit, with_results
from qdqspec.registry import did_you_mean
from qdqspec.types import Consumer

Units: TypeAlias = tuple[Unit, ...]
PlacementRule: TypeAlias = Callable[[Model, Units], Units]

# Operators allowed between a convolution and its LayerNormalization: channels are moved last and back.
_FP8_OPERATORS = frozenset({"Conv", "Gemm", "MatMul"})
_BETWEEN = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def skip_side_of_residual_add(model: Model, units: Units) -> Units:
    """Of an Add that joins a weighted branch and a skip connection, quantize the skip side only.

    These compilers compute Conv + Add (+ Relu) in one kernel, which a pair between Conv and Add prevents, and read
    the second operand in integers if the skip has a pair. If both sides are weighted, the deeper one fuses.

    Source: NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations ("quantize the
    residual input in skip connections"); github.com/NVIDIA/TensorRT issues 1992 and 3270.
    """
    makers = _weighted_makers(units)
    main = {unit.id: _weighted_side(model, makers, unit) for unit in units if unit.op_type == "Add"}
    fused = {edge[0] for edge in main.values() if edge is not None}
    return tuple(_beside(unit, main.get(unit.id), fused) for unit in units)


def conv_to_layernorm(model: Model, units: Units) -> Units:
    """A convolution before a LayerNormalization gets the pair of its result at the data input of the latter.

    Only the copies Transpose, Reshape, Squeeze, Unsqueeze and Identity may be between, and they are followed
    along their data input; the path may begin at each tensor that the convolution's unit makes. Without the
    pair the compiler chooses convolutions that write float16, with it those that write int8.

    Source: github.com/NVIDIA/Model-Optimizer pull request 1117 (ConvNeXt).
    """
    convs = {node: unit.id for unit in units if unit.op_type == "Conv" for node in unit.nodes}
    gained: dict[str, list[Edge]] = {}
    passed: set[str] = set()  # tensors whose only path leads to the LayerNormalization
    for norm in model.nodes:
        if norm.op_type == "LayerNormalization" and is_default(norm):
            maker, way = _way_back(model, norm.inputs[0])
            if maker is not None and maker.name in convs:
                edge = norm.inputs[0], Consumer(norm.name, 0)
                gained.setdefault(convs[maker.name], []).append(edge)
                # If each tensor on the path has one reader, no other node needs the first one quantized.
                passed |= {way[-1]} if all(_is_private(model, tensor) for tensor in way) else set()
    return tuple(_with_edges(unit, gained.get(unit.id, ()), passed) for unit in units)


def q_before_pad(model: Model, units: Units) -> Units:
    """The pair of an input that a Pad makes is inserted before the Pad.

    Zero is exact in each format used, so padding with it (or with values of the tensor) commutes with the
    pair; between Pad and Conv it would prevent their fusion. A Pad with another constant is not changed.

    Source: github.com/NVIDIA/TensorRT issue 2592 (28 to 21 ms with the pair moved).
    """
    pads = {
        node.outputs[0]: node for node in model.nodes if node.op_type == "Pad" and _pads_alike(model, node)
    }

    def moved(edge: Edge) -> Edge:
        pad = pads.get(edge[0])
        return edge if pad is None else moved((pad.inputs[0], Consumer(pad.name, 0)))

    return tuple(
        replace(unit, edges=tuple(moved(edge) for edge in unit.edges)) if _is_weighted(unit) else unit
        for unit in units
    )


def fp8_operators(model: Model, units: Units) -> Units:
    """In fp8 only Conv, Gemm, MatMul and residual Adds are computed.

    An Add is residual if one side comes directly from a weighted operator.

    Source: github.com/NVIDIA/Model-Optimizer, onnx/quantization/fp8.py: "The quantizable op types for FP8 are
    limited to Conv, Gemm, Matmul, and Residual-Add".
    """

    makers = _weighted_makers(units)

    def computed(unit: Unit) -> bool:
        if unit.op_type == "Add":
            return _weighted_side(model, makers, unit) is not None
        return unit.op_type in _FP8_OPERATORS

    def kept(unit: Unit) -> Unit:
        if computed(unit):
            return unit
        return replace(unit, forms=tuple(form for form in unit.forms if form.choice.format != FP8))

    return tuple(kept(unit) for unit in units)


def copies_read_in_bodies(model: Model, units: Units) -> Units:
    """No pair is before operators that only copy values, if a body of If, Loop or Scan reads the copy.

    These compilers move a DequantizeLinear past Reshape, Transpose, MaxPool and the like, and end the process where the
    reader of the result is in a body.

    Source: ONNX Runtime 1.32 on models of one pair and one such operator, each in a process of its own: MaxPool,
    Reshape and Transpose whose result an If or a Loop reads end it, Relu does not
    (tests/unit/placement/test_copies_read_in_bodies.py).
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
        outputs = tuple(
            name for name in unit.outputs if moved.isdisjoint(end.node for end in model.ends(name))
        )
        if (edges, outputs) == (unit.edges, unit.outputs):
            return unit
        if unit.edges and not edges:
            return replace(unit, forms=())  # its only input would be moved past it
        return with_results(replace(unit, edges=edges), outputs, unit.out_edges)

    return tuple(without(unit) for unit in units) if moved else units


RULES: Mapping[str, PlacementRule] = {
    "copies-read-in-bodies": copies_read_in_bodies,
    "few-channel-conv": few_channel_conv,
    "large-fp8-kernel": large_fp8_kernel,
    "small-gemm": small_gemm,
    "fp8-operators": fp8_operators,
    "whole-attention": whole_attention,
    "transpose-to-matmul": transpose_to_matmul,
    "skip-side-of-residual-add": skip_side_of_residual_add,
    "conv-to-layernorm": conv_to_layernorm,
    "q-before-pad": q_before_pad,
}


def rule_named(name: str) -> PlacementRule:
    """A rule of the table, or one that a backend declares. Raises `ConfigError` for an unknown name."""
    if name in RULES:
        return RULES[name]
    if hooks.declares("placement_rules", name):
        rule: PlacementRule = hooks.load(hooks.declaration_of(hooks.owner_of(name)).placement_rules[name])
        return rule
    known = (*RULES, *hooks.all_names("placement_rules"))
    raise ConfigError(
        f"unknown placement rule '{name}'{did_you_mean(name, known)}", cure=f"known: {', '.join(known)}"
    )


def apply_rules(model: Model, units: Units, names: Iterable[str]) -> Units:
    """Apply rules by name: in the order of the table, then those that backends declare, sorted by name.

    Units without any label left are dropped. Raises `ConfigError` for an unknown name.
    """
    *_, (_, units) = (("", units), *_steps(model, units, names))
    return tuple(unit for unit in units if unit.forms)


def left_out(model: Model, units: Units, names: Iterable[str]) -> dict[str, str]:
    """By node of these units, the first rule after which no label is left, if there is one."""
    before = {node for unit in units for node in unit.nodes}
    told: dict[str, str] = {}
    for name, after in _steps(model, units, names):
        kept = {node for unit in after if unit.forms for node in unit.nodes}
        told |= dict.fromkeys(before - kept - told.keys(), name)
    return told


def _steps(model: Model, units: Units, names: Iterable[str]) -> Iterator[tuple[str, Units]]:
    """The units after each of these rules, in the order in which `apply_rules` applies them."""
    wanted = set(names)
    declared = {name: rule_named(name) for name in sorted(wanted - RULES.keys())}
    for name, rule in {**RULES, **declared}.items():
        if name in wanted:
            units = rule(model, units)
            yield name, units


# ---- residual Add -------------------------------------------------------------------------------


def _weighted_makers(units: Units) -> frozenset[str]:
    """The nodes that are weighted units by themselves."""
    return frozenset(unit.id for unit in units if _is_weighted(unit) and len(unit.nodes) == 1)


def _weighted_side(model: Model, makers: frozenset[str], add: Unit) -> Edge | None:
    """The operand that comes directly from one of these and has no other reader; of two, the deeper."""
    sides = []
    for tensor, end in add.edges:
        node = model.producer.get(tensor)
        if node is not None and node.name in makers and _is_private(model, tensor):
            sides.append((node.index, (tensor, end)))
    if not sides or len(add.edges) < 2:
        return None
    depths = {edge: _depth(model, edge[0]) for _, edge in sides}
    return max(sides, key=lambda side: (depths[side[1]], side[0]))[1]


def _beside(unit: Unit, main: Edge | None, fused: set[str]) -> Unit:
    if main is not None:
        return replace(unit, edges=tuple(edge for edge in unit.edges if edge != main))
    kept = tuple(tensor for tensor in unit.outputs if tensor not in fused)
    return unit if kept == unit.outputs else with_results(unit, kept, unit.out_edges)


def _depth(model: Model, tensor: str) -> int:
    """Number of weighted operators above a tensor on the longest path, within the depth of a block."""
    depth, front = 0, {tensor}
    for _ in range(16):  # blocks are shorter; beyond, both branches share their path
        makers = [model.producer[name] for name in front if name in model.producer]
        depth += any(node.op_type in WEIGHT_INPUT for node in makers)
        front = {name for node in makers for name in node.inputs if name and name not in model.constants}
        if not front:
            break
    return depth


# ---- Conv to LayerNormalization -----------------------------------------------------------------


def _way_back(model: Model, tensor: str) -> tuple[Node | None, list[str]]:
    """The producer of a tensor, copies skipped, and the tensors between."""
    way = [tensor]
    maker = model.producer.get(tensor)
    while maker is not None and maker.op_type in _BETWEEN and is_default(maker):
        way.append(maker.inputs[0])
        maker = model.producer.get(maker.inputs[0])
    return maker, way


def _with_edges(unit: Unit, gained: Iterable[Edge], passed: set[str]) -> Unit:
    edges = tuple(gained)
    if not edges:
        return unit
    full = replace(unit, forms=tuple(map(_giving, unit.forms)))
    outputs = tuple(tensor for tensor in unit.outputs if tensor not in passed)
    return with_results(full, outputs, (*unit.out_edges, *edges))


def _giving(form: Form) -> Form:
    """The form with ``in+out`` as one of its kinds; weight-only forms are unchanged."""
    gives = "in+out" in form.kinds or form.choice.activation is None
    return form if gives else replace(form, kinds=("in+out", *form.kinds))


# ---- shared -------------------------------------------------------------------------------------


def _is_weighted(unit: Unit) -> bool:
    return unit.op_type in WEIGHT_INPUT and any(form.constants for form in unit.forms)


def _is_private(model: Model, tensor: str) -> bool:
    """Whether a tensor has exactly one reader."""
    outside = tensor in model.outputs or tensor in model.captured
    return not outside and len(model.consumers.get(tensor, ())) == 1


def _pads_alike(model: Model, pad: Node) -> bool:
    """Whether a Pad adds zeros or values of its input."""
    if pad.attributes.get("mode", b"constant") != b"constant":
        return True
    if float(str(pad.attributes.get("value", 0.0))) != 0.0:  # an attribute before opset 11
        return False
    value = pad.inputs[2] if len(pad.inputs) > 2 else ""
    return not value or (value in model.constants and not model.array(value).any())
