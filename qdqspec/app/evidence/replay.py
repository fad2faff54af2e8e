"""A parity failure as files of Polygraphy, and the commands `polygraphy run` that repeat it.

Polygraphy judges each sample alone, and a parity check all samples together. A total SQNR below a limit means that at
least one sample is below it (a ratio of sums is never below the smallest of its ratios): the worst sample is kept.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.config import hooks
from qdqspec.accuracy.compare import OutputComparison, SampleOutputs
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.types.requests import InputLimits

FOLDER = "parity"  # subfolder of the case's folder: what broke a check, by the id of the check
INPUTS, FLOAT, TUNED = "inputs.json", "float.json", "tuned.json"


def save_replay(
    prepared: Prepared, tuned: Path, limits: InputLimits, check_id: str, feed: Feed, outputs: SampleOutputs
) -> str:
    """Write an input and the outputs of both models; the commands that repeat the comparison, one a line.

    The first command runs the tuned model again, if Polygraphy has a runner for the backend. The last command compares
    the outputs; the float model's outputs come first, because Polygraphy takes them as the signal of an SNR. Empty if
    Polygraphy knows none of the limits.
    """
    comparison = OutputComparison()
    comparison.add(outputs.reference, outputs.tuned)
    words = limits.polygraphy_words(comparison.results())
    if not words:
        return ""
    folder = prepared.output / FOLDER / check_id
    _write(folder, feed, outputs)
    compared = [["--load-outputs", shown(folder / FLOAT), shown(folder / TUNED), *words]]
    runner = hooks.declaration_of(prepared.backend.name).polygraphy
    given, made = shown(folder / INPUTS), shown(folder / TUNED)
    ran = [[shown(tuned), *runner, "--load-inputs", given, "--save-outputs", made]] if runner else []
    return "\n".join(shlex.join(["polygraphy", "run", *command]) for command in [*ran, *compared])


def _write(folder: Path, feed: Feed, outputs: SampleOutputs) -> None:
    """Write the files ``inputs.json``, ``float.json`` and ``tuned.json``."""
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER

    folder.mkdir(parents=True, exist_ok=True)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        save_json([dict(feed)], str(folder / INPUTS))
        found: tuple[tuple[str, str, Mapping[str, Array]], ...] = (
            ("float", FLOAT, outputs.reference), ("tuned", TUNED, outputs.tuned),
        )  # fmt: skip
        for name, file, arrays in found:
            results = RunResults()
            results.add([dict(arrays)], runner_name=name)
            results.save(str(folder / file))


def shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
