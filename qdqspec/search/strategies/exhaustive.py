"""Exhaustive search: every labelling of a small space, pure ones first."""

from __future__ import annotations

import itertools
import math

from qdqspec.errors import ConfigError
from qdqspec.qdq import SchemeSpace
from qdqspec.search.base import Proposal, Steps, Stepwise
from qdqspec.search.blocks import labels_of, tie, uniform_codes

LIMIT = 1024  # labellings; at two seconds a build, half an hour


class Exhaustive(Stepwise):
    """All labellings of the tied classes. It is deterministic: the order depends on the model only."""

    @staticmethod
    def refuse(space: SchemeSpace) -> None:
        """Raise `ConfigError` if the space has more labellings than the limit."""
        Exhaustive.default_trials("", space)

    @staticmethod
    def default_trials(preset: str, space: SchemeSpace) -> int:  # noqa: ARG004 - all is all, whatever the preset
        """The number of labellings. Raises `ConfigError` if it is above the limit."""
        blocks = tie(space)
        count = math.prod(len(block.codes) for block in blocks)
        if count > LIMIT:
            shown = f"{count:,}" if count < 10**12 else f"10^{math.log10(count):.0f}"
            what = f"{len(blocks)} kinds of operators can be labelled in {shown} ways"
            cure = "choose the strategy attribution or region, or allow fewer operators under patterns"
            raise ConfigError(
                f"{what}; exhaustive search takes {LIMIT:,}", where=space.model.where, cure=cure
            )
        return count

    def _search(self) -> Steps[None]:
        space, blocks = self.space, tie(self.space)
        yield self.fitted_everything()
        every = itertools.product(*(block.codes for block in blocks))
        labellings = itertools.chain(
            (("pure", codes) for codes in uniform_codes(space, blocks)),
            (("exhaustive", codes) for codes in every),
        )
        proposals = (
            Proposal(placement=placement, phase=phase)
            for phase, codes in labellings
            if self.is_worth_building(placement := space.resolve(labels_of(space, blocks, codes)))
        )
        while batch := list(itertools.islice(proposals, 16)):
            yield batch


strategy = Exhaustive
