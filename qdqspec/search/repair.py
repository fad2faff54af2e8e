"""Placements without the units with the most noise for their time.

The last attempt of a search: candidates that just missed the SQNR limit and are much faster, with less noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.base import AccuracyOracle
from qdqspec.search.blocks import spent_by_unit
from qdqspec.search.energy import Energy
from qdqspec.search.guide import Guide
from qdqspec.search.limits import Limits
from qdqspec.search.select import is_candidate
from qdqspec.types import Label, Placement, Trial


def drop_noisiest_units(
    guide: Guide, labels: Mapping[str, Label], spent: Mapping[str, float], least_db: float
) -> Placement | None:
    """The labels without the units with the most noise for their time, as few as an SQNR requires; or ``None``.

    ``spent`` is the time of each unit in floating point.
    """
    if not guide.has_noise:
        return guide.space.resolve(labels)
    own = {unit: guide.noise_of(unit, label) for unit, label in labels.items()}
    ranked = sorted(labels, key=lambda unit: own[unit] / max(spent[unit], 1e-6))

    def placed(most: float) -> Placement:
        kept, left = dict[str, Label](), most
        for unit in ranked:
            if own[unit] <= left:
                kept[unit] = labels[unit]
                left -= own[unit]
        return guide.space.resolve(kept)

    return guide.meet(least_db, placed)


def repaired(
    trials: Sequence[Trial],
    limits: Limits,
    oracle: AccuracyOracle,
    space: SchemeSpace,
    *,
    near_db: float = 3.0,
    much: float = 0.1,
    most: int = 2,
    more_db: Sequence[float] = (0.3, 0.6, 1.2, 2.4),
) -> Iterator[Placement]:
    """Placements with a little less noise than the ``most`` fastest candidates that just missed the SQNR limit.

    A candidate just missed it if it is at most ``near_db`` below: further below a repair costs most of the gain. It is
    worth a repair if its gain is significant, and it is by the share ``much`` faster than what has won. Each repair is
    the faster of two: the candidate without the units with the most noise for their time, and the labelling of least
    time for the allowed noise. Attempts aim higher by each of ``more_db`` until one meets the limit.

    ``trials`` are those of the search, the reference first. The caller appends the trial of each placement to them
    before it asks for the next placement. There is no placement if the oracle predicts nothing.
    """
    won = [trial.ratio or 1.0 for trial in trials if trial.incumbent and trial.placement.sites]
    bound = min(won) * (1 - much) if won else 1 - limits.asked.min_gain

    def lacking_db(trial: Trial) -> float:
        """The gap of a trial's SQNR that just missed the limit; 0 for others."""
        found_db, least_db = limits.figures(trial.placement).sqnr_db, limits.min_sqnr_db
        if found_db is None or least_db is None or not is_candidate(trial) or (trial.ratio or bound) >= bound:
            return 0.0
        return max(0.0, least_db - found_db) if least_db - found_db <= near_db else 0.0

    missed = {t.placement: t for t in trials if lacking_db(t) and not t.placement.given}
    if not missed:
        return
    guide, spent = Guide(oracle, space), spent_by_unit(space, trials[0].layers)
    energy = Energy.of(space, [trial for trial in trials if not trial.placement.given])
    energy.noise = guide.block_noise(energy.blocks)
    seen = {trial.placement for trial in trials}

    def quieter(placement: Placement, least_db: float) -> Placement | None:
        options = [drop_noisiest_units(guide, dict(placement.labels), spent, least_db)]
        if energy.noise is not None:
            options.append(guide.meet(least_db, lambda most: energy.placed(energy.within(most))))
        fresh = [option for option in options if option and option.sites and option not in seen]
        return min(fresh, key=lambda each: energy.predict(energy.codes_of(each)), default=None)

    for near in sorted(missed.values(), key=lambda trial: trial.ratio or 1.0)[:most]:
        lacking = lacking_db(near)
        for more in more_db:
            predicted_db = guide.predicted_db(near.placement)
            if predicted_db is None:
                break
            placement = quieter(near.placement, predicted_db + lacking + more - guide.margin_db)
            if placement is not None:
                seen.add(placement)
                yield placement
                if not lacking_db(trials[-1]):
                    break
