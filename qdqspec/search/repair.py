"""The last attempt of a search: candidates that just missed the SQNR limit and are much faster, with less noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._guide import Guide
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.energy import Energy
from qdqspec.search.labels import spent_by_unit
from qdqspec.types import NOT_CANDIDATES, Placement, Trial

MORE_DB = (0.3, 0.6, 1.2, 2.4)  # above the limit that the attempts aim at: a prediction missed it before


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """Whether trials just missed the SQNR limit and are much faster than what has won.

    ``sqnr_db`` gives what is measured of a trial, on all data if known. A gain of ``min_gain`` or less is not worth it,
    nor one of less than ``much`` over what has won; ``near_db`` below the limit, a repair costs most of the gain.
    """

    sqnr_db: Callable[[Trial], float | None]
    least_db: float
    min_gain: float
    near_db: float = 3.0
    much: float = 0.1

    def of(self, trials: Sequence[Trial]) -> list[Trial]:
        """Near misses, fastest first, one per placement."""
        bound = self.bound(trials)
        missed = {trial.placement: trial for trial in trials if self.lacking_db(trial, bound) is not None}
        return sorted(missed.values(), key=lambda trial: trial.ratio or 1.0)

    def bound(self, trials: Sequence[Trial]) -> float:
        """The ratio below which a candidate is worth it."""
        won = [trial.ratio or 1.0 for trial in trials if trial.incumbent and trial.placement.sites]
        return min(won) * (1 - self.much) if won else 1 - self.min_gain

    def lacking_db(self, trial: Trial, bound: float) -> float | None:
        """The gap of a trial's SQNR that just missed the limit; ``None`` for others."""
        is_candidate = trial.ok and bool(trial.placement.sites) and not trial.subgraph
        if not is_candidate or trial.ratio is None or trial.ratio >= bound:
            return None
        found_db = self.sqnr_db(trial)
        lacking_db = 0.0 if found_db is None else self.least_db - found_db
        return lacking_db if 0 < lacking_db <= self.near_db else None


def repaired(
    trials: Sequence[Trial],
    near_miss: NearMiss,
    oracle: AccuracyOracle,
    space: SchemeSpace,
    *,
    most: int = 2,
) -> Iterator[Placement]:
    """Placements with a little less noise than the ``most`` fastest candidates that just missed the limit.

    Each is the faster of two, by the profiles of the search: the candidate without the units with the most noise for
    their time, and the labelling of least time for the allowed noise. ``trials`` are those of the search, the reference
    first. There are none if the oracle predicts nothing. The trial of a placement is the last of ``trials`` when the
    next one is requested; if it just misses the limit too, the next one has less noise.
    """
    guide, spent = Guide(oracle, space), spent_by_unit(space, trials[0].layers)
    candidates = [trial for trial in trials if trial.phase not in NOT_CANDIDATES]
    bound = near_miss.bound(candidates)
    missed = near_miss.of([trial for trial in candidates if not trial.placement.given])[:most]
    if not missed:
        return
    energy = Energy.of(space, [trial for trial in trials if not trial.placement.given])
    energy.noise = guide.block_noise(energy.blocks)
    seen = {trial.placement for trial in trials}

    def quieter(placement: Placement, least_db: float) -> Placement | None:
        options = [guide.thinned(dict(placement.labels), least_db, spent)]
        if energy.noise is not None:
            options.append(guide.meet(least_db, lambda most: energy.placed(energy.within(most))))
        fresh = [option for option in options if option and option.sites and option not in seen]
        return min(fresh, key=lambda each: energy.predict(energy.codes_of(each)), default=None)

    for near in missed:
        lacking_db = near_miss.lacking_db(near, bound)
        for more_db in MORE_DB:
            predicted_db = guide.predicted_db(near.placement)
            if predicted_db is None or lacking_db is None:
                break
            placement = quieter(near.placement, predicted_db + lacking_db + more_db - guide.margin_db)
            if placement is not None:
                seen.add(placement)
                yield placement
                if near_miss.lacking_db(trials[-1], bound) is None:
                    break
