"""Single inputs on a model and its tuned model: run, search for the smallest that breaks a check, save and load."""

from __future__ import annotations

import filecmp
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qdqspec.accuracy.parity import SideBySide, both_models
from qdqspec.arrays import Array, Feed
from qdqspec.checks.base import Check
from qdqspec.errors import BackendError, ConfigError, DataError
from qdqspec.files import write_whole
from qdqspec.graph.model import require_path
from qdqspec.parity.compare import OutputComparison, Typical, compare_outputs, typical_of
from qdqspec.parity.domain import InputResult, Span, input_domains, make, spans_of, words
from qdqspec.parity.sources import npz_bytes, read_beside, read_members
from qdqspec.preparation.cached import MODEL
from qdqspec.preparation.prepare import Prepared
from qdqspec.registry import resolve
from qdqspec.types import ParityEvidence, ParitySearch, Probe, TensorParity, TriedInput
from qdqspec.types.requests import InputLimits, InputRequest

if TYPE_CHECKING:
    from qdqspec.parity.input_search import Drawn


_CHECK = "check.json"  # the metadata beside the arrays
_MOST_BYTES = 1 << 20  # largest size of the metadata
_DATA = "tried"  # name of a probe's data in reports
_STOPPED = 1e9  # noise assigned to an input on which the tuned model fails
_ARRAYS = "an .npz file with one array for each input, its first axis the samples, is expected"


class Prober:
    """Runs single inputs, and checks that the tuned model's outputs are close enough to the float model's.

    Without ``params`` there are no limits. ``closest_db`` is the smallest SQNR of the inputs so far that broke no
    limit.
    """

    def __init__(
        self, models: SideBySide, params: InputLimits | None, typical: Mapping[str, Typical] | None = None
    ) -> None:
        self.closest_db = math.inf
        self._models = models
        self._params = params
        self._typical = typical or {}

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
        """The full comparison of one input, with the errors of quantization and of the runtime measured separately.

        Raises `BackendError` if the float model does not run on it.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """The content of a probe file: the input, its limits and its description.

    ``params`` is ``None`` in a file that holds arrays only, such as one written by hand.
    """

    feeds: dict[str, Array]
    params: InputLimits | None = None
    typical: Mapping[str, Typical] = field(default_factory=dict)
    inputs: tuple[TriedInput, ...] = ()


class _Check(BaseModel):
    """The JSON metadata beside the arrays."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    check: dict[str, Any]
    typical: dict[str, Typical]
    inputs: tuple[TriedInput, ...]


def write_probe(path: Path, kept: SavedProbe) -> None:
    """Write the input as an .npz file that numpy can read; the first axis of each array is one sample."""
    assert kept.params is not None
    beside = {
        "schema_version": 1,
        "check": kept.params.model_dump(mode="json", exclude_none=True),
        "typical": {name: asdict(one) for name, one in kept.typical.items()},
        "inputs": [asdict(one) for one in kept.inputs],
    }
    arrays = {name: array[None] for name, array in kept.feeds.items()}
    content = npz_bytes(arrays, {_CHECK: json.dumps(beside, indent=1)})
    write_whole(path, content, what="the input", make_folder=True)


def read_probe(path: Path) -> SavedProbe:
    """Read an input: the first sample of each array. Raises `DataError` for a damaged or missing file."""
    if not path.is_file():
        raise DataError(
            "there is no such input", where=path, cure="name the .npz file that a parity check kept"
        )
    feeds = {name: next(iter(member.rows()), None) for name, member in read_members(path).items()}
    if empty := [name for name, row in feeds.items() if row is None]:
        raise DataError(f"array '{empty[0]}' holds no sample", where=path, cure=_ARRAYS)
    known = {name: row for name, row in feeds.items() if row is not None}
    text = read_beside(path, _CHECK, _MOST_BYTES)
    if text is None:
        return SavedProbe(feeds=known)
    try:
        read = TypeAdapter(_Check).validate_json(text)
        params = _limits(read.check)
    except ValueError as error:
        problem = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(
            f"'{_CHECK}' in it is damaged: {problem}",
            where=path,
            cure="delete it and run the parity check again",
        ) from None
    return SavedProbe(feeds=known, params=params, typical=read.typical, inputs=read.inputs)


FOLDER = "parity"  # subfolder of the case's folder: one file for each check with a failing input
_SAMPLES = 8  # samples of the data to start from
_SEEN = 1000  # feeds from which the bounds of values are taken
_OPTIONS = ("backend", "device", "threads")  # options that affect the result, repeated in the command if set


def search_input(prepared: Prepared, tuned: Path, request: InputRequest, check_id: str) -> ParitySearch:
    """Search for an input that breaks the limits; the smallest one found is written to a file.

    Both models are built once. The file of an earlier search is removed if nothing is found any more.
    """
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


def _limits(check: Mapping[str, Any]) -> InputLimits:
    """The limits in a file: the parameters of a check. Raises ``ValueError`` if they are not."""
    try:
        kind = cast("Check", resolve("check", str(check.get("kind"))))
    except ConfigError as error:
        raise ValueError(error.what) from None
    params: Any = kind.Params.model_validate(check)
    if not hasattr(params, "broken_by"):
        raise ValueError(f"a check of kind '{check.get('kind')}' has no limits for single inputs")
    limits: InputLimits = params
    return limits


class _InputSearcher:
    """Draws inputs for one case, and converts them to arrays and descriptions."""

    def __init__(self, prepared: Prepared, asked: InputRequest) -> None:
        self._setup = prepared
        self._asked = asked
        feeds, _ = prepared.comparison_data()
        self._samples = list(islice(feeds, _SAMPLES))
        # The data on which activations were calibrated, if known; else the data to compare on.
        self._domains = input_domains(
            prepared.given,
            prepared.inputs,
            prepared.resources.options.profiles,
            spans_of(islice(prepared.calibration or prepared.comparison_data()[0], _SEEN)),
            values={name: Span(*bounds) for name, bounds in asked.values.items()},
            beyond=asked.beyond,
        )

    def search(self, models: SideBySide, tuned: Path, file: Path) -> ParitySearch:
        """Run the search, save the input found, and return the evidence."""
        from qdqspec.parity.input_search import (  # loads Hypothesis, which few cases need
            drawn_inputs,
            search_inputs,
            simpler,
        )

        typical = typical_of(models.reference(sample) for sample in self._samples)
        prober = Prober(models, self._asked.limits, typical)
        limits = self._asked.seconds, self._setup.resources.seconds_left()
        found = search_inputs(
            drawn_inputs(self._domains, len(self._samples)),
            lambda drawn: prober.attempt(self._feeds(drawn)),
            examples=self._asked.examples,
            seconds=min(limit for limit in limits if limit is not None),
            seed_number=self._setup.settings.seed,
            simpler=lambda drawn: simpler(drawn, self._domains, self._feeds(drawn)),
        )
        probe = None
        if found.smallest is not None:
            feeds, inputs = self._feeds(found.smallest), tuple(self._described(found.smallest))
            kept = SavedProbe(feeds=feeds, params=self._asked.limits, typical=typical, inputs=inputs)
            write_probe(file, kept)
            command = _command(self._setup, tuned, file)
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

    def _described(self, drawn: Drawn) -> Iterator[TriedInput]:
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


def _command(prepared: Prepared, tuned: Path, file: Path) -> str:
    """The command that tries the input again on the same two files."""
    beside = prepared.output / MODEL
    if beside.is_file() and filecmp.cmp(beside, tuned, shallow=False):
        tuned = beside  # the copy of the same file among the results, not in the cache
    models = [_shown(prepared.reference), _shown(tuned)]
    settings = prepared.settings
    given = [f"--{name}={getattr(settings, name)}" for name in _OPTIONS if name in settings.origins]
    extra = [f"--backend-option={option}" for option in settings.backend_option]
    return shlex.join(["qdqspec", "verify", *models, "--input", _shown(file), *given, *extra])


def _shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
