"""Keeps inputs that break a parity check among the results of a case, with the commands that repeat it."""

from __future__ import annotations

import filecmp
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from qdqspec._core import hooks
from qdqspec._core.arrays import Feed
from qdqspec.accuracy import SampleOutputs, save_for_polygraphy, worst_sample
from qdqspec.app.evidence.parity import both_models
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.stored import MODEL, REFERENCE
from qdqspec.errors import BackendError
from qdqspec.graph import OwnCopy, load_model, require_path
from qdqspec.types import ParitySearch
from qdqspec.types.requests import InputLimits, InputRequest

FOLDER = "parity"  # subfolder of the case's folder: what broke a check, by the id of the check


def find_input(
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
    from qdqspec.accuracy import input_domains, search_input

    data, _ = prepared.data.for_comparison()
    starts = list(islice(data, samples))
    # The data on which activations were calibrated, if known; else the data to compare on.
    known = islice(prepared.data.calibration or data, seen)
    domains = input_domains(prepared.given, prepared.data.specs, prepared.options.profiles, known, request)
    with both_models(prepared, tuned) as models:
        try:
            search, found = search_input(
                models,
                request,
                domains,
                starts,
                seconds_left=prepared.resources.seconds_left,
                seed_number=prepared.settings.seed,
            )
            if found is None:
                return search
            found.write(file)
            command = _command(prepared, tuned, file)
            with suppress(BackendError):  # it may be the tuned model that does not run on it
                outputs = models.run(found.feeds)
                again = save_replay(prepared, tuned, request.limits, file.stem, found.feeds, outputs)
                command = "\n".join(filter(None, (command, again)))
            return replace(search, found=found.probe(models, file=_shown(file), command=command))
        except BackendError as error:
            return ParitySearch(missing=error.what)


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


def replay_failure(prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str) -> str:
    """Save the worst sample that breaks a limit alone; the command that repeats the failure, empty if there is none."""
    feeds, _ = prepared.data.for_comparison()
    with both_models(prepared, tuned, divided=False) as models:
        worst = worst_sample(models, limits, feeds)
        return save_replay(prepared, tuned, limits, check_id, worst, models.run(worst)) if worst else ""


def save_replay(
    prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str, feed: Feed, outputs: SampleOutputs
) -> str:
    """Write an input and the outputs of both models; the commands that repeat the comparison, one a line.

    The first command runs the tuned model again, if Polygraphy has a runner for the backend. The last command compares
    the outputs; the float model's outputs come first, because Polygraphy takes them as the signal of an SNR. Empty if
    Polygraphy cannot judge the outputs by the limits.
    """
    saved = save_for_polygraphy(prepared.output / FOLDER / check_id, limits, feed, outputs)
    if saved is None:
        return ""
    given, own, made = (_shown(file) for file in (saved.inputs, saved.float_outputs, saved.tuned_outputs))
    runner = hooks.declaration_of(prepared.backend.name).polygraphy
    ran = [[_shown(tuned), *runner, "--load-inputs", given, "--save-outputs", made]] if runner else []
    if ran and len(load_model(tuned).outputs) > len(outputs.tuned):  # it stops at outputs that are no tensors
        ran[0] += ["--onnx-outputs", *outputs.tuned]
    compared = ["--load-outputs", own, made, *saved.options]
    return "\n".join(shlex.join(["polygraphy", "run", *command]) for command in [*ran, compared])


def _shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
