"""Property-based search for the smallest input that breaks a parity check; the input is saved to a file."""

from __future__ import annotations

import filecmp
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from qdqspec.backends.base import Array
from qdqspec.checks.parity import ParityParams, SearchParams
from qdqspec.errors import BackendError
from qdqspec.parity.domain import Span, input_domains, spans_of
from qdqspec.parity.draw import Drawn, drawn_inputs, simpler
from qdqspec.parity.hunt import hunt
from qdqspec.parity.recipes import make, words
from qdqspec.parity.typical import typical_of
from qdqspec.session.cached import MODEL
from qdqspec.session.case_bench import CaseBench
from qdqspec.session.parity import SideBySide
from qdqspec.session.prepare import require_path
from qdqspec.session.probes import Prober, SavedProbe, write_probe
from qdqspec.types import ParitySearch, TriedInput

FOLDER = "parity"  # subfolder of the case's folder: one file for each check with a failing input
_SAMPLES = 8  # samples of the data to start from
_SEEN = 1000  # feeds from which the bounds of values are taken
_OPTIONS = ("backend", "device", "threads")  # options that affect the result, repeated in the command if set


def search_parity(bench: CaseBench, tuned: Path, params: ParityParams, check_id: str) -> ParitySearch:
    """Search for an input that breaks the limits; the smallest one found is written to a file.

    Both models are built once. The file of an earlier search is removed if nothing is found any more.
    """
    asked = params.search
    assert asked is not None
    file = bench.output / FOLDER / f"{check_id}.npz"
    file.unlink(missing_ok=True)
    if tuned == require_path(bench.given):
        return ParitySearch(missing="the model is unchanged")
    hunter = _Hunter(bench, params, asked)
    with SideBySide(bench.work, require_path(bench.given), tuned) as models:
        try:
            return hunter.search(models, tuned, file)
        except BackendError as error:
            return ParitySearch(missing=error.what)


class _Hunter:
    """Draws inputs for one case, and converts them to arrays and descriptions."""

    def __init__(self, bench: CaseBench, params: ParityParams, asked: SearchParams) -> None:
        self._bench = bench
        self._params = params
        self._asked = asked
        feeds, _ = bench.prepared.comparison_data()
        self._samples = list(islice(feeds, _SAMPLES))
        self._domains = input_domains(
            bench.given,
            bench.prepared.inputs,
            bench.work.options.profiles,
            spans_of(islice(_calibrated(bench), _SEEN)),
            values={name: Span(*bounds) for name, bounds in asked.values.items()},
            beyond=asked.beyond,
        )

    def search(self, models: SideBySide, tuned: Path, file: Path) -> ParitySearch:
        """Run the search, save the input found, and return the evidence."""
        typical = typical_of(models.reference(sample) for sample in self._samples)
        prober = Prober(models, self._params, typical)
        found = hunt(
            drawn_inputs(self._domains, len(self._samples)),
            lambda drawn: prober.attempt(self._feeds(drawn)),
            examples=self._asked.examples,
            seconds=min(
                limit for limit in (self._asked.seconds, self._bench.work.seconds_left()) if limit is not None
            ),
            seed_number=self._bench.settings.seed,
            simpler=lambda drawn: simpler(drawn, self._domains, self._feeds(drawn)),
        )
        probe = None
        if found.smallest is not None:
            kept = SavedProbe(
                feeds=self._feeds(found.smallest),
                params=self._params,
                typical=typical,
                inputs=tuple(self._told(found.smallest)),
            )
            write_probe(file, kept)
            command = _command(self._bench, tuned, file)
            probe = prober.probe(kept.feeds, kept.inputs, file=_shown(file), command=command)
        return ParitySearch(
            tried=found.tried,
            seconds=found.seconds,
            late=found.late,
            closest_db=prober.closest_db,
            found=probe,
            missing="" if found.tried else "the float model runs on none of the inputs",
        )

    def _feeds(self, drawn: Drawn) -> dict[str, Array]:
        return {
            domain.name: make(drawn[domain.name], domain, [sample[domain.name] for sample in self._samples])
            for domain in self._domains
        }

    def _told(self, drawn: Drawn) -> Iterator[TriedInput]:
        """Descriptions of the inputs for reports."""
        for name, array in self._feeds(drawn).items():
            domain = next(one for one in self._domains if one.name == name)
            bounds = spans_of([{name: array}])[name]
            yield TriedInput(
                name=name,
                dtype=str(domain.dtype),
                shape=array.shape,
                words=words(drawn[name], domain),
                low=bounds.low,
                high=bounds.high,
                known_low=domain.known.low,
                known_high=domain.known.high,
            )


def _calibrated(bench: CaseBench) -> Iterable[Mapping[str, Array]]:
    """The data on which activations were calibrated, if known; else the data to compare on."""
    return bench.prepared.calibration or bench.prepared.comparison_data()[0]


def _command(bench: CaseBench, tuned: Path, file: Path) -> str:
    """The command that tries the input again on the same two files."""
    beside = bench.output / MODEL
    if beside.is_file() and filecmp.cmp(beside, tuned, shallow=False):
        tuned = beside  # the copy of the same file among the results, not in the cache
    models = [_shown(bench.reference), _shown(tuned)]
    settings = bench.settings
    given = [f"--{name}={getattr(settings, name)}" for name in _OPTIONS if name in settings.origins]
    extra = [f"--backend-option={option}" for option in settings.backend_option]
    return shlex.join(["qdqspec", "verify", *models, "--input", _shown(file), *given, *extra])


def _shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
