"""Converts records to JSON and back.

``record_from_json(record_to_json(record))`` keeps all that reports show, and a second round trip changes
nothing. Trial placements, check parameters and layer times, which only the journal and the spec hold, are not
in a record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from qdqspec.errors import StateError
from qdqspec.plain_json import read_json
from qdqspec.report.convert import case_from_part, part_from_case, part_from_parity, redacted_runtimes
from qdqspec.report.layout import SCHEMA_VERSION, CasePart, ParityPart, RunPart
from qdqspec.types import CaseRecord, ParityEvidence, RunRecord

_MOST_BYTES = 256 << 20  # a record of a thousand cases has a tenth of it
_AGAIN = "name a file that `pytest --qdq-json` or `tune --report run.json` wrote, or run the specs again"
_AnyPart = TypeVar("_AnyPart", RunPart, CasePart)


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """The run record as strict JSON data, without NaN or Infinity."""
    part = RunPart(
        schema_version=SCHEMA_VERSION,
        qdqspec=record.version,
        started=record.started,
        seconds=record.seconds,
        cases=tuple(part_from_case(case) for case in record.cases),
        runtimes=redacted_runtimes(record),
        common=record.common,
    )
    return _data(part)


def case_to_json(record: CaseRecord) -> dict[str, Any]:
    """One case as strict JSON data: the content of ``result.json``, and an entry of the run record."""
    return _data(part_from_case(record))


def parity_to_json(parity: ParityEvidence) -> dict[str, Any]:
    """A comparison of outputs as strict JSON data, as in ``result.json``."""
    return _data(part_from_parity(parity))


def record_from_json(data: object) -> RunRecord:
    """The run record of JSON data. Raises `StateError` if the data is damaged or not a run record."""
    part = _part(RunPart, data, "run record")
    with _damage("run record"):
        cases = tuple(case_from_part(case) for case in part.cases)
    return RunRecord(
        version=part.qdqspec,
        started=part.started,
        seconds=part.seconds,
        cases=cases,
        runtimes=part.runtimes,
        common=part.common,
    )


def case_from_json(data: object) -> CaseRecord:
    """The case of a ``result.json``. Raises `StateError` if the data is damaged or not a case record."""
    part = _part(CasePart, data, "case record")
    with _damage("case record"):
        return case_from_part(part)


def read_record(path: Path) -> RunRecord:
    """The run record in a file. Raises `StateError` naming the file if it cannot be read."""
    try:
        return record_from_json(read_json(path, most_bytes=_MOST_BYTES))
    except OSError as error:
        raise StateError(
            f"the run record cannot be read: {error.strerror}", where=path, cure="check the path"
        ) from None
    except ValueError as error:
        raise StateError(f"this is not a JSON file: {error}", where=path, cure=_AGAIN) from None
    except StateError as error:
        raise StateError(error.what, where=path, cure=error.cure) from None


def json_text(data: dict[str, Any]) -> str:
    """The data as a file's text: two spaces, sorted keys, strict JSON, a newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _data(part: RunPart | CasePart | ParityPart) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(part.model_dump_json())
    return data


def _part(layout: type[_AnyPart], data: object, name: str) -> _AnyPart:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        said = f"schema_version {version}" if isinstance(version, int) else "no schema_version"
        raise StateError(f"this is no {name} of schema_version {SCHEMA_VERSION}: it has {said}", cure=_AGAIN)
    if layout is RunPart and isinstance(data, dict) and "case" in data:
        raise StateError("this is the result of one case, not a run record", cure=_AGAIN)
    with _damage(name):
        return layout.model_validate(data)


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise the first validation error as a `StateError`."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        raise StateError(f"the {name} is damaged: {where}: {problem['msg']}", cure=_AGAIN) from None
    except ValueError as error:
        raise StateError(f"the {name} is damaged: {error}", cure=_AGAIN) from None
