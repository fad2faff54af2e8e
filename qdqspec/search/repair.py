"""The last attempt of a search that found nothing: candidates that just missed the SQNR limit, with less noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._classes import spent_by_unit
from qdqspec.search._guide import Guide
from qdqspec.search.base import AccuracyOracle
from qdqspec.types import NOT_CANDIDATES, Placement, Trial

NEAR_DB = 3.0  # below the limit, at most
MORE_DB = (0.3, 1.0)  # above the limit that the placements aim at: a prediction missed it before
CANDIDATES = 2  # that are repaired, the fastest first


def repaired(
    trials: Sequence[Trial],
    sqnr_db: Callable[[Trial], float | None],
    least_db: float,
    min_gain: float,
    oracle: AccuracyOracle,
    space: SchemeSpace,
) -> Iterator[Placement]:
    """The fastest candidates that just missed the limit, without the units with the most noise for their time.

    ``trials`` are those of the search, the reference first; ``sqnr_db`` gives what is measured of one, on all data if
    known. A gain of ``min_gain`` or less is not worth it. There are none if a candidate has won, or if the oracle
    predicts nothing.
    """
    if any(trial.incumbent and trial.placement.sites for trial in trials):
        return
    guide, spent = Guide(oracle), spent_by_unit(space, trials[0].layers)
    missing: dict[Placement, tuple[float, float]] = {}  # the ratio, and what the SQNR lacks
    for trial in trials:
        found_db = sqnr_db(trial) if _is_faster(trial, min_gain) else None
        if found_db is not None and 0 < least_db - found_db <= NEAR_DB:
            missing[trial.placement] = trial.ratio or 1.0, least_db - found_db
    seen = {trial.placement for trial in trials}
    for near in sorted(missing, key=lambda each: missing[each])[:CANDIDATES]:
        predicted_db = guide.predicted_db(near)
        if predicted_db is None:
            continue
        for more in MORE_DB:
            aim = predicted_db + missing[near][1] + more - guide.doubt_db
            placement = space.resolve(guide.thinned(space, dict(near.labels), aim, spent))
            if placement.sites and placement not in seen:
                seen.add(placement)
                yield placement


def _is_faster(trial: Trial, min_gain: float) -> bool:
    is_candidate = trial.ok and trial.phase not in NOT_CANDIDATES and not trial.subgraph
    return is_candidate and trial.ratio is not None and trial.ratio < 1 - min_gain
