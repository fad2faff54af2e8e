"""A search that the caller runs step by step, with its own loop, strategy or regions.

A study uses the same `Tuning` as ``tune`` and exposes its steps. Its whole state is in a journal, so that a saved study
resumes by replaying it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from qdqspec._core.files import Closing, TemporaryFolder, copy_whole, explained, write_text
from qdqspec._core.locks import RunLock
from qdqspec._core.records import from_data, read_json, to_data
from qdqspec._core.registry import DEFAULT_BACKEND, names
from qdqspec.app.preparation.files import write_placed, write_placement
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.stored import CORRECTIONS, HEADER, JOURNAL, LoggedJournal, make_folder
from qdqspec.app.session.covering import covers
from qdqspec.app.session.tuning import AnyStrategy, Tuned, Tuning, rehearser_of, strategy_of
from qdqspec.errors import ConfigError, StateError
from qdqspec.qdq import SchemeSpace
from qdqspec.search import Built, Proposal, Search
from qdqspec.types import NO_PAIRS, Case, Label, Placement, Region, Rehearsed, Trial

if TYPE_CHECKING:
    from qdqspec.app.session import Session

STUDY = "study.json"
_MOST_BYTES = 16 << 20
Proposed: TypeAlias = Proposal | Placement | Mapping[str, Label]


class Study(Closing):
    """Ask, build, measure, tell. Iteration does all four until the budget ends, and yields each trial.

    A `Proposal`, a `Placement`, or labels of units (``{"conv1": "in+out"}``) can be built; the reference is built
    before the first of them. Trials that the strategy did not ask for count in the budget and are not passed to it.
    Close a study after use, or use it in ``with``: it holds child processes until then, or until the loop ends.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        strategy: AnyStrategy | None = None,
        folder: Path | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """Open the study in ``folder``, or resume the one saved there; without a folder, in a temporary one.

        ``close`` closes the session of a study that was loaded.
        """
        self.case: Case = prepared.case
        self._prepared = prepared
        if covers(prepared):
            raise ConfigError(
                "a study times its candidates, and the objective of this case is coverage",
                where=str(self.case.spec or self.case.model),
                cure="tune the case without a study, or choose another objective",
            )
        _, self._strategy = strategy_of(prepared, strategy)
        with ExitStack() as opened:
            if close is not None:
                opened.callback(close)
            self._folder = folder or opened.enter_context(TemporaryFolder())
            opened.enter_context(RunLock(self._folder))
            header = {**prepared.journal_header, "strategy": self._strategy}
            self._journal = opened.enter_context(LoggedJournal.open(self._folder / JOURNAL, header))
            prepared.keep_corrections(self._folder / CORRECTIONS)
            self._tuning = opened.enter_context(Tuning(prepared, self._journal, strategy))
            self._rehearser = opened.enter_context(rehearser_of(prepared, prepared.data.for_calibration()))
            self._describe(self._folder)
            self._opened: ExitStack | None = opened.pop_all()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the model."""
        return self._prepared.regions

    @property
    def space(self) -> SchemeSpace:
        """The search space: units with their labels, and ``resolve`` to convert a choice to a placement."""
        return self._prepared.space

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every trial so far, including those of an earlier run."""
        return tuple(self._tuning.search.trials)

    @property
    def best(self) -> Trial | None:
        """The incumbent: the last trial that won its race or was committed."""
        return next((trial for trial in reversed(self.trials) if trial.incumbent), None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes about model, data and journal."""
        return (*self._prepared.warnings, *self._journal.notes)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """At most ``n`` proposals of the strategy; empty if it is done or the budget is spent."""
        return self._search.ask(n)

    def build(self, what: Proposed) -> Built:
        """Build a candidate in a process of its own. A failure is recorded in its ``trial``."""
        return self._search.build(self._proposal(what))

    def measure(self, built: Built) -> Trial:
        """Race a built candidate against the incumbent, and write the trial to the journal."""
        return self._search.measure(built)

    def evaluate(self, what: Proposed) -> Trial:
        """Build and measure; a known placement is not built again."""
        return self._search.evaluate(self._proposal(what))

    def rehearse(self, what: Proposed) -> Rehearsed:
        """The error of a candidate on calibration samples, computed without building it; its task metric as well.

        It is the Q/DQ arithmetic as ONNX defines it, on the default backend whatever that of the case, with biases in
        integer steps where the case's backend stores them so; other errors of a runtime's integer kernels are not
        included. Raises `RehearsalRefusedError` if the default backend
        lacks operators of the model or memory is short; evaluate the candidate then.
        """
        placement, rules = self._proposal(what).placement, self.case.tune.accuracy
        _ = self._search  # raises if the study is closed
        rehearsal = self._rehearser.including(placement)
        found = rehearsal.error(placement)
        if rules is None:
            return found
        score = self._prepared.scores.of_engine(rehearsal.engine(placement), rules.metric, rules.output)
        return replace(found, accuracy=score.value)

    def tell(self, trials: Trial | Iterable[Trial]) -> None:
        """Pass the results of proposals to the strategy, including failures."""
        self._search.tell([trials] if isinstance(trials, Trial) else list(trials))

    def commit(self, what: Placement | Mapping[str, Label]) -> Trial:
        """Make a placement the incumbent, whatever its race results. Raises `BackendError` if it fails."""
        return self._search.commit(self._proposal(what).placement)

    def confirm(self) -> Tuned:
        """Rebuild best, runner-up, everything quantized and reference, and select the final model."""
        if not self._search.trials:
            self.evaluate({})
        tuned = self._tuning.finish()
        for role, trial in tuned.confirmed:
            self._journal.append(trial, role=role)
        return tuned

    def export(self, path: Path | str, placement: Placement | None = None) -> Path:
        """Write a placement, by default the best: a model, or with the suffix ``.json`` its scheme."""
        target, best = Path(path).absolute(), self.best
        chosen = placement or (best.placement if best else NO_PAIRS)
        make_folder(target.parent)
        write = write_placed if target.suffix == ".json" else write_placement
        write(self._prepared, chosen, target)
        return target

    def save(self, folder: Path | str) -> Path:
        """Copy all files that `load` needs to a folder; the model and its data are not copied."""
        target = Path(folder).absolute()
        if target != self._folder.absolute():
            make_folder(target)
            self._describe(target)
            with explained("the study", target):
                for name in (JOURNAL, HEADER, CORRECTIONS):
                    if (self._folder / name).is_file():  # a study may have no corrections
                        copy_whole(self._folder / name, target / name)
        return target

    @classmethod
    def load(
        cls, folder: Path | str, *, session: Session | None = None, strategy: AnyStrategy | None = None
    ) -> Self:
        """Resume a saved study in its folder.

        A strategy that is not registered must be given again. Without a ``session`` one is opened with the settings of
        the study. Raises `StateError` naming the difference if model, data, device or versions differ.
        """
        from qdqspec.app.session import Session

        path = Path(folder).absolute()
        saved = _read(path)
        if strategy is None and saved.strategy not in names("strategy"):
            what, cure = (
                f"strategy '{saved.strategy}' of the study is not registered",
                "give it again: strategy=...",
            )
            raise StateError(what, where=path, cure=cure)
        own = session or Session(**saved.settings.model_dump(exclude_unset=True))
        strategy = saved.strategy if strategy is None else strategy
        close = None if session else own.close
        return cls(own.work(saved.case).prepared, strategy=strategy, folder=path, close=close)

    def close(self) -> None:
        """Stop the child processes. Closing twice is harmless; results remain readable."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def __iter__(self) -> Iterator[Trial]:
        yield from self._search
        self._tuning.bench.close()  # the incumbent is built again when needed

    @property
    def _search(self) -> Search:
        if self._opened is None:
            raise StateError(
                "the study is closed", where=self._folder, cure="load it, or keep it open longer"
            )
        return self._tuning.search

    def _proposal(self, what: Proposed) -> Proposal:
        if isinstance(what, Proposal):
            return what
        placement = what if isinstance(what, Placement) else self.space.resolve(what)
        return Proposal(placement=placement, phase="own")

    def _describe(self, folder: Path) -> None:
        settings = {name: getattr(self._prepared.settings, name) for name in _Settings.model_fields}
        case = replace(self.case, checks=(), metrics={}, loaders={})
        saved = _Saved(settings=_Settings(**settings), strategy=self._strategy, case=case)
        write_text(folder / STUDY, json.dumps(to_data(saved), indent=2) + "\n")


class _Settings(BaseModel):
    """The settings saved with a study. Others are excluded: a file must not name plugins, or folders to write to."""

    model_config = ConfigDict(strict=True, extra="forbid")

    backend: str = DEFAULT_BACKEND
    device: Annotated[int, Field(ge=0)] = 0
    threads: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    schema_version: Literal[1] = 1
    settings: _Settings
    strategy: str
    case: Case


def _read(folder: Path) -> _Saved:
    path = folder / STUDY
    try:
        return from_data(_Saved, read_json(path, most_bytes=_MOST_BYTES))
    except OSError as error:
        what, cure = f"there is no study here: {error.strerror}", "name a folder that Study.save wrote"
    except ValueError as error:
        what, cure = f"the study is damaged or of another version ({str(error)[:120]})", "begin it anew"
    raise StateError(what, where=path, cure=cure)
