"""Rehearses placements of a case on the reference runtime, whatever the backend of the case."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from qdqspec._core.arrays import Feed
from qdqspec._core.closing import Closing
from qdqspec.accuracy.rehearsal import Rehearsal, Subject, sites_of
from qdqspec.app.preparation.auxiliary_runs import reference_runtime
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.errors import PlacementError
from qdqspec.types import Placement, Site


class Rehearser(Closing):
    """Rehearses placements of a case on ``data``, given with its name.

    The graph, with all pairs of the case's space, is built on first use. A placement with other pairs, such as one
    read from a scheme, rebuilds it with these added.
    """

    def __init__(self, prepared: Prepared, data: tuple[Iterable[Feed], str]) -> None:
        self._prepared, self._data = prepared, data
        self._sites: tuple[Site, ...] = ()
        self._rehearsal: Rehearsal | None = None
        self._opened = ExitStack()

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal of the space. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
        if self._rehearsal is None:
            prepared, (feeds, kind) = self._prepared, self._data
            subject = Subject(
                model=prepared.model,
                sites=self._sites or sites_of(prepared.space),
                numbers=prepared.numbers,
                feeds=lambda: feeds,
                data=kind,
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            runtime = reference_runtime(self._opened, prepared.options, prepared.backend)
            self._rehearsal = self._opened.enter_context(Rehearsal(subject, runtime))
        return self._rehearsal

    def including(self, placement: Placement) -> Rehearsal:
        """The rehearsal, rebuilt with the pairs of a placement if it lacks some. Raises like `rehearsal`."""
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
