"""The result of a tuning run in Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qdqspec._core.files import RESULT, write_whole
from qdqspec._core.units import db_text, proved_text, ratio_text
from qdqspec.accuracy.given_data import GivenFiles
from qdqspec.app.preparation.cached import FinishedSearch
from qdqspec.app.preparation.files import make_folder, take_results
from qdqspec.errors import StateError
from qdqspec.graph.model import Model, require_path
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

    ``kept`` names the files, which are valid until the same case is tuned again; `save` copies them.
    """

    record: RunRecord
    kept: FinishedSearch
    given: Model
    files: GivenFiles | None = None  # a model given in memory is a file as long as this

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
        return f"Result({', '.join([*parts, f'model={str(self.model)!r}'])})"

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
        """The file of the selected model: the tuned model, or the given one if unchanged."""
        return self.kept.model or require_path(self.given)

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

        Raises `OutputError` on failure.
        """
        target, output = Path(folder).absolute(), self.evidence.output
        path = None if output is None else output / RESULT
        # read first: writing the other files removes it
        content = path.read_bytes() if path is not None and path.is_file() else None
        make_folder(target)
        take_results(self.kept, self.given, target)
        if content is not None:
            write_whole(target / RESULT, content, what="the result")
        return target
