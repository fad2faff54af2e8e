"""Applies the placement rules of a backend: constraints on pairs beyond single operators.

A rule takes the units of a model and returns them with pairs moved or removed: some runtimes need both sides of a
residual Add quantized, others the skip side only. Each backend defines its own (`Capabilities.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from qdqspec.config import hooks
from qdqspec.graph.model import Model
from qdqspec.placement.units import Unit

Units: TypeAlias = tuple[Unit, ...]
PlacementRule: TypeAlias = Callable[[Model, Units], Units]


def apply_rules(model: Model, units: Units, rules: Mapping[str, hooks.Hook]) -> dict[str, Units]:
    """The units after each of these rules, by its name, and under the empty name those before all of them.

    A unit without any label left is still among them. Raises `ConfigError` for a rule that cannot be imported.
    """
    stages = {"": units}
    for name, hook in rules.items():
        rule: PlacementRule = hooks.load(hook)
        units = stages[name] = rule(model, units)
    return stages


def excluded_by_rule(stages: Mapping[str, Units]) -> dict[str, str]:
    """By node, the first rule after which no label is left, if there is one; ``stages`` as of `apply_rules`."""
    (_, units), *rest = stages.items()
    excluded: dict[str, str] = {}
    left = {node for unit in units for node in unit.nodes}
    for name, after in rest:
        if after != units:
            kept = {node for unit in after if unit.forms for node in unit.nodes}
            excluded |= dict.fromkeys(left - kept, name)
            left &= kept
        units = after
    return excluded
