"""Single inputs on a model and its tuned model: runs one, and searches for the smallest that breaks a check."""

from __future__ import annotations

import filecmp
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.compare import OutputComparison, Typical, compare_outputs, typical_of
from qdqspec.accuracy.domain import InputResult, Span, input_domains, spans_of
from qdqspec.app.evidence.kept_inputs import FOLDER, SavedProbe, save_replay, shown, write_probe
from qdqspec.app.evidence.parity import SideBySide, both_models
from qdqspec.app.preparation.cached import MODEL
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.errors import BackendError
from qdqspec.graph.model import require_path
from qdqspec.types import ParityEvidence, ParitySearch, Probe, TensorParity, TriedInput
from qdqspec.types.requests import InputLimits, InputRequest

if TYPE_CHECKING:
    from qdqspec.accuracy.input_search import Drawn

_DATA = "tried"  # name of a probe's data in reports
_STOPPED = 1e9  # noise assigned to an input on which the tuned model fails
_OPTIONS = ("backend", "device", "threads")  # options that affect the result, repeated in the command if set


class Prober:
    """Runs single inputs against the limits ``params``, if any; ``closest_db`` is the smallest SQNR that broke none."""

    def __init__(
        self, models: SideBySide, params: InputLimits | None, typical: Mapping[str, Typical] | None = None
    ) -> None:
        self.closest_db = math.inf
        self._models, self._params, self._typical = models, params, typical or {}

    def attempt(self, feeds: Feed) -> InputResult | None:
        """The limits that an input breaks; ``None`` if the float model has no comparable output for it."""
        try:
            expected = self._models.reference(feeds)
        except BackendError:
            return None
        if any(self._is_odd(name, values) for name, values in expected.items()):
            return None
        try:
            seen = self._models.tuned(feeds)
        except BackendError as error:
            return InputResult((_stopped(error),), _STOPPED)
        comparison = OutputComparison(typical=self._typical)
        comparison.add(expected, seen)
        outputs = comparison.results()
        broken = self._broken(outputs)
        if not broken:
            compared = (output.sqnr_db for output in outputs if output.compared)
            self.closest_db = min(self.closest_db, *compared, math.inf)
        return InputResult(broken, 0.0 if self._params is None else self._params.error_excess(outputs))

    def probe(
        self, feeds: Feed, inputs: tuple[TriedInput, ...], *, file: str = "", command: str = ""
    ) -> Probe:
        """Compare one input, with both errors apart. Raises `BackendError` if the float model does not run on it."""
        self._models.reference(feeds)
        parity = ParityEvidence(outputs=(), samples=1, data=_DATA)
        try:
            parity = compare_outputs([self._models.run(feeds)], _DATA, typical=self._typical)
            broken = self._broken(parity.outputs)
        except BackendError as error:
            broken = (_stopped(error),)
        return Probe(inputs=inputs, broken=broken, parity=parity, file=file, command=command)

    def _broken(self, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
        return () if self._params is None else self._params.broken_by(outputs)

    def _is_odd(self, name: str, values: Array) -> bool:
        """Whether an output holds NaN or infinity, and never does on the data."""
        if not self._typical.get(name, Typical()).finite or not np.issubdtype(values.dtype, np.floating):
            return False
        return not bool(np.isfinite(values).all())


def _stopped(error: BackendError) -> str:
    return f"the tuned model does not run on it: {error.what}"


def replay_failure(prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str) -> str:
    """Save the worst input that breaks a limit alone; the command that repeats the failure, empty if there is none."""
    feeds, _ = prepared.comparison_data()
    worst, noise = None, 0.0
    with both_models(prepared, tuned, divided=False) as models:
        prober = Prober(models, limits)
        for given in feeds:
            tried = prober.attempt(given)
            if tried is not None and tried.broken and (worst is None or tried.noise > noise):
                worst, noise = given, tried.noise
        if worst is None:
            return ""
        return save_replay(prepared, tuned, limits, check_id, worst, models.run(worst))


def search_input(prepared: Prepared, tuned: Path, request: InputRequest, check_id: str) -> ParitySearch:
    """Search for an input that breaks the limits; the smallest one is written to a file, which is removed before."""
    file = prepared.output / FOLDER / f"{check_id}.npz"
    file.unlink(missing_ok=True)
    if tuned == require_path(prepared.given):
        return ParitySearch(missing="the model is unchanged")
    searcher = _InputSearcher(prepared, request)
    with both_models(prepared, tuned) as models:
        try:
            return searcher.search(models, tuned, file)
        except BackendError as error:
            return ParitySearch(missing=error.what)


class _InputSearcher:
    """Draws inputs for one case.

    The search starts from ``samples`` inputs of the data, which are run first: more samples vary the inputs more. The
    ranges of the first ``seen`` inputs of the data bound the values: more inputs take longer to read.
    """

    def __init__(
        self, prepared: Prepared, asked: InputRequest, *, samples: int = 8, seen: int = 1000
    ) -> None:
        self._prepared, self._asked = prepared, asked
        feeds, _ = prepared.comparison_data()
        self._samples = list(islice(feeds, samples))
        # The data on which activations were calibrated, if known; else the data to compare on.
        self._domains = input_domains(
            prepared.given,
            prepared.inputs,
            prepared.options.profiles,
            spans_of(islice(prepared.calibration or feeds, seen)),
            values={name: Span(*bounds) for name, bounds in asked.values.items()},
            beyond=asked.beyond,
        )

    def search(self, models: SideBySide, tuned: Path, file: Path) -> ParitySearch:
        """Run the search, save the input found, and return the evidence."""
        # loads Hypothesis, which few cases need
        from qdqspec.accuracy.input_search import drawn_inputs, search_inputs

        typical = typical_of(models.reference(sample) for sample in self._samples)
        prober = Prober(models, self._asked.limits, typical)
        limits = self._asked.seconds, self._prepared.resources.seconds_left()
        found = search_inputs(
            drawn_inputs(self._domains, self._samples),
            lambda drawn: prober.attempt(_feeds(drawn)),
            examples=self._asked.examples,
            seconds=min(limit for limit in limits if limit is not None),
            seed_number=self._prepared.settings.seed,
        )
        probe = None
        if found.smallest is not None:
            feeds, inputs = _feeds(found.smallest), tuple(self._described(found.smallest))
            kept = SavedProbe(feeds=feeds, params=self._asked.limits, typical=typical, inputs=inputs)
            write_probe(file, kept)
            command = _command(self._prepared, tuned, file)
            with suppress(BackendError):  # it may be the tuned model that does not run on it
                outputs = models.run(feeds)
                again = save_replay(self._prepared, tuned, self._asked.limits, file.stem, feeds, outputs)
                command = "\n".join(filter(None, (command, again)))
            probe = prober.probe(feeds, inputs, file=shown(file), command=command)
        return ParitySearch(
            tried=found.tried,
            seconds=found.seconds,
            late=found.late,
            closest_db=prober.closest_db,
            found=probe,
            missing="" if found.tried else "the float model runs on none of the inputs",
        )

    def _described(self, drawn: Drawn) -> Iterator[TriedInput]:
        """Descriptions of the inputs for reports."""
        for domain, bounds in zip(self._domains, spans_of([_feeds(drawn)]).values(), strict=True):
            yield TriedInput(
                name=domain.name,
                dtype=str(domain.dtype),
                shape=drawn[domain.name].values.shape,
                words=drawn[domain.name].words,
                low=bounds.low,
                high=bounds.high,
                known_low=domain.known.low,
                known_high=domain.known.high,
            )


def _feeds(drawn: Drawn) -> dict[str, Array]:
    return {name: each.values for name, each in drawn.items()}


def _command(prepared: Prepared, tuned: Path, file: Path) -> str:
    """The command that tries the input again on the same two files."""
    beside = prepared.output / MODEL
    if beside.is_file() and filecmp.cmp(beside, tuned, shallow=False):
        tuned = beside  # the copy of the same file among the results, not in the cache
    models = [shown(prepared.reference), shown(tuned)]
    settings = prepared.settings
    given = [f"--{name}={getattr(settings, name)}" for name in _OPTIONS if name in settings.origins]
    extra = [f"--backend-option={option}" for option in settings.backend_option]
    return shlex.join(["qdqspec", "verify", *models, "--input", shown(file), *given, *extra])
