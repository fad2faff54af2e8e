"""The size of a search, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qdqspec._core.units import count_text, seconds_text
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session.confirm import most_builds
from qdqspec.app.session.tuning import strategy_for, trials_of
from qdqspec.graph.conversion import FLOAT16
from qdqspec.graph.regions.forecast import Forecast, forecast_line, forecast_tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts that a search may quantize, and an upper bound of its cost.

    ``pairs`` are those of everything quantized. ``builds``, ``confirming`` and ``repeated`` are the most builds of the
    search, its confirmation and repetitions of that. ``converted_from`` is the float type of a model whose candidates
    are in float32. With ``cached`` the cache has the winner already.
    """

    format: str
    units: int
    regions: int
    pairs: int = 0
    builds: int = 0
    confirming: int = 0
    repeated: int = 0
    forecast: Forecast | None = None
    minutes: float | None = None
    metric: str = ""
    samples: int = 0
    converted_from: str = ""
    cached: bool = False

    @property
    def text(self) -> str:
        """The plan as a sentence."""
        if self.cached:
            known = "the cache has the winner of a finished search, which is timed again"
            return f"{known}; with --qdq-retune {replace(self, cached=False).text}"
        if self.forecast is None:
            return f"no operator can be quantized to {self.format} here: there is nothing to search"
        units, regions = count_text(self.units, "unit"), count_text(self.regions, "region")
        more = f" ({self.repeated} more if a gain is close to its limit)" if self.repeated else ""
        parts = [
            f"{units} in {regions} can be quantized, up to {count_text(self.pairs, 'Q/DQ pair')}",
            f"at most {self.builds} builds and {self.confirming} to confirm{more}",
            forecast_line(self.forecast),
        ]
        if self.converted_from:
            parts.append(
                f"pairs are inserted into a copy in float32, since the backend has no integer kernels for pairs of "
                f"{self.converted_from} tensors"
            )
        if self.minutes is not None:
            parts.append(
                f"tune.minutes ends the search after {seconds_text(60 * self.minutes)}, without these steps"
            )
        if self.metric:
            which = "the reference and of each candidate that has won its races"
            parts.append(f"{self.metric} on {self.samples} samples, of {which}")
        return "; ".join(parts)


def plan_of(prepared: Prepared) -> Plan:
    """The plan of a case. Raises if its strategy cannot search the space, or if data is missing or does not fit."""
    space, case, rules = prepared.candidates, prepared.case, prepared.case.tune
    make = strategy_for(prepared)
    _ = prepared.calibration, prepared.evaluation  # raises if the data is missing or does not fit
    blank = Plan(format=case.quantize.format, units=len(space.units), regions=len(space.regions))
    if not space.units:
        return blank
    builds = trials_of(rules, space, make)
    confirming, repeated = most_builds(pareto=rules.objective == "pareto")
    if rules.accuracy is not None:
        prepared.scores.require(rules.accuracy.metric)
    return replace(
        blank,
        pairs=space.resolve(space.everything()).pairs,
        builds=builds,
        confirming=confirming,
        repeated=repeated,
        forecast=forecast_tuning(space.model, builds, prepared.shapes),
        minutes=rules.minutes,
        metric="" if rules.accuracy is None else rules.accuracy.key,
        samples=0 if rules.accuracy is None else prepared.scores.samples,
        converted_from=FLOAT16 if prepared.is_converted else "",
    )
