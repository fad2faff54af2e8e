"""Runs single inputs on a model and its tuned model, and saves and loads such inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qdqspec.backends.base import Array
from qdqspec.checks.parity import ParityParams
from qdqspec.errors import BackendError, DataError
from qdqspec.files import write_whole
from qdqspec.parity.compare import Comparison, compare_outputs
from qdqspec.parity.npz import npz_bytes, read_beside, read_members
from qdqspec.parity.tried import Tried
from qdqspec.parity.typical import Typical
from qdqspec.session.parity import SideBySide
from qdqspec.types import ParityEvidence, Probe, TensorParity, TriedInput

Feed = Mapping[str, Array]

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
        self, models: SideBySide, params: ParityParams | None, typical: Mapping[str, Typical] | None = None
    ) -> None:
        self.closest_db = math.inf
        self._models = models
        self._params = params
        self._typical = typical or {}

    def attempt(self, feeds: Feed) -> Tried | None:
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
            return Tried((_stopped(error),), _STOPPED)
        comparison = Comparison(typical=self._typical)
        comparison.add(expected, seen)
        outputs = comparison.results()
        broken = self._broken(outputs)
        if not broken:
            self.closest_db = min(
                self.closest_db, *(out.sqnr_db for out in outputs if out.compared), math.inf
            )
        return Tried(broken, 0.0 if self._params is None else self._params.badness(outputs))

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
        usual = self._typical.get(name, Typical()).finite
        return (
            usual and bool(np.issubdtype(values.dtype, np.floating)) and not bool(np.isfinite(values).all())
        )


def _stopped(error: BackendError) -> str:
    return f"the tuned model does not run on it: {error.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProbe:
    """The content of a probe file: the input, its limits and its description.

    ``params`` is ``None`` in a file that holds arrays only, such as one written by hand.
    """

    feeds: dict[str, Array]
    params: ParityParams | None = None
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
        params = ParityParams.model_validate(read.check)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise DataError(
            f"'{_CHECK}' in it is damaged: {problem}", where=path, cure="have it found again"
        ) from None
    return SavedProbe(feeds=known, params=params, typical=read.typical, inputs=read.inputs)
