"""What may be chosen: units of operators with the labels each may carry, and what a choice comes to.

A unit is an operator with the activation functions that fuse into it. Given one label a unit, `resolve`
says where the Q/DQ pairs stand. May import floors 0 to 2; knows nothing of search or measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model, Node
from qdqspec.placement.ops import NEVER, channel_axis, data_inputs, is_float, weight_input
from qdqspec.types import Consumer, Label, Placement, QuantizeRules, Region, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator, what fuses into it, and what is quantized under its labels.

    ``edges`` are its activation inputs, ``constants`` its weights and constant operands, ``outputs`` the
    tensors that get a pair under ``in+out``. ``labels`` always begins with ``fp``.
    """

    id: str
    op_type: str
    nodes: tuple[str, ...]
    labels: tuple[Label, ...]
    edges: tuple[tuple[str, Consumer], ...]
    constants: tuple[Site, ...]
    outputs: tuple[str, ...]

    @property
    def full(self) -> Label:
        """The label that quantizes most of it."""
        return "in+out" if "in+out" in self.labels else self.labels[-1]


class SchemeSpace:
    """All placements of one model that the backend can use and the spec allows."""

    def __init__(
        self,
        model: Model,
        capabilities: Capabilities,
        *,
        allowed: Collection[str] | None = None,
        rules: QuantizeRules | None = None,
        regions: tuple[Region, ...] = (),
    ) -> None:
        self.model = model
        self.regions = regions
        self.rules = rules or QuantizeRules()
        self.activation = _activation_format(self.rules, capabilities)
        self._weight = capabilities.weights.get(self.rules.format, self.rules.format)
        self.units: tuple[Unit, ...] = tuple(self._find_units(capabilities, allowed))

    @cached_property
    def by_id(self) -> dict[str, Unit]:
        """Units by their id, the name of their first node."""
        return {unit.id: unit for unit in self.units}

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """Unit id by node name, for the nodes that belong to one."""
        return {node: unit.id for unit in self.units for node in unit.nodes}

    @property
    def tensors(self) -> frozenset[str]:
        """Activations that any choice may quantize: what calibration must know."""
        return frozenset(t for unit in self.units for t in (*(e[0] for e in unit.edges), *unit.outputs))

    def known(self, tensors: Collection[str]) -> SchemeSpace:
        """The same space less the units that touch an activation without a calibrated range."""
        smaller = SchemeSpace.__new__(SchemeSpace)
        smaller.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("by_id", "unit_of")})
        units = []
        for unit in self.units:
            if all(tensor in tensors for tensor, _ in unit.edges):
                outputs = tuple(t for t in unit.outputs if t in tensors)
                labels = unit.labels if outputs else tuple(x for x in unit.labels if x != "in+out")
                if len(labels) > 1:
                    units.append(replace(unit, outputs=outputs, labels=labels))
        smaller.units = tuple(units)
        return smaller

    def resolve(self, labels: Mapping[str, Label]) -> Placement:
        """Where the pairs stand when each unit carries its label; units not named stay ``fp``."""
        covered: dict[str, set[Consumer]] = {}
        constants: dict[tuple[str, str, int | None], set[Consumer]] = {}
        for name, label in labels.items():
            if label != "fp":
                self._add(self.by_id[name], label, covered, constants)
        sites = [
            Site(tensor=tensor, consumers=tuple(ends), format=self.activation)
            for tensor, ends in covered.items()
        ]
        sites += [
            Site(tensor=tensor, consumers=tuple(ends), format=fmt, axis=axis, weight=True)
            for (tensor, fmt, axis), ends in constants.items()
        ]
        chosen = tuple(sorted((name, label) for name, label in labels.items() if label != "fp"))
        return Placement(sites=frozenset(sites), labels=chosen)

    def _add(
        self,
        unit: Unit,
        label: Label,
        covered: dict[str, set[Consumer]],
        constants: dict[tuple[str, str, int | None], set[Consumer]],
    ) -> None:
        for tensor, end in unit.edges:
            covered.setdefault(tensor, set()).add(end)
        for site in unit.constants:
            constants.setdefault((site.tensor, site.format, site.axis), set()).update(site.consumers)
        if label == "in+out":
            for tensor in unit.outputs:
                covered.setdefault(tensor, set()).update(self.model.consumers[tensor])

    def uniform(self, wanted: Label) -> dict[str, Label]:
        """Every unit that offers the label gets it; the others stay ``fp``."""
        return {unit.id: wanted for unit in self.units if wanted in unit.labels}

    def everything(self) -> dict[str, Label]:
        """Every unit quantized as far as it can be."""
        return {unit.id: unit.full for unit in self.units}

    def _find_units(self, capabilities: Capabilities, allowed: Collection[str] | None) -> Iterable[Unit]:
        taken: set[str] = set()
        for node in self.model.nodes:
            offered = capabilities.labels.get(node.op_type, ())
            if node.name in taken or not offered or node.op_type in NEVER:
                continue
            if allowed is not None and node.name not in allowed:
                continue
            unit = self._unit(node, offered, capabilities.absorbs)
            if unit is not None:
                taken.update(unit.nodes)
                yield unit

    def _unit(self, node: Node, offered: tuple[Label, ...], absorbs: frozenset[str]) -> Unit | None:
        inputs = self._inputs(node)
        if inputs is None:
            return None
        chain = self._chain(node, absorbs)
        outputs = tuple(t for t in chain[-1].outputs if self._can_quantize(t))
        labels: tuple[Label, ...] = tuple(label for label in offered if label != "in+out" or outputs)
        if not labels:
            return None
        return Unit(
            id=node.name,
            op_type=node.op_type,
            nodes=tuple(n.name for n in chain),
            labels=("fp", *labels),
            edges=inputs[0],
            constants=inputs[1],
            outputs=outputs if "in+out" in labels else (),
        )

    def _inputs(self, node: Node) -> tuple[tuple[tuple[str, Consumer], ...], tuple[Site, ...]] | None:
        """Activation edges and constant sites of a node; ``None`` where one of them cannot be quantized."""
        weight = weight_input(self.model, node)
        if weight is None and node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            return None  # a weight that is computed: no integer kernel takes it
        edges, constants = [], []
        for index in data_inputs(node):
            tensor, end = node.inputs[index], Consumer(node.name, index)
            if not is_float(self.model, tensor):
                return None
            if tensor in self.model.constants:
                constants.append(self._constant(node, index, index == weight))
            else:
                edges.append((tensor, end))
        return (tuple(edges), tuple(constants)) if edges else None

    def _constant(self, node: Node, index: int, is_weight: bool) -> Site:
        axis = None
        if is_weight and self.rules.weights == "per-channel":
            axis = channel_axis(self.model, node, index)
        return Site(
            tensor=node.inputs[index],
            consumers=(Consumer(node.name, index),),
            format=self._weight if is_weight else self.activation,
            axis=axis,
            weight=True,
        )

    def _chain(self, node: Node, absorbs: frozenset[str]) -> list[Node]:
        """The node and the activation functions after it that its kernel takes in."""
        chain = [node]
        while len(chain[-1].outputs) == 1 and self._interior(chain[-1].outputs[0]):
            follower = self.model.by_name[self.model.consumers[chain[-1].outputs[0]][0].node]
            if follower.op_type not in absorbs or follower.inputs[0] != chain[-1].outputs[0]:
                break
            if any(t and t not in self.model.constants for t in follower.inputs[1:]):
                break
            chain.append(follower)
        return chain

    def _interior(self, tensor: str) -> bool:
        ends = self.model.consumers.get(tensor, ())
        return len(ends) == 1 and tensor not in self.model.outputs and tensor not in self.model.subgraph_reads

    def _can_quantize(self, tensor: str) -> bool:
        return bool(tensor) and bool(self.model.consumers.get(tensor)) and is_float(self.model, tensor)


def _activation_format(rules: QuantizeRules, capabilities: Capabilities) -> str:
    if rules.activations != "auto":
        return rules.activations
    return capabilities.activations.get(rules.format, rules.format)
