"""Exhaustive search: every labelling of a small space, pure ones first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from qdqspec.errors import ConfigError
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.search.labels import TiedClass, pure_choices, spread, tied_classes
from qdqspec.search.stepwise import Steps, Stepwise

LIMIT = 1024  # labellings; at two seconds a build, half an hour
BATCH = 16  # proposals that may be built in parallel


class Exhaustive(Stepwise):
    """All labellings of the tied classes. It is deterministic: the order depends on the model only."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:  # noqa: ARG002 - the seam's signature
        super().__init__(self._all(tied_classes(setup.space)), setup)

    @staticmethod
    def refuse(space: SchemeSpace) -> None:
        """Raise `ConfigError` if the space has more labellings than the limit."""
        _count(space)

    @staticmethod
    def default_trials(preset: str, space: SchemeSpace) -> int:  # noqa: ARG004 - all is all, whatever the preset
        """The number of labellings. Raises `ConfigError` if it is above the limit."""
        return _count(space)

    def _all(self, classes: Sequence[TiedClass]) -> Steps[None]:
        yield self.first_proposals()
        space = self.space
        yield [profiled(placement, "pure") for placement in self.thinned_everything()]
        pure = list(pure_choices(space, classes))
        others = (choice for choice in itertools.product(*(c.labels for c in classes)) if choice not in pure)
        proposals = (
            Proposal(placement=placement, phase=phase)
            for phase, choices in (("pure", pure), ("exhaustive", others))
            for choice in choices
            if self.is_worth_building(placement := space.resolve(spread(space, classes, choice)))
        )
        while batch := list(itertools.islice(proposals, BATCH)):
            yield batch


def _count(space: SchemeSpace) -> int:
    """The number of labellings. Raises `ConfigError` if it is above the limit."""
    classes = tied_classes(space)
    count = math.prod(len(tied.labels) for tied in classes)
    if count > LIMIT:
        shown = f"{count:,}" if count < 10**12 else f"10^{math.log10(count):.0f}"
        raise ConfigError(
            f"{len(classes)} kinds of operators can be labelled in {shown} ways; exhaustive search takes {LIMIT:,}",
            where=space.model.where,
            cure="choose the strategy attribution or region, or allow fewer operators under patterns",
        )
    return count


strategy = Exhaustive
