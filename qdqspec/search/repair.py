"""The last attempt of a search: candidates that just missed the SQNR limit and are much faster, with less noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._bounded import Bounded, NoiseModel
from qdqspec.search._classes import spent_by_unit
from qdqspec.search._guide import Guide
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.blocks import CostModel
from qdqspec.types import NOT_CANDIDATES, Placement, Trial

NEAR_DB = 3.0  # below the limit, at most
MORE_DB = (0.3, 0.6, 1.2, 2.4)  # above the limit that the attempts aim at: a prediction missed it before
MUCH = 0.1  # of the winner's time that a candidate saves, if something has won
CANDIDATES = 2  # that are repaired, the fastest first


def repaired(
    trials: Sequence[Trial],
    sqnr_db: Callable[[Trial], float | None],
    least_db: float,
    min_gain: float,
    oracle: AccuracyOracle,
    space: SchemeSpace,
) -> Iterator[Placement]:
    """Placements with a little less noise than the fastest candidates that just missed the limit.

    Each is the faster, by the profiles of the search, of two: the candidate without the units with the most noise for
    their time, and the labelling of least time for the allowed noise. ``trials`` are those of the search, the reference
    first; ``sqnr_db`` gives what is measured of one, on all data if known. A gain of ``min_gain`` or less is not worth
    it, nor one of less than `MUCH` over what has won. There are none if the oracle predicts nothing. The trial of a
    placement is the last of ``trials`` when the next one is requested; if it just misses the limit too, the next one
    has less noise.
    """
    won = [trial.ratio or 1.0 for trial in trials if trial.incumbent and trial.placement.sites]
    bound = min(won) * (1 - MUCH) if won else 1 - min_gain
    guide, spent = Guide(oracle), spent_by_unit(space, trials[0].layers)

    def missing_db(trial: Trial) -> float | None:
        """What the SQNR of a trial that just missed the limit lacks; ``None`` of others."""
        found_db = sqnr_db(trial) if _is_faster(trial, bound) else None
        return None if found_db is None or not 0 < least_db - found_db <= NEAR_DB else least_db - found_db

    seen = {trial.placement for trial in trials}
    missed = {trial.placement: trial for trial in trials if missing_db(trial) is not None}
    if not missed:
        return
    costs = CostModel.of(space, trials)
    powers = guide.powers(space, costs.blocks)
    bounded = None if powers is None else Bounded(costs, NoiseModel(powers), guide)

    def with_less_noise(placement: Placement, least_db: float) -> Placement:
        options = [space.resolve(guide.thinned(space, dict(placement.labels), least_db, spent))]
        if bounded is not None:
            options.append(costs.placed(bounded.compose(least_db)))
        fresh = [option for option in options if option.sites and option not in seen]
        return min(fresh, key=lambda each: costs.predict(costs.codes_of(each)), default=space.resolve({}))

    for near in sorted(missed.values(), key=lambda trial: trial.ratio or 1.0)[:CANDIDATES]:
        lacking_db = missing_db(near)
        for more_db in MORE_DB:
            predicted_db = guide.predicted_db(near.placement)
            if predicted_db is None or lacking_db is None:
                break
            aim = predicted_db + lacking_db + more_db - guide.doubt_db
            placement = with_less_noise(near.placement, aim)
            if placement.sites:
                seen.add(placement)
                yield placement
                if missing_db(trials[-1]) is None:
                    break


def _is_faster(trial: Trial, bound: float) -> bool:
    is_candidate = trial.ok and trial.phase not in NOT_CANDIDATES and not trial.subgraph
    return is_candidate and trial.ratio is not None and trial.ratio < bound
