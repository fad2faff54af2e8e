"""Single inputs on a model and its tuned model: runs one, and searches for the smallest that breaks a check.

Inputs that break a check are kept as files: for ``qdqspec verify``, and for Polygraphy. Polygraphy judges each sample
alone, and a parity check all samples together. A total SQNR below a limit means that at least one sample is below it (a
ratio of sums is never below the smallest of its ratios): the worst sample is kept.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict

from qdqspec._core import hooks
from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import write_whole
from qdqspec._core.records import problem_text
from qdqspec._core.registry import resolve
from qdqspec.accuracy import (
    InputResult,
    OutputComparison,
    SampleOutputs,
    Span,
    Typical,
    are_values,
    compare_outputs,
    input_domains,
    npz_bytes,
    read_beside,
    read_members,
    spans_of,
    typical_of,
)
from qdqspec.app.evidence.parity import SideBySide, both_models, by_sample, divided_batch
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.stored import MODEL, REFERENCE
from qdqspec.checks import Check
from qdqspec.errors import BackendError, ConfigError, DataError
from qdqspec.graph import OwnCopy, load_model, require_path
from qdqspec.types import ParityEvidence, ParitySearch, Probe, TensorParity, TriedInput
from qdqspec.types.requests import InputLimits, InputRequest

if TYPE_CHECKING:
    from qdqspec.accuracy import Drawn

FOLDER = "parity"  # subfolder of the case's folder: what broke a check, by the id of the check
INPUTS, FLOAT, TUNED = "inputs.json", "float.json", "tuned.json"
_CHECK = "check.json"  # the metadata beside the arrays
_MOST_BYTES = 1 << 20  # largest size of the metadata
_DATA = "tried"  # name of a probe's data in reports
_STOPPED = 1e9  # noise assigned to an input on which the tuned model fails


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
        for name, values in expected.items():  # NaN or infinity in an output that never holds it on the data
            is_finite = self._typical.get(name, Typical()).finite and np.issubdtype(values.dtype, np.floating)
            if is_finite and not np.isfinite(values).all():
                return None
        try:
            seen = self._models.tuned(feeds)
        except BackendError as error:
            return InputResult((_stopped(error),), _STOPPED)
        return self.judge(expected, seen)

    def judge(self, expected: Mapping[str, Array], seen: Mapping[str, Array]) -> InputResult:
        """The limits that the outputs for one sample break."""
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
        """Messages without limits on all data together, for which a single input has too few values."""
        alone = tuple(replace(output, agreement={}, worst_slice=None) for output in outputs)
        return () if self._params is None else self._params.broken_by(alone)


def _stopped(error: BackendError) -> str:
    return f"the tuned model does not run on it: {error.what}"


def search_input(
    prepared: Prepared,
    tuned: Path,
    request: InputRequest,
    check_id: str,
    *,
    samples: int = 8,
    seen: int = 1000,
) -> ParitySearch:
    """Search for an input that breaks the limits; the smallest one is written to a file, which is removed before.

    The search starts from ``samples`` inputs of the data, which are run first: more samples vary the inputs more. The
    ranges of the first ``seen`` inputs of the data bound the values: more inputs take longer to read.
    """
    file = prepared.output / FOLDER / f"{check_id}.npz"
    file.unlink(missing_ok=True)
    if tuned == require_path(prepared.given):
        return ParitySearch(missing="the model is unchanged")
    # loads Hypothesis, which few cases need
    from qdqspec.accuracy import drawn_inputs, search_inputs

    data, _ = prepared.comparison_data()
    starts = list(islice(data, samples))
    # The data on which activations were calibrated, if known; else the data to compare on.
    domains = input_domains(
        prepared.given,
        prepared.inputs,
        prepared.options.profiles,
        spans_of(islice(prepared.calibration or data, seen)),
        values={name: Span(*bounds) for name, bounds in request.values.items()},
        beyond=request.beyond,
    )
    with both_models(prepared, tuned) as models:
        try:
            typical = typical_of(models.reference(start) for start in starts)
            prober = Prober(models, request.limits, typical)
            limits = request.seconds, prepared.resources.seconds_left()
            found = search_inputs(
                drawn_inputs(domains, starts),
                lambda drawn: prober.attempt(_feeds(drawn)),
                examples=request.examples,
                seconds=min(limit for limit in limits if limit is not None),
                seed_number=prepared.settings.seed,
            )
            probe = None
            if (smallest := found.smallest) is not None:
                feeds = _feeds(smallest)
                inputs = tuple(
                    TriedInput(
                        name=domain.name,
                        dtype=str(domain.dtype),
                        shape=feeds[domain.name].shape,
                        words=smallest[domain.name].words,
                        low=bounds.low,
                        high=bounds.high,
                        known_low=domain.known.low,
                        known_high=domain.known.high,
                    )
                    for domain, bounds in zip(domains, spans_of([feeds]).values(), strict=True)
                )
                write_probe(
                    file, SavedProbe(feeds=feeds, params=request.limits, typical=typical, inputs=inputs)
                )
                command = _command(prepared, tuned, file)
                with suppress(BackendError):  # it may be the tuned model that does not run on it
                    again = save_replay(prepared, tuned, request.limits, file.stem, feeds, models.run(feeds))
                    command = "\n".join(filter(None, (command, again)))
                probe = prober.probe(feeds, inputs, file=_shown(file), command=command)
            return ParitySearch(
                tried=found.tried,
                seconds=found.seconds,
                late=found.late,
                closest_db=prober.closest_db,
                found=probe,
                missing="" if found.tried else "the float model runs on none of the inputs",
            )
        except BackendError as error:
            return ParitySearch(missing=error.what)


def _feeds(drawn: Drawn) -> dict[str, Array]:
    return {name: each.values for name, each in drawn.items()}


def _command(prepared: Prepared, tuned: Path, file: Path) -> str:
    """The command that tries the input again on the same two files."""
    beside = prepared.output / MODEL
    if beside.is_file() and filecmp.cmp(beside, tuned, shallow=False):
        tuned = beside  # the copy of the same file among the results, not in the cache
    reference = require_path(prepared.given)
    if isinstance(prepared.given, OwnCopy):  # which the session removes
        reference = prepared.output / REFERENCE
    models = [_shown(reference), _shown(tuned)]
    options = [word.replace("--qdq-", "--", 1) for word in prepared.settings.device_words]
    return shlex.join(["qdqspec", "verify", *models, "--input", _shown(file), *options])


# ---- files for qdqspec verify -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """The content of a probe file; ``params`` is ``None`` if it holds arrays only, such as one written by hand."""

    feeds: dict[str, Array]
    params: InputLimits | None = None
    typical: Mapping[str, Typical] = field(default_factory=dict)
    inputs: tuple[TriedInput, ...] = ()


def _limits(check: dict[str, Any]) -> InputLimits:
    """The limits in a file: the parameters of a check. Raises ``ValueError`` if they are not."""
    kind = str(check.get("kind"))
    try:
        params: Any = cast("Check", resolve("check", kind)).Params.model_validate(check)
    except ConfigError as error:
        raise ValueError(error.what) from None
    if not hasattr(params, "broken_by"):
        raise ValueError(f"a check of kind '{kind}' has no limits for single inputs")
    limits: InputLimits = params
    return limits


class _Metadata(BaseModel):
    """The JSON text beside the arrays."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1]
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
    feeds = dict[str, Array]()
    for name, member in read_members(path).items():
        row = next(iter(member.rows()), None)
        if row is None:
            cure = "an .npz file with one array for each input, its first axis the samples, is expected"
            raise DataError(f"array '{name}' holds no sample", where=path, cure=cure)
        feeds[name] = row
    text = read_beside(path, _CHECK, _MOST_BYTES)
    if text is None:
        return SavedProbe(feeds=feeds)
    try:
        read = _Metadata.model_validate_json(text)
        limits = _limits(read.check)
    except ValueError as error:
        raise DataError(
            f"'{_CHECK}' in it is damaged: {problem_text(error)}",
            where=path,
            cure="delete it and run the parity check again",
        ) from None
    return SavedProbe(feeds=feeds, params=limits, typical=read.typical, inputs=read.inputs)


# ---- files for Polygraphy -----------------------------------------------------------------------


def replay_failure(prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str) -> str:
    """Save the worst sample that breaks a limit alone; the command that repeats the failure, empty if there is none.

    Polygraphy judges a batch as one sample: each place of the saved batch has the worst sample.
    """
    feeds, _ = prepared.comparison_data()
    worst, noise = dict[str, Array](), -math.inf
    with both_models(prepared, tuned, divided=False) as models:
        prober = Prober(models, limits)
        for number, given in enumerate(feeds):
            run = models.run(given)
            batch = divided_batch(feeds, number, run)
            for row, (expected, seen, _) in enumerate(by_sample(feeds, number, run)):
                tried = prober.judge(expected, seen)
                if tried.broken and tried.noise > noise:
                    noise = tried.noise
                    worst = {n: a[[row] * batch] if a.shape[:1] == (batch,) else a for n, a in given.items()}
        if not worst:
            return ""
        return save_replay(prepared, tuned, limits, check_id, worst, models.run(worst))


def save_replay(
    prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str, feed: Feed, outputs: SampleOutputs
) -> str:
    """Write an input and the outputs of both models; the commands that repeat the comparison, one a line.

    The first command runs the tuned model again, if Polygraphy has a runner for the backend. The last command compares
    the outputs; the float model's outputs come first, because Polygraphy takes them as the signal of an SNR. Empty if
    Polygraphy knows none of the limits, or if outputs have NaN, infinite values or masks, which it does not leave out.
    """
    comparison = OutputComparison()
    comparison.add(outputs.reference, outputs.tuned)
    options = limits.polygraphy_words(comparison.results())
    names = {out.name for out in limits.chosen(comparison.results()) if out.compared or not out.matches}
    if not options or not all(are_values(outputs.reference[name]).all() for name in names):
        return ""
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER

    folder = prepared.output / FOLDER / check_id
    folder.mkdir(parents=True, exist_ok=True)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        save_json([dict(feed)], str(folder / INPUTS))
        for file, arrays in ((FLOAT, outputs.reference), (TUNED, outputs.tuned)):
            results = RunResults()
            # it compares the outputs of the first file, and does not subtract two booleans
            judged = {
                name: a.astype(np.uint8) if a.dtype == np.bool_ else a
                for name, a in arrays.items()
                if name in names
            }
            results.add([judged], runner_name=file.removesuffix(".json"))
            results.save(str(folder / file))
    compared = [["--load-outputs", _shown(folder / FLOAT), _shown(folder / TUNED), *options]]
    runner = hooks.declaration_of(prepared.backend.name).polygraphy
    given, made = _shown(folder / INPUTS), _shown(folder / TUNED)
    ran = [[_shown(tuned), *runner, "--load-inputs", given, "--save-outputs", made]] if runner else []
    if ran and len(load_model(tuned).outputs) > len(outputs.tuned):  # it stops at outputs that are no tensors
        ran[0] += ["--onnx-outputs", *outputs.tuned]
    return "\n".join(shlex.join(["polygraphy", "run", *command]) for command in [*ran, *compared])


def _shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
