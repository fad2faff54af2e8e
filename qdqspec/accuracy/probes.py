"""Tries single inputs on a model and its tuned model, finds the one of data that breaks limits most, and keeps inputs.

Inputs that break limits are kept for ``qdqspec verify``, and for Polygraphy. Polygraphy judges each sample alone, and a
parity check all samples together. A total SQNR below a limit means that at least one sample is below it (a ratio of
sums is never below the smallest of its ratios): the worst sample is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import write_whole
from qdqspec._core.records import problem_text
from qdqspec._core.registry import resolve
from qdqspec.accuracy.compare import (
    OutputComparison,
    SampleOutputs,
    Typical,
    are_values,
    by_sample,
    compare_outputs,
    divided_batch,
)
from qdqspec.accuracy.sources import npz_bytes, read_beside, read_members
from qdqspec.errors import BackendError, ConfigError, DataError
from qdqspec.types import ParityEvidence, Probe, TensorParity, TriedInput
from qdqspec.types.requests import InputLimits

INPUTS, FLOAT, TUNED = "inputs.json", "float.json", "tuned.json"  # for Polygraphy
_CHECK = "check.json"  # the metadata beside the arrays
_MOST_BYTES = 1 << 20  # largest size of the metadata
_DATA = "tried"  # name of a probe's data in reports
_STOPPED = 1e9  # noise assigned to an input on which the tuned model fails


class ModelPair(Protocol):
    """A model and its tuned model, which run on the same inputs. Each method raises `BackendError`."""

    def reference(self, feeds: Feed) -> dict[str, Array]:
        """The outputs of the float model only."""

    def tuned(self, feeds: Feed) -> dict[str, Array]:
        """The outputs of the tuned model only."""

    def run(self, feeds: Feed) -> SampleOutputs:
        """The outputs of both, and of the arithmetic of the tuned model."""


class InputResult(NamedTuple):
    """Messages of the limits that an input breaks, and its noise, which a search maximizes."""

    broken: tuple[str, ...]
    noise: float


@dataclass(slots=True)
class Prober:
    """Runs single inputs against ``limits``; ``closest_db`` is the smallest SQNR that broke none."""

    models: ModelPair
    limits: InputLimits
    typical: Mapping[str, Typical] = field(default_factory=dict)
    closest_db: float = math.inf

    def attempt(self, feeds: Feed) -> InputResult | None:
        """The limits that an input breaks; ``None`` if the float model has no comparable output for it."""
        try:
            expected = self.models.reference(feeds)
        except BackendError:
            return None
        for name, values in expected.items():  # NaN or infinity in an output that never holds it on the data
            is_finite = self.typical.get(name, Typical()).finite and np.issubdtype(values.dtype, np.floating)
            if is_finite and not np.isfinite(values).all():
                return None
        try:
            seen = self.models.tuned(feeds)
        except BackendError as error:
            return InputResult((_stopped(error),), _STOPPED)
        return self.judge(expected, seen)

    def judge(self, expected: Mapping[str, Array], seen: Mapping[str, Array]) -> InputResult:
        """The limits that the outputs for one sample break."""
        comparison = OutputComparison(typical=self.typical)
        comparison.add(expected, seen)
        outputs = comparison.results()
        broken = _broken(self.limits, outputs)
        if not broken:
            compared = (output.sqnr_db for output in outputs if output.compared)
            self.closest_db = min(self.closest_db, *compared, math.inf)
        return InputResult(broken, self.limits.error_excess(outputs))


def _broken(limits: InputLimits | None, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
    """Messages without limits on all data together, for which a single input has too few values."""
    alone = tuple(replace(output, agreement={}, worst_slice=None) for output in outputs)
    return () if limits is None else limits.broken_by(alone)


def _stopped(error: BackendError) -> str:
    return f"the tuned model does not run on it: {error.what}"


def worst_sample(models: ModelPair, limits: InputLimits, feeds: Iterable[Feed]) -> dict[str, Array]:
    """The sample of data that breaks a limit alone and has the largest error; empty if there is none.

    Polygraphy judges a batch as one sample: each place of a batch has the worst sample.
    """
    prober = Prober(models, limits)
    worst, noise = dict[str, Array](), -math.inf
    for number, given in enumerate(feeds):
        run = models.run(given)
        batch = divided_batch(feeds, number, run)
        for row, (expected, seen, _) in enumerate(by_sample(feeds, number, run)):
            tried = prober.judge(expected, seen)
            if tried.broken and tried.noise > noise:
                noise = tried.noise
                worst = {n: a[[row] * batch] if a.shape[:1] == (batch,) else a for n, a in given.items()}
    return worst


# ---- files for qdqspec verify -------------------------------------------------------------------


class _Metadata(BaseModel):
    """The JSON text beside the arrays."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1]
    check: dict[str, Any]
    typical: dict[str, Typical]
    inputs: tuple[TriedInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """An input and what it broke; ``limits`` is ``None`` if its file holds arrays only, such as one written by hand."""

    feeds: dict[str, Array]
    limits: InputLimits | None = None
    typical: Mapping[str, Typical] = field(default_factory=dict)
    inputs: tuple[TriedInput, ...] = ()

    def write(self, path: Path) -> None:
        """Write the input as an .npz file that numpy can read; the first axis of each array is one sample."""
        assert self.limits is not None
        beside = {
            "schema_version": 1,
            "check": self.limits.model_dump(mode="json", exclude_none=True),
            "typical": {name: asdict(one) for name, one in self.typical.items()},
            "inputs": [asdict(one) for one in self.inputs],
        }
        arrays = {name: array[None] for name, array in self.feeds.items()}
        content = npz_bytes(arrays, {_CHECK: json.dumps(beside, indent=1)})
        write_whole(path, content, what="the input", make_folder=True)

    @classmethod
    def read(cls, path: Path) -> Self:
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
            return cls(feeds=feeds)
        try:
            read = _Metadata.model_validate_json(text)
            limits = _limits(read.check)
        except ValueError as error:
            raise DataError(
                f"'{_CHECK}' in it is damaged: {problem_text(error)}",
                where=path,
                cure="delete it and run the parity check again",
            ) from None
        return cls(feeds=feeds, limits=limits, typical=read.typical, inputs=read.inputs)

    def probe(
        self, models: ModelPair, limits: InputLimits | None = None, *, file: str = "", command: str = ""
    ) -> Probe:
        """Compare the outputs for the input, with both errors apart, against ``limits`` or its own.

        Raises `BackendError` if the float model does not run on it.
        """
        models.reference(self.feeds)
        parity = ParityEvidence(outputs=(), samples=1, data=_DATA)
        try:
            parity = compare_outputs([models.run(self.feeds)], _DATA, typical=self.typical)
            broken = _broken(limits or self.limits, parity.outputs)
        except BackendError as error:
            broken = (_stopped(error),)
        return Probe(inputs=self.inputs, broken=broken, parity=parity, file=file, command=command)


def _limits(check: dict[str, Any]) -> InputLimits:
    """The limits in a file: the parameters of a check. Raises ``ValueError`` if they are not."""
    kind = str(check.get("kind"))
    try:
        found: Any = resolve("check", kind)
        params = found.Params.model_validate(check)
    except ConfigError as error:
        raise ValueError(error.what) from None
    if not hasattr(params, "broken_by"):
        raise ValueError(f"a check of kind '{kind}' has no limits for single inputs")
    limits: InputLimits = params
    return limits


# ---- files for Polygraphy -----------------------------------------------------------------------


class PolygraphyFiles(NamedTuple):
    """An input, the outputs of both models for it, and the options of `polygraphy run` that compare the outputs."""

    inputs: Path
    float_outputs: Path
    tuned_outputs: Path
    options: list[str]


def save_for_polygraphy(
    folder: Path, limits: InputLimits, feed: Feed, outputs: SampleOutputs
) -> PolygraphyFiles | None:
    """Write an input and the outputs of both models for it to a folder.

    ``None`` if Polygraphy knows none of the limits, or if outputs have NaN, infinite values or masks, which it does not
    leave out.
    """
    comparison = OutputComparison()
    comparison.add(outputs.reference, outputs.tuned)
    options = limits.polygraphy_words(comparison.results())
    names = {out.name for out in limits.chosen(comparison.results()) if out.compared or not out.matches}
    if not options or not all(are_values(outputs.reference[name]).all() for name in names):
        return None
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER

    folder.mkdir(parents=True, exist_ok=True)
    files = PolygraphyFiles(folder / INPUTS, folder / FLOAT, folder / TUNED, options)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        save_json([dict(feed)], str(files.inputs))
        for file, arrays in ((files.float_outputs, outputs.reference), (files.tuned_outputs, outputs.tuned)):
            results = RunResults()
            # it compares the outputs of the first file, and does not subtract two booleans
            judged = {
                name: a.astype(np.uint8) if a.dtype == np.bool_ else a
                for name, a in arrays.items()
                if name in names
            }
            results.add([judged], runner_name=file.stem)
            results.save(str(file))
    return files
