"""Search by subgraphs: fusion groups are timed in isolation, then combined one after another.

For models whose whole build takes minutes. A group is the nodes that a runtime runs as one kernel, with the cheap
operators that follow; groups with equal operators and shapes are of one kind. A few heuristic schemes of each kind are
built as an excerpt of the model, and compared with the same nodes in float without the conversions at their borders.
The schemes that win are added to the whole model, the greatest expected gain first, and kept only if the whole model
wins its race: gains of parts are not additive. The approach is that of ModelOpt's pull request 1015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from qdqspec.graph.ops import ANCHORS, copies_values
from qdqspec.qdq import SchemeSpace, Unit
from qdqspec.search.base import Proposal, Steps, Stepwise, profiled
from qdqspec.search.blocks import Labels, UnitBlock, classes_of, fuse, spent_by_unit
from qdqspec.types import HALVES, LayerTime, Trial, label_of

Win: TypeAlias = tuple[float, Labels]  # the expected gain of a kind of group, as a share of the whole time


class SubgraphSearch(Stepwise):
    """Parts first, then the whole. Deterministic for a sequence of trials: it uses no random numbers.

    Schemes that win alone are added to the whole model in order of their gain, as long as it wins its race. Small ones
    are added together, until the expected gain is ``step`` times ``eps``: a race shows no smaller one.
    """

    step: ClassVar[float] = 2.0

    def _search(self) -> Steps[None]:
        held: Labels = dict(self.incumbent.placement.labels)
        wins: list[Win] = []
        for groups, share in kinds_of(self.space, self.trials[0].layers, self.setup.fused):
            wins += yield from self._alone(groups, share)
        wins.sort(key=lambda win: -win[0])
        raw = self.guide.fitted(
            {unit: label for _, labels in wins for unit, label in labels.items()}, self.spent
        )
        added, gain = Labels(), 0.0
        for number, (gained, labels) in enumerate(wins if self.setup.validate_groups else (), 1):
            added, gain = added | labels, gain + gained
            if gain < self.step * self.eps and number < len(wins):
                continue
            placement = self.space.resolve({**held, **added})
            if self.is_worth_building(placement):
                trials = yield [profiled(placement, "raw" if placement == raw else "validate")]
                held = {**held, **added} if any(trial.incumbent for trial in trials) else held
            added, gain = Labels(), 0.0
        last = [profiled(raw, "raw")] if wins and self.is_worth_building(raw) else []
        yield [*last, *self.fitted_everything()]

    def _alone(self, groups: Sequence[UnitBlock], share: float) -> Steps[list[Win]]:
        """Time the schemes of one kind on its first group; returns the best one, if it has a gain."""
        nodes, resolve = nodes_of(self.space, groups[0]), self.space.resolve
        schemes = {resolve(scheme): name for name, scheme in schemes_of(self.space, groups[0]).items()}
        trials = yield [
            Proposal(placement=placement, phase="isolated", profile=True, subgraph=nodes)
            for placement in (resolve({}), *schemes)
        ]
        reference, *others = trials
        ratios = {t.placement: inner_ratio(t, reference) for t in others if t.ok and t.ratio}
        best = min(ratios, key=ratios.__getitem__, default=None)
        if best is None or not reference.ok or ratios[best] > 1 - self.eps:
            return []
        labels: Labels = {}
        for group in groups:
            labels |= schemes_of(self.space, group).get(schemes[best], {})
        return [(share * (1 - ratios[best]), labels)]


def schemes_of(space: SchemeSpace, group: UnitBlock) -> dict[str, Labels]:
    """The schemes to try on a group, by name, in addition to all float; each once.

    In each format all of it; only the inputs of units with integer inputs and float outputs; only the compute
    operators; only its weights, and only its activations. Schemes with equal pairs are merged.
    """
    units = [space.by_id[name] for name in group.units]
    seen = {space.resolve({}).digest}
    found: dict[str, Labels] = {}
    for choice in space.choices:
        full = {unit.id: label for unit in units if (label := unit.full_in(choice.name)) != "fp"}
        narrow = choice.labels[1]
        wanted: dict[str, Labels] = {
            "full": full,
            "inputs": {unit.id: narrow for unit in units if narrow in unit.labels},
            "core": {name: label for name, label in full.items() if space.by_id[name].op_type in ANCHORS},
        }
        for kind in HALVES:
            half = label_of(choice.name, kind)
            halved = {unit.id: half for unit in units if half in unit.halves}
            # weights alone drop units without weights, activations alone keep them
            wanted[kind] = halved if kind == "weight-only" else {**full, **halved}
        for name, labels in wanted.items():
            digest = space.resolve(labels).digest
            if digest not in seen:
                seen.add(digest)
                found[f"{choice.name} {name}".strip()] = labels
    return found


def inner_ratio(trial: Trial, reference: Trial) -> float:
    """A part's time over that of the same part in float, both without their conversions by their profiles, if any."""
    assert trial.ratio is not None
    shares = []
    for layers in (trial.layers, reference.layers):
        whole = math.fsum(layer.milliseconds for layer in layers)
        inner = math.fsum(layer.milliseconds for layer in layers if not layer.boundary)
        shares.append(inner / whole if whole else 0.0)
    return trial.ratio * shares[0] / shares[1] if all(shares) else trial.ratio


# ---- groups -------------------------------------------------------------------------------------


def kinds_of(
    space: SchemeSpace, layers: Sequence[LayerTime], fused: Sequence[tuple[str, ...]] = ()
) -> list[tuple[list[UnitBlock], float]]:
    """Groups of the same kind, with their share of the whole time, the largest first.

    Kernels are those of ``fused`` if any, else of the profile. Without a profile all units have equal times.
    """
    kernels = [LayerTime(name="", op_type="", milliseconds=0.0, nodes=nodes) for nodes in fused]
    groups = groups_of(space, kernels or layers)
    kinds: dict[int, list[UnitBlock]] = {}
    for group, number in zip(groups, classes_of(space, groups), strict=True):
        kinds.setdefault(number, []).append(group)
    spent = spent_by_unit(space, layers)
    total = math.fsum(layer.milliseconds for layer in layers) or math.fsum(spent.values()) or 1.0
    shares = [
        (found, math.fsum(spent[unit] for group in found for unit in group.units) / total)
        for found in kinds.values()
    ]
    return sorted(shares, key=lambda kind: -kind[1])  # stable: ties in graph order


def groups_of(space: SchemeSpace, layers: Sequence[LayerTime], most_nodes: int = 12) -> list[UnitBlock]:
    """Units that share a kernel, each group extended by the cheap units that read it last, up to ``most_nodes``.

    More nodes make fewer groups, whose parts then need no conversions between them.
    """
    groups: list[list[Unit]] = []
    group_of: dict[str, int] = {}
    for block in fuse(space, layers):
        units = [space.by_id[name] for name in block.units]
        makers = {_maker(space, tensor)[0] for unit in units for tensor, _ in unit.edges}
        number = max((group_of[maker] for maker in makers if maker in group_of), default=None)
        is_cheap = not any(unit.op_type in ANCHORS for unit in units)
        joined = units if number is None else [*groups[number], *units]
        if number is None or not is_cheap or sum(len(unit.nodes) for unit in joined) > most_nodes:
            number = len(groups)
            groups.append([])
        groups[number] += units
        group_of.update(dict.fromkeys(block.units, number))
    return [
        UnitBlock(index=index, units=tuple(unit.id for unit in units), codes=())
        for index, units in enumerate(groups)
    ]


def _maker(space: SchemeSpace, tensor: str) -> tuple[str, list[str]]:
    """The unit that produces a tensor, and the nodes between that only copy."""
    node, copies = space.model.producer.get(tensor), list[str]()
    while node is not None and node.name not in space.unit_of and copies_values(node):
        copies.append(node.name)
        node = space.model.producer.get(node.inputs[0])
    return "" if node is None else space.unit_of.get(node.name, ""), copies


def nodes_of(space: SchemeSpace, group: UnitBlock) -> tuple[str, ...]:
    """The nodes of a group in graph order, including the copies between its units."""
    nodes = {name for unit in group.units for name in space.by_id[unit].nodes}
    for unit in group.units:
        for tensor, _ in space.by_id[unit].edges:
            maker, copies = _maker(space, tensor)
            if maker in group.units:
                nodes.update(copies)
    return tuple(sorted(nodes, key=lambda name: space.model.by_name[name].index))


strategy = SubgraphSearch
