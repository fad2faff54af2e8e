"""What a session returns: the plan of a search, and its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qdqspec._core.files import RESULT, file_digest, write_whole
from qdqspec._core.units import count_text, db_text, proved_text, ratio_text, seconds_text
from qdqspec.app.given_data import GivenFiles
from qdqspec.app.preparation.files import take_results
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.stored import SCHEME, FinishedSearch, make_folder
from qdqspec.app.session.tuning import strategy_of, trials_of
from qdqspec.errors import StateError
from qdqspec.graph import Model, require_path
from qdqspec.graph.regions import Forecast, forecast_line, forecast_tuning
from qdqspec.search import most_builds
from qdqspec.types import (
    EXACT_DB,
    Evidence,
    FrontPoint,
    Interval,
    LatencyEvidence,
    ParityEvidence,
    Placement,
    RunRecord,
    SearchResult,
    Trial,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """A finished search with its evidence. ``record`` is the source of reports.

    ``kept`` names the files, which are valid until the same case is tuned again; `save` copies them. ``scheme_sum`` is
    the digest of their scheme, by which those of another search are recognized.
    """

    record: RunRecord
    kept: FinishedSearch
    given: Model
    files: GivenFiles | None = None  # a model given in memory is a file as long as this
    scheme_sum: str = ""

    def __repr__(self) -> str:
        """One line: the record holds each build, thousands of lines."""
        latency, parity = self.evidence.latency, self.evidence.parity
        parts = []
        if self.unchanged:
            parts.append(f"unchanged: {self.reason}")
        elif self.evidence.status == "untimed":
            parts.append(f"untimed: {self.reason}")
        elif latency is not None:
            parts.append(
                f"{ratio_text(latency.speedup.median)}x{proved_text(latency, self.evidence.min_gain)}"
            )
        if parity is not None:
            exact = parity.sqnr_db >= EXACT_DB
            parts.append(f"SQNR {db_text(parity.sqnr_db)}{'' if exact else ' dB'}")
        return f"Result({', '.join([*parts, f'model={str(self._path)!r}'])})"

    @property
    def evidence(self) -> Evidence:
        """All evidence of the case."""
        return self.record.cases[0].evidence

    @property
    def search(self) -> SearchResult:
        """The search's result."""
        return self.kept.result

    @property
    def model(self) -> Path:
        """The file of the selected model: the tuned model, or the given one if unchanged.

        Raises `StateError` if another search has overwritten it.
        """
        if not self.unchanged:
            self._require_own_files()
        return self._path

    @property
    def _path(self) -> Path:
        return self.kept.model or require_path(self.given)

    def _require_own_files(self) -> None:
        """Without a cache, a search with other options writes to the same folder."""
        if scheme_sum(self.kept.folder) != self.scheme_sum:
            raise StateError(
                "the files of this result were overwritten by another search of the same case, or deleted",
                where=self.kept.folder,
                cure="save a result before the next search, give each search a name=, or use the cache",
            )

    @property
    def latency(self) -> LatencyEvidence:
        """Reference and tuned model timed against each other. Raises `StateError` for a run without timing."""
        if self.evidence.status == "untimed":
            raise StateError(
                "the placement was selected by its coverage, and not timed",
                cure="use mode='measure' on a machine with the device, or another objective",
            )
        if self.evidence.latency is None:
            raise StateError("this run took no timing", cure="use mode='run' or mode='measure'")
        return self.evidence.latency

    @property
    def speedup(self) -> Interval:
        """The speedup over the reference, with its 95 % prediction interval; ``latency.at_least`` is what is proved."""
        return self.latency.speedup

    @property
    def parity(self) -> ParityEvidence:
        """The difference of the outputs from the reference's."""
        assert self.evidence.parity is not None
        return self.evidence.parity

    @property
    def scheme(self) -> Placement:
        """The placement of the selected model; empty if unchanged."""
        return self.search.winner

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every build of the search, oldest first."""
        return self.search.trials

    @property
    def unchanged(self) -> bool:
        """Whether the reference itself is selected; ``reason`` states why."""
        return self.search.unchanged

    @property
    def reason(self) -> str:
        """The reason why this model is selected."""
        return self.search.reason

    @property
    def front(self) -> tuple[FrontPoint, ...]:
        """For ``objective="pareto"``: the placements that no other beats in both latency and accuracy."""
        return self.search.front

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes to read before relying on the result."""
        return self.evidence.warnings

    def save(self, folder: Path | str) -> Path:
        """Copy models, scheme, journal, pattern cache and ``result.json``, if it was written, to a folder.

        Raises `OutputError` on failure, `StateError` if another search has overwritten the files.
        """
        self._require_own_files()
        target, output = Path(folder).absolute(), self.evidence.output
        path = None if output is None else output / RESULT
        # read first: writing the other files removes it
        content = path.read_bytes() if path is not None and path.is_file() else None
        make_folder(target)
        take_results(self.kept, self.given, target)
        if content is not None:
            write_whole(target / RESULT, content, what="the result")
        return target


def scheme_sum(folder: Path) -> str:
    """The digest of the scheme with its scales in a folder of results; empty if there is none."""
    path = folder / SCHEME
    return file_digest(path) if path.is_file() else ""


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
    make, _ = strategy_of(prepared)
    _ = prepared.data.calibration, prepared.data.evaluation  # raises if the data is missing or does not fit
    plan = Plan(format=case.quantize.format, units=len(space.units), regions=len(space.regions))
    if not space.units:
        return plan
    builds = trials_of(rules, space, make)
    confirming, repeated = most_builds(pareto=rules.objective == "pareto")
    if rules.accuracy is not None:
        prepared.scores.require(rules.accuracy.metric)
        plan = replace(plan, metric=rules.accuracy.key, samples=prepared.scores.samples)
    return replace(
        plan,
        pairs=space.resolve(space.everything()).pairs,
        builds=builds,
        confirming=confirming,
        repeated=repeated,
        forecast=forecast_tuning(space.model, builds, prepared.data.shapes),
        minutes=rules.minutes,
        converted_from=prepared.converted_from,
    )
