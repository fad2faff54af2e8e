"""Inputs that break a parity check, as files: for ``qdqspec verify``, and for Polygraphy.

Polygraphy judges each sample alone, and a parity check all samples together. A total SQNR below a limit means that at
least one sample is below it (a ratio of sums is never below the smallest of its ratios): the worst sample is kept.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.config import hooks
from qdqspec._core.files import write_whole
from qdqspec._core.registry import resolve
from qdqspec.accuracy.compare import OutputComparison, SampleOutputs, Typical
from qdqspec.accuracy.sources import npz_bytes, read_beside, read_members
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.checks.base import Check
from qdqspec.errors import ConfigError, DataError
from qdqspec.types import TriedInput
from qdqspec.types.requests import InputLimits

FOLDER = "parity"  # subfolder of the case's folder: what broke a check, by the id of the check
INPUTS, FLOAT, TUNED = "inputs.json", "float.json", "tuned.json"
_CHECK = "check.json"  # the metadata beside the arrays
_MOST_BYTES = 1 << 20  # largest size of the metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """The content of a probe file; ``params`` is ``None`` if it holds arrays only, such as one written by hand."""

    feeds: dict[str, Array]
    params: InputLimits | None = None
    typical: Mapping[str, Typical] = field(default_factory=dict)
    inputs: tuple[TriedInput, ...] = ()


def _limits(check: Any) -> InputLimits:
    """The limits in a file: the parameters of a check. Raises ``ValueError`` if they are not."""
    kind = str(check.get("kind")) if isinstance(check, dict) else ""
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
    check: Annotated[Any, BeforeValidator(_limits)]
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
        for row in member.rows():
            feeds[name] = row
            break
        else:
            cure = "an .npz file with one array for each input, its first axis the samples, is expected"
            raise DataError(f"array '{name}' holds no sample", where=path, cure=cure)
    text = read_beside(path, _CHECK, _MOST_BYTES)
    if text is None:
        return SavedProbe(feeds=feeds)
    try:
        read = _Metadata.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"'{_CHECK}' in it is damaged: {error.errors(include_url=False)[0]['msg']}",
            where=path,
            cure="delete it and run the parity check again",
        ) from None
    return SavedProbe(feeds=feeds, params=read.check, typical=read.typical, inputs=read.inputs)


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
        for file, arrays in ((FLOAT, outputs.reference), (TUNED, outputs.tuned)):
            results = RunResults()
            results.add([dict(arrays)], runner_name=file.removesuffix(".json"))
            results.save(str(folder / file))


def shown(path: Path) -> str:
    """A path relative to the current folder if below it, for messages and commands."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
