"""Folds a model into a few parts that a report draws: kernels, or several neighbouring ones of a large model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from qdqspec._core.groups import joined
from qdqspec.graph.model import Model
from qdqspec.graph.ops import ANCHORS, made_of_constants
from qdqspec.types import EXACT_DB, BlockError, GraphPart, LayerTime, PlacedPair, Region

MOST_PARTS = 60
_Layers = Sequence[LayerTime]
_Nodes = tuple[int, ...]  # nodes of one part, by their position in the model


def fold_graph(
    model: Model,
    regions: Sequence[Region],
    *,
    reference: _Layers = (),
    tuned: _Layers = (),
    pairs: Iterable[PlacedPair] = (),
    errors: Iterable[BlockError] = (),
    most: int = MOST_PARTS,
) -> tuple[GraphPart, ...]:
    """At most ``most`` parts that hold all nodes that depend on an input, in the order of the model.

    The nodes of one kernel, of either profile, stay together. Of more kernels than ``most``, neighbouring ones are
    joined, in the order of the leaves of ``regions``.
    """
    fixed = made_of_constants(model)
    computed = (
        node for node in model.nodes if not (node.is_marker or fixed.issuperset(filter(None, node.outputs)))
    )
    at = {node.name: node.index for node in computed}
    kernels = (
        [at[n] for n in layer.nodes if n in at] for layer in (*reference, *tuned) if not layer.boundary
    )
    leaves = (region.nodes for region in regions if not region.children)
    leaf_of = {at.get(name, -1): number for number, names in enumerate(leaves) for name in names}
    # the nodes that share a kernel, directly or through another kernel, by the leaf of the first of them
    bundles = sorted(joined(sorted(at.values()), kernels), key=lambda nodes: leaf_of.get(nodes[0], -1))
    groups = sorted(map(sorted, _join_neighbours(bundles, most)))
    home = {i: part for part, group in enumerate(groups) for i in group}
    parts = {name: home[i] for name, i in at.items() if i in home}
    reads: list[set[int]] = [set() for _ in groups]
    for i, part in home.items():
        makers = (model.producer.get(tensor) for tensor in model.nodes[i].inputs)
        reads[part] |= {parts[maker.name] for maker in makers if maker is not None and maker.name in parts}
    formats = _find_formats(pairs, tuned)
    before, after = (_add_times(model, layers, parts) for layers in (reference, tuned))
    times = [any(layer.milliseconds for layer in layers) for layers in (reference, tuned)]
    noise = _add_noise(errors, parts)
    return tuple(
        GraphPart(
            name=min((model.nodes[i] for i in group), key=lambda node: node.op_type not in ANCHORS).name,
            ops=dict(Counter(model.nodes[i].op_type for i in group)),
            formats=dict(Counter(formats[name] for i in group if (name := model.nodes[i].name) in formats)),
            reference_ms=before.get(part, 0.0) if times[0] else None,
            tuned_ms=after.get(part, 0.0) if times[1] else None,
            sqnr_db=min(-10 * math.log10(noise[part]), EXACT_DB) if noise.get(part) else None,
            inputs=tuple(sorted(reads[part] - {part})),
        )
        for part, group in enumerate(groups)
    )


def _join_neighbours(groups: Sequence[_Nodes], most: int) -> list[list[int]]:
    """At most ``most`` runs of neighbours, about equal in nodes if groups are joined."""
    if len(groups) <= most:
        return [list(group) for group in groups]
    goal = sum(map(len, groups)) / most
    runs: list[list[int]] = [[]]
    taken = 0
    for group in groups:
        if runs[-1] and taken >= goal * len(runs) and len(runs) < most:
            runs.append([])
        runs[-1] += group
        taken += len(group)
    return runs


def _find_formats(pairs: Iterable[PlacedPair], tuned: _Layers) -> dict[str, str]:
    """The format in which nodes compute: that of the activations they read, or else of their weights.

    A node that only float kernels of the tuned model compute has none.
    """
    found: dict[str, str] = {}
    for pair in sorted(pairs, key=lambda pair: pair.site.weight):
        for end in pair.site.consumers:
            if not end.is_output:
                found.setdefault(end.node, pair.site.format)
    integer = {name for layer in tuned if layer.integer for name in layer.nodes}
    for layer in tuned:
        if not layer.integer and not layer.boundary:
            for name in set(layer.nodes) - integer:
                found.pop(name, None)
        # an activation function in an integer kernel has no pair of its own
        elif layer.integer and (known := [found[name] for name in layer.nodes if name in found]):
            for name in layer.nodes:
                found.setdefault(name, known[0])
    return found


def _add_times(model: Model, layers: _Layers, parts: Mapping[str, int]) -> dict[int, float]:
    """Milliseconds of each part. A conversion counts for the part that makes its tensor, or else reads it."""
    spent: dict[int, float] = {}
    for layer in layers:
        names = [*layer.nodes]
        for tensor in layer.tensors:
            maker = model.producer.get(tensor)
            names += [maker.name] if maker is not None else []
            names += [end.node for end in model.consumers.get(tensor, ())]
        part = next((parts[name] for name in names if name in parts), None)
        if part is not None:
            spent[part] = spent.get(part, 0.0) + layer.milliseconds
    return spent


def _add_noise(errors: Iterable[BlockError], parts: Mapping[str, int]) -> dict[int, float]:
    """The error's power of each part over the signal's: of its blocks, each quantized in its worst way, added up."""
    worst: dict[str, float] = {}
    for error in errors:
        worst[error.block] = min(error.sqnr_db, worst.get(error.block, math.inf))
    found: dict[int, float] = {}
    for block, sqnr_db in worst.items():
        if block in parts:
            found[parts[block]] = found.get(parts[block], 0.0) + 10 ** (-sqnr_db / 10)
    return found
