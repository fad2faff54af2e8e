"""Opens rehearsals for a case: the accuracy of placements on the reference runtime, whatever the case's backend."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from qdqspec.errors import PlacementError
from qdqspec.quantize.calibrate import Feed
from qdqspec.rehearsal import Rehearsal, Subject, sites_of
from qdqspec.session.prepare import Prepared
from qdqspec.session.resources import Resources
from qdqspec.session.runtimes import reference_runtime
from qdqspec.types import Placement, Rehearsed, Site


class Rehearser:
    """Rehearses placements of a case. The graph, with all pairs of the case's space, is built on first use.

    A placement with other pairs, such as one read from a scheme, rebuilds it with these added. The data is ``given``
    with its name, else the calibration data.
    """

    def __init__(
        self, prepared: Prepared, work: Resources, given: tuple[Iterable[Feed], str] | None = None
    ) -> None:
        self._prepared = prepared
        self._work = work
        self._given = given
        self._sites: tuple[Site, ...] = ()
        self._rehearsal: Rehearsal | None = None
        self._opened = ExitStack()

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal of the space. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
        if self._rehearsal is None:
            self._rehearsal = self._open(self._sites or sites_of(self._prepared.space))
        return self._rehearsal

    def error(self, placement: Placement) -> Rehearsed:
        """The error of a placement on the first samples.

        Raises `RehearsalRefusedError` if the model cannot be rehearsed.
        """
        return self.including(placement).error(placement)

    def including(self, placement: Placement) -> Rehearsal:
        """The rehearsal, rebuilt with the pairs of a placement if it lacks some."""
        try:
            self.rehearsal.switches.setting(placement)
        except PlacementError:
            self._sites = (*self.rehearsal.subject.sites, *placement.ordered)
            self.close()
        return self.rehearsal

    def close(self) -> None:
        """Stop the process of the rehearsal. Closing twice is harmless; the next use opens it again."""
        self._opened.close()
        self._rehearsal = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, sites: Iterable[Site]) -> Rehearsal:
        prepared, work = self._prepared, self._work
        data = "random" if prepared.calibration is None else "calibration"
        feeds, data = (lambda: given[0], given[1]) if (given := self._given) else (prepared.feeds, data)
        subject = Subject(
            model=prepared.model,
            sites=tuple(sites),
            numbers=prepared.numbers,
            feeds=feeds,
            data=data,
        )
        runtime = reference_runtime(self._opened, work.options, work.backend)
        return self._opened.enter_context(Rehearsal(subject, runtime))
