"""Finds the sites of a placement, and fits their numbers, in a model with other names of tensors or nodes.

Quantizing tools rename tensors, and exporters rename nodes. A site is searched by its own names; then by the
nodes that read it, which keep their names more often than tensors do; then by the position of these nodes in
the graph, if the source of the placement recorded it (`positions`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from qdqspec.errors import PlacementError
from qdqspec.graph import Model, Node, fold_weights
from qdqspec.graph.ops import QDQ_OPS, is_commutative
from qdqspec.qdq.chains import Equalization
from qdqspec.qdq.equalize import equalized, misfit_of
from qdqspec.qdq.formats import BIAS_FORMAT, QuantParams, number_format
from qdqspec.qdq.pairs import biased_layer, misfit
from qdqspec.qdq.quantizer import params_of, unpacked
from qdqspec.types import Consumer, PlacedPair, Placement, Site

STEPS, SHIFTS = np.dtype(np.int8), np.dtype("<f4")  # of a rounding, and of a bias
# Tools remove and insert these, so that they do not count for the positions of others.
PASSED_OVER = QDQ_OPS | {"BatchNormalization", "Cast", "Clip", "Constant", "Dropout", "Identity", "Relu"}


@dataclass
class Matcher:
    """Finds sites in one model. ``known`` are positions of nodes in the model that the sites come from."""

    model: Model
    known: Mapping[str, str] = field(default_factory=dict)

    def find(self, site: Site) -> tuple[list[Site], list[str]]:
        """The sites of a site in this model, one for each tensor that its consumers read, and reasons against others.

        A site that fits by its own names is returned unchanged.
        """
        why = misfit(self.model, site)
        if why is None:
            return [site], []
        read: dict[str, list[Consumer]] = {}
        reasons: list[str] = []
        for end in site.consumers:
            node = None if end.is_output else self._node(end.node)
            if end.is_output and site.tensor in self.model.output_ends:
                read.setdefault(site.tensor, []).append(self.model.output_ends[site.tensor])
            elif end.is_output:
                reasons.append("the model has no output of that name")
            elif node is None:
                reasons.append(f"the model has no node '{end.node}', and none in its position")
            elif not node.input_at(end.input):
                reasons.append(f"node '{node.name}' has no input {end.input}")
            else:
                read.setdefault(node.inputs[end.input], []).append(Consumer(node.name, end.input))
        sites = []
        for tensor, ends in read.items():
            is_weight = tensor in self.model.constants
            moved = replace(site, tensor=tensor, consumers=tuple(sorted(ends)), weight=is_weight)
            other = misfit(self.model, moved)
            if is_weight != site.weight:
                other = "it is a constant in one of the models only"
            if other is None:
                sites.append(moved)
            else:
                reasons.append(other)
        return sites, list(dict.fromkeys(reasons or ([] if sites else [why])))

    def _node(self, name: str) -> Node | None:
        """The node of that name, or else of its position; it must have the same operator.

        For nodes without a name, which are numbered, the position decides, because the numbers change with
        each added node.
        """
        node = self.model.by_name.get(name)
        position = self.known.get(name)
        if position is None:
            return node
        is_named = node is not None and position.startswith(f"{node.op_type}:")
        if is_named and "#" not in name:
            return node
        found = self._by_position.get(position)
        return self.model.by_name[found] if found is not None else node if is_named else None

    @cached_property
    def _by_position(self) -> dict[str, str]:
        return {position: name for name, position in positions(self.model).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPairs:
    """The pairs of a scheme under the names of one model, for which it may have been prepared, with notes on that.

    ``moved`` are the tensors with other names there, ``reasons`` why others were omitted, in whole or in
    part; both by their names in the scheme.
    """

    model: Model
    pairs: tuple[PlacedPair, ...]
    moved: tuple[str, ...]
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        """The sites without numbers."""
        return Placement(sites=frozenset(pair.site for pair in self.pairs))

    @property
    def numbers(self) -> SchemeNumbers:
        """The numbers in the form that insertion needs."""
        return SchemeNumbers(self.model, self.pairs)

    @property
    def floating(self) -> frozenset[Site]:
        """The weights that are stored as floats, behind Q and DQ."""
        return frozenset(pair.site for pair in self.pairs if not pair.stored)

    @property
    def groups(self) -> list[tuple[Site, ...]]:
        """The sites in graph order of their readers; a bias is grouped with the weight of its node."""
        sites = {pair.site for pair in self.pairs}
        biases = {site.consumers[0].node: site for site in sites if site.format == BIAS_FORMAT}
        found: list[tuple[Site, ...]] = []

        def place(site: Site) -> tuple[int, str]:
            by_name = self.model.by_name
            readers = (by_name[end.node].index for end in site.consumers if end.node in by_name)
            return min(readers, default=0), site.row

        for site in sorted(sites, key=place):
            if site.format != BIAS_FORMAT:
                bias = biases.pop(site.consumers[0].node, None) if site.weight and site.consumers else None
                found.append((site,) if bias is None else (site, bias))
        return found + [(site,) for site in biases.values()]


class SchemeNumbers:
    """The numbers of a scheme in the form that insertion needs."""

    def __init__(self, model: Model, pairs: Iterable[PlacedPair]) -> None:
        self._model = model
        self._pairs = {pair.site: pair for pair in pairs}

    def params(self, site: Site) -> QuantParams:
        """Scale and zero point of a site."""
        return params_of(self._pair(site), shape_of(self._model, site))

    def integer_weight(self, site: Site) -> npt.NDArray[np.generic]:
        """The constant of a site as integers."""
        values = self._model.array(site.tensor).astype(np.float32, copy=False)
        nearest = self.params(site).quantize(values)
        text = self._pair(site).rounding
        if not text:
            return nearest
        steps = unpacked(text, STEPS, nearest.size).astype(np.int64).reshape(nearest.shape)
        return np.asarray((nearest.astype(np.int64) + steps).astype(nearest.dtype))

    def bias_shift(self, site: Site) -> npt.NDArray[np.float32] | None:
        """The shift of the bias of the layer that reads this weight."""
        text = self._pair(site).bias if site.weight else ""
        layer = biased_layer(self._model, site) if text else None
        return None if layer is None else unpacked(text, SHIFTS, layer.channels).astype(np.float32)

    def _pair(self, site: Site) -> PlacedPair:
        """The pair of a site, or of the site with more consumers that it is part of."""
        if site not in self._pairs:
            alike = (known for known in self._pairs if replace(known, consumers=site.consumers) == site)
            whole = next(known for known in alike if set(site.consumers) <= set(known.consumers))
            self._pairs[site] = self._pairs[whole]
        return self._pairs[site]


def fit_pairs(
    model: Model,
    pairs: Iterable[PlacedPair],
    positions: Mapping[str, str] | None = None,
    *,
    with_numbers: bool = True,
) -> FittedPairs:
    """The pairs as sites of a model. If two read the same input, the first one is kept.

    Without numbers, those of a pair may be for other channels than the model has.
    """
    matcher = Matcher(model, positions or {})
    fitted: list[PlacedPair] = []
    moved: list[str] = []
    reasons: dict[str, str] = {}
    taken: set[Consumer] = set()
    for pair in pairs:
        sites, problems = matcher.find(pair.site)
        for site in sites:
            there = replace(pair, site=site)
            if with_numbers and (why := _explain_numbers(model, there)) is not None:
                problems.append(why)
            elif taken.intersection(site.consumers):
                problems.append("another site of the scheme quantizes the same input")
            else:
                taken.update(site.consumers)
                fitted.append(there)
                moved += [] if site == pair.site else [pair.site.tensor]
        if problems:
            reasons[pair.site.tensor] = problems[0]
    return FittedPairs(model=model, pairs=tuple(fitted), moved=tuple(dict.fromkeys(moved)), reasons=reasons)


def fit_scheme(
    model: Model,
    pairs: Sequence[PlacedPair],
    positions: Mapping[str, str] | None = None,
    factors: Sequence[Equalization] = (),
) -> FittedPairs:
    """The pairs as sites of the model that they were made for, equalized by these factors.

    It is folded as in tuning unless more pairs, or their scales, fit it without: folding replaces two tensors by one,
    and changes weights. Raises `PlacementError` if it cannot have the factors.
    """
    folded, found = fold_weights(model), fit_pairs(model, pairs, positions)
    if pairs and folded.missing:
        other = replace(fit_pairs(folded.model, pairs, positions), notes=(folded.note,))
        # most pairs, then most by their own names, then those with scales for these weights
        found = max(
            (other, found),
            key=lambda fit: (len(fit.pairs), -len(fit.moved), -_weight_error(fit.model, fit.pairs)),
        )
    if not factors:
        return found
    if (why := misfit_of(found.model, factors)) is not None:
        raise PlacementError(
            f"the scheme is for scaled channels, and {why}",
            where=model.where,
            cure="apply it to the float model that it was made for",
        )
    return replace(fit_pairs(equalized(found.model, factors), pairs, positions), notes=found.notes)


def _weight_error(model: Model, pairs: Iterable[PlacedPair]) -> float:
    """The noise that the pairs add to their weights, in proportion; the sum over the weights."""
    total = 0.0
    for pair in pairs:
        if pair.site.weight:
            weight = model.array(pair.site.tensor).astype(np.float32)
            params = params_of(pair, weight.shape)
            noise = params.dequantize(params.quantize(weight)) - weight
            total += float(np.sum(noise**2) / max(float(np.sum(weight**2)), 1e-30))
    return total


def _explain_numbers(model: Model, pair: PlacedPair) -> str | None:
    """The reason why the numbers or corrections of a pair do not fit its site in a model; ``None`` if they do."""
    site, shape, fmt = pair.site, shape_of(model, pair.site), number_format(pair.site.format)
    if (reason := misfit(model, site)) is not None:
        return reason
    layer = biased_layer(model, site) if pair.bias else None
    if pair.bias and layer is None:
        return "the scheme corrects the bias of its layer, which has none of its own"
    checked = "its rounding"
    try:
        if pair.rounding:
            unpacked(pair.rounding, STEPS, prod(shape))
        checked = "the bias of its layer"
        if layer is not None:
            unpacked(pair.bias, SHIFTS, layer.channels)
    except ValueError as error:
        return f"{checked} does not fit: {error}"
    if site.axis is None or (fmt.dynamic and not site.weight):
        return None
    channels = shape[site.axis] if site.axis < len(shape) else 0
    wanted = prod(shape) // channels * -(-channels // fmt.block) if fmt.block and channels else channels
    if wanted != len(pair.scale):
        what = f"blocks of {fmt.block}" if fmt.block else "channels"
        return f"it has {wanted or 'no'} {what} on axis {site.axis}, the scheme {len(pair.scale)}"
    return None


def shape_of(model: Model, site: Site) -> tuple[int, ...]:
    """The shape of a constant; unknown dimensions of other tensors are 0."""
    return tuple(dim or 0 for dim in model.shape(site.tensor) or ())


# ---- positions of nodes -------------------------------------------------------------------------------


def positions(model: Model) -> dict[str, str]:
    """The position of each node in the graph, as text independent of the names of tensors and nodes.

    ``Conv:5f0c12ab34cd:3/8`` is the third of eight Conv nodes with the same surroundings: operators up to
    three nodes away on either side and the shapes of their weights (Weisfeiler-Lehman labels), counted from
    the inputs on.
    """
    labels = _label_nodes(model)
    alike: defaultdict[str, list[Node]] = defaultdict(list)
    for node in model.nodes:
        alike[labels[node.name]].append(node)
    return {
        node.name: f"{node.op_type}:{label}:{number}/{len(nodes)}"
        for label, nodes in alike.items()
        for number, node in enumerate(nodes, start=1)
    }


def _label_nodes(model: Model, rounds: int = 3) -> dict[str, str]:
    """A label for each node, equal for nodes with the same surroundings of up to ``rounds`` nodes on either side."""
    labels = {}
    for node in model.nodes:  # shapes of constants that are weights; biases and bounds are ignored
        dims = [list(model.constants[name].dims) for name in node.inputs if name in model.constants]
        weights = [str(shape) for shape in dims if len(shape) > 1]
        labels[node.name] = _digest([node.domain, node.op_type, *weights])
    readers = {node.name: _find_readers(model, node) for node in model.nodes}
    makers = {node.name: _find_makers(model, node) for node in model.nodes}
    for _ in range(rounds):
        before, labels = labels, {}
        for node in model.nodes:
            operands = [before.get(name, name) for name in makers[node.name]]
            operands = sorted(operands) if is_commutative(node, model.opset) else operands
            read = sorted(f"{end.input} {before.get(end.node, 'output')}" for end in readers[node.name])
            labels[node.name] = _digest([before[node.name], *operands, "read by", *read])
    return labels


def _find_makers(model: Model, node: Node) -> list[str]:
    """The source of each operand that is not a constant: a node's name, or that it is a graph input."""
    found = []
    for tensor in node.inputs:
        maker = model.producer.get(tensor)
        while maker is not None and maker.op_type in PASSED_OVER and maker.inputs:
            tensor = maker.inputs[0]
            maker = model.producer.get(tensor)
        if tensor and tensor not in model.constants:
            found.append("input" if maker is None else maker.name)
    return found


def _find_readers(model: Model, node: Node) -> list[Consumer]:
    """The consumers of a node's outputs, after skipped nodes."""
    found, waiting = [], list(node.outputs)
    while waiting:
        for end in model.ends(waiting.pop()):
            reader = None if end.is_output else model.by_name[end.node]
            if reader is not None and reader.op_type in PASSED_OVER:
                waiting.extend(reader.outputs)
            else:
                found.append(Consumer("", 0) if end.is_output else end)
    return found


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
