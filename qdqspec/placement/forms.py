"""The formats that a case may choose among, and the quantized parts of a unit in each.

The backend defines how a format is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qdqspec.backends.base import Capabilities
from qdqspec.quantize.formats import RUN_TIME, number_format
from qdqspec.types import HALVES, Kind, Label, QuantizeRules, Site, label_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """One of a case's formats as its backend stores it.

    ``name`` is the prefix of the kind in labels, ``""`` for the case's first format. ``activation`` and
    ``weight`` are names of `qdqspec.quantize.formats`; without an activation, only weights are quantized.
    ``dynamic`` is true where the backend has kernels that find the ranges of activations at run time.
    """

    format: str
    name: str
    weight: str
    activation: str | None
    dynamic: bool = False

    @property
    def block(self) -> int:
        """Number of elements of a weight that share a scale along the summed axis; 0 for scales per channel."""
        return number_format(self.weight).block

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels that any unit may have in this format."""
        kinds: tuple[Kind, ...] = ("in+out", "in-only", *(("dynamic",) if self.dynamic else ()))
        return tuple(label_of(self.name, kind) for kind in kinds)

    def reads(self, kind: Kind) -> str | None:
        """The format of the activations that an operator with a label of this kind reads; none where it reads float."""
        if kind == "dynamic":
            return RUN_TIME
        return None if kind in ("fp", "weight-only") else self.activation


def format_choices(rules: QuantizeRules, capabilities: Capabilities) -> tuple[FormatChoice, ...]:
    """The formats of a case that the backend supports, in the case's order; of those stored alike, the first.

    A case of one format gets it, whether the backend lists it or not: the caller has verified it.
    """
    known = [name for name in rules.formats if name in capabilities.formats] or [rules.formats[0]]
    found: dict[tuple[str, str | None], FormatChoice] = {}
    for name in known:
        stored = _stored(name, rules, capabilities)
        label = "" if not found else name
        dynamic = name in capabilities.dynamic
        choice = FormatChoice(
            format=name, name=label, weight=stored[0], activation=stored[1], dynamic=dynamic
        )
        found.setdefault(stored, choice)
    return tuple(found.values())


def _stored(name: str, rules: QuantizeRules, capabilities: Capabilities) -> tuple[str, str | None]:
    weight = capabilities.weights.get(name, name)
    blocked = number_format(weight).block
    activation = capabilities.activations.get(name, None if blocked else name)
    return (
        weight,
        activation if activation is None or blocked or rules.activations == "auto" else rules.activations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The quantized parts of a unit in one format: its kinds of labels, its constants and int32 biases."""

    choice: FormatChoice
    kinds: tuple[Kind, ...]
    constants: tuple[Site, ...]
    biases: tuple[Site, ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels of a unit in this format."""
        return tuple(label_of(self.choice.name, kind) for kind in self.kinds)

    @property
    def halves(self) -> tuple[Label, ...]:
        """The labels that quantize constants alone and activations alone; none if it has only one of them."""
        has_both = self.choice.activation is not None and self.constants and self.kinds != ("dynamic",)
        return tuple(label_of(self.choice.name, kind) for kind in HALVES) if has_both else ()

    @property
    def full(self) -> Label:
        """The label that quantizes most: the kinds are in that order."""
        return self.labels[0]

    def without(self, unwanted: Kind) -> Form:
        """The form without one kind; an int32 bias is removed with ``in-only``, the only kind that needs it."""
        kinds = tuple(kind for kind in self.kinds if kind != unwanted)
        return replace(self, kinds=kinds, biases=() if unwanted == "in-only" else self.biases)
