"""The noise of each block, for a front of time and accuracy, or once a candidate was below the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qdqspec.accuracy import power_of
from qdqspec.search.base import Proposal, Steps, profiled
from qdqspec.search.blocks import FP, block_labels
from qdqspec.types import Label, Placement, format_of, kind_of

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def measure_noise(search: Attribution, *, prices: int = 12) -> Steps[None]:
    """Give the energy the noise of each block, for a front of time and accuracy or if a limit was exceeded.

    It is known from rehearsals; where nothing can be rehearsed, each block is built alone, and only run for its
    accuracy. For a front, the labellings of least energy at rising prices are built: the convex part of the front
    of time and noise. More ``prices`` of noise give a front with more points, and more builds.
    """
    energy, guide, is_front = search.energy, search.guide, search.setup.pareto
    least_db, measured = guide.limits.aim_db, (trial.sqnr_db for trial in search.trials)
    is_exceeded = least_db is not None and any(db is not None and db < least_db for db in measured)
    if not (is_front or guide.is_bound or is_exceeded) or energy.noise is not None:
        return
    everything = search.space.resolve(search.space.everything())
    if not guide.has_noise and guide.unbuilt_db(everything) is None:
        noise = yield from _built_noise(search)
        guide.predict_by(noise, search.trials)
    energy.noise = guide.block_noise(energy.blocks)
    if is_front and energy.noise is not None:
        largest = float(energy.noise.max(axis=1, initial=0.0).sum())
        rate = float(energy.times[:, FP].sum()) / max(largest, 1e-12)
        codes = [energy.minimize(price=rate * 10**each) for each in np.linspace(-2, 4, prices)]
        yield [profiled(energy.placed(each), "trade") for each in codes]


def _built_noise(search: Attribution) -> Steps[dict[tuple[str, Label], float]]:
    """The noise of units from builds of each block alone, in each format; its units share it equally."""
    space, blocks = search.space, search.energy.blocks
    labels, alone = space.labels, dict[tuple[int, str], Placement]()
    for block in blocks:
        quantized = (code for code in block.codes if code != FP)
        for code in sorted(quantized, key=lambda code: kind_of(labels[code]) != "in+out"):
            key = block.index, format_of(labels[code])
            alone.setdefault(key, space.resolve(block_labels(space, block, code)))
    trials = yield [Proposal(placement=each, phase="sensitivity", timed=False) for each in alone.values()]
    known = (*search.trials, *trials)
    measured = {trial.placement: trial.sqnr_db for trial in known if trial.sqnr_db is not None}
    return {
        # a block that could not be built alone counts as one of 20 dB
        (unit, label): power_of(measured.get(alone[block.index, format_of(label)], 20.0)) / len(block.units)
        for block in blocks
        for unit in block.units
        for label in (*space.by_id[unit].labels[1:], *space.by_id[unit].halves)
        if (block.index, format_of(label)) in alone
    }
