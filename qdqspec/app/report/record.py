"""The JSON of records: `result.json` and the run record.

Objects have the fields of records (`qdqspec._core.records`) in a layout of their own: `case_to_json` makes it, and
`_read_case` undoes it. ``record_from_json(record_to_json(record))`` keeps all that reports show, and a second round
trip changes nothing. Trial placements, check parameters and layer times, which only the journal and the spec hold, are
not in a record.

Reading ignores unknown keys, so that records of a newer minor version stay readable; ``schema_version``
changes if an old reader would misinterpret a record. Numbers that JSON lacks are the strings ``"Infinity"``,
``"-Infinity"`` and ``"NaN"``: an output with an SQNR of ``"Infinity"`` is equal to the reference.
``parity.sqnr_db``, that of the whole model, is always a number: 200 if all outputs are equal. No absolute
path, user or host name is written.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Final, TypeVar

from qdqspec._core.files import RESULT
from qdqspec._core.records import problem_text, read_json, to_data
from qdqspec.app.report.tables import spec_path
from qdqspec.errors import StateError
from qdqspec.types import (
    CaseRecord,
    Evidence,
    LatencyEvidence,
    ParityEvidence,
    PlacedPair,
    Placement,
    Provenance,
    RunRecord,
)

SCHEMA_VERSION: Final = 1
_MOST_BYTES = 256 << 20  # a record of a thousand cases has a tenth of it
_AGAIN = "name a file that `pytest --qdq-json` or `tune --report run.json` wrote, or run the specs again"
# Keys of texts of a runtime or of this program, which may name folders. Names of nodes and tensors look like paths.
_FREE_TEXTS = {"advice", "changed", "command", "details", "error", "errors_missing", "failure", "headline"}
_FREE_TEXTS |= {"notes", "reason", "text", "undivided", "warnings"}
# Fields that an object has as its record does.
_CASE = ("id", "title", "tags", "matrix")
_EVIDENCE = (
    *("backend", "target", "device", "parity", "accuracy", "regression", "builds", "figures", "size_bytes"),
    *("profiles", "quantized", "graph", "warnings"),
)
# Properties of a record that its object has beside the fields.
_PARITY = ("sqnr_db", "cosine", "max_abs", "max_steps")
_TRIALS = ("total", "built", "failed")
# Fields that an object lacks: they are in other objects, or in the journal only.
_LATENCY_LACKS = ("samples", "speedup", "failures")
_SEARCH_LACKS = ("winner", "trials", "regions", "patterns")
_TRIAL_LACKS = ("samples", "rival", "graph_hash", "layers", "subgraph", "all_data_db", "is_part", "eps")

_Kind = TypeVar("_Kind")
_Record = TypeVar("_Record")
_ADAPTERS: dict[Any, Any] = {}  # of pydantic, by kind of record: the first use of one takes long


# ---- writing -------------------------------------------------------------------------------------


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """The run record as strict JSON data, without NaN or Infinity."""
    evidence = {case.evidence.case.name: case.evidence for case in record.cases}
    runtimes = [
        _written(comparison)
        | {"models": [_written(model, evidence.get(model.case)) for model in comparison.models]}
        for comparison in record.runtimes
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "qdqspec": record.version,
        "started": record.started,
        "seconds": _written(record.seconds),
        "cases": [case_to_json(case) for case in record.cases],
        "runtimes": runtimes,
    }


def case_to_json(record: CaseRecord) -> dict[str, Any]:
    """One case as strict JSON data: the content of ``result.json``, and an entry of the run record.

    Parts that were not measured are null.
    """
    found, search, latency = record.evidence, record.evidence.search, record.evidence.latency
    model, spec = found.case.model, found.case.spec
    is_below = spec is not None and model.is_relative_to(spec.parent)
    timed: dict[str, dict[str, Any]] = {}
    if latency is not None:
        for role, samples in latency.samples.items():
            timed[role] = {"median_ms": latency.median_ms(role), "samples": samples}
    ops: dict[str, list[str]] = {}
    for node, op_type in found.node_ops.items():
        ops.setdefault(op_type, []).append(node)
    pairs = found.pairs
    if not pairs and search is not None:  # without scales if the scales were not requested
        sites = sorted(search.winner.sites, key=lambda site: (site.tensor, site.consumers))
        pairs = tuple(PlacedPair(site=site, scale=(), zero_point=()) for site in sites)
    source = latency or search  # of the times; if none were taken, of the search's result
    provenance = Provenance() if source is None else source.provenance
    if found.status == "untimed":
        provenance = Provenance(source="untimed")
    bounds = latency and (latency.speedup.low, latency.speedup.high)
    data = {
        **{name: getattr(found.case, name) for name in _CASE},
        **{name: getattr(found, name) for name in _EVIDENCE},
        "schema_version": SCHEMA_VERSION,
        "case": found.case.name,
        "status": found.status,
        "reason": found.reason,
        "spec": spec_path(found.case),
        "model": {
            "sha256": found.model_sha256,
            "path": model.relative_to(spec.parent).as_posix() if spec and is_below else model.name,
            "nodes": found.model_nodes,
        },
        "scheme": search and {"digest": search.winner.digest},
        "reference": timed.pop("reference", None),
        "tuned": timed.pop("tuned", None),
        "others": [{"role": role, **own} for role, own in timed.items()],
        "speedup": latency
        and {
            "median": latency.speedup.median,
            "ci95": bounds,
            "interval": bounds,
            "at_least": latency.at_least,
        },
        "latency": latency and _without(latency, *_LATENCY_LACKS),
        "trials": search
        and {
            **{name: getattr(search, name) for name in _TRIALS},
            "list": [
                {**_without(trial, *_TRIAL_LACKS), "placement": trial.placement.digest}
                for trial in search.trials
            ],
        },
        "search": search and _without(search, *_SEARCH_LACKS),
        "regions": search and {"count": search.regions},
        "patterns": search and {"count": search.patterns},
        "placement": [
            {**_without(pair.site), "scale": pair.scale, "zero_point": pair.zero_point} for pair in pairs
        ],
        "parity": found.parity and _parity(found.parity),
        "ops": ops,
        "checks": [
            {
                **_without(result),
                **_without(result.verdict, "command", "outcome"),
                "verdict": result.verdict.outcome,
            }
            for result in record.results
        ],
        "provenance": provenance,
    }
    written: dict[str, Any] = _written(data, found)
    return written


def _parity(parity: ParityEvidence) -> dict[str, Any]:
    return {**{name: getattr(parity, name) for name in _PARITY}, **_without(parity)}


def parity_to_json(parity: ParityEvidence) -> dict[str, Any]:
    """A comparison of outputs as strict JSON data, as in ``result.json``."""
    data: dict[str, Any] = _written(_parity(parity))
    return data


def json_text(data: dict[str, Any]) -> str:
    """The data as a file's text: two spaces, sorted keys, strict JSON, a newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _without(record: Any, *names: str) -> dict[str, Any]:
    """The fields of a record but those."""
    kept = (each.name for each in fields(record) if each.init and each.name not in names)
    return {name: getattr(record, name) for name in kept}


def _written(record: object, evidence: Evidence | None = None) -> Any:
    """A record as strict JSON data: a text for each number that JSON lacks, and without the folders of a case.

    Error messages of a runtime name temporary files: such texts have names in place of this machine's folders.
    """
    named: dict[str, Path | None] = {}
    if evidence is not None:
        case = evidence.case
        named = {
            "<output>": evidence.output,
            "<spec folder>": case.spec.parent if case.spec else None,
            "<model folder>": case.model.parent,
            "<here>": Path.cwd(),
            "<temporary>": Path(tempfile.gettempdir()),
            "<home>": Path.home(),
        }
    names = {
        str(path): name
        for name, path in named.items()
        if path is not None and path.is_absolute() and path != path.parent
    }
    # The longest first: an output folder is often inside the spec's folder, and that inside the home folder.
    either = "|".join(re.escape(folder) for folder in sorted(names, key=len, reverse=True))
    # Whole folders only: longer names with the same start, and node names that contain one, do not change.
    pattern = re.compile(rf"(?<![\w/.-])({either})(?![\w.-])")

    def walk(value: Any, free: bool) -> Any:
        if isinstance(value, dict):
            return {key: walk(each, free or key in _FREE_TEXTS) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each, free) for each in value]
        if isinstance(value, str):
            return pattern.sub(lambda hit: names[hit[1]], value) if free and names else value
        if isinstance(value, int) or not isinstance(value, Real):
            return value
        number = float(value)  # checks may have numbers of NumPy
        lacking = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return number if math.isfinite(number) else lacking.get(number, "NaN")

    return walk(to_data(record), False)


# ---- reading -------------------------------------------------------------------------------------


def record_from_json(data: object) -> RunRecord:
    """The run record of JSON data. Raises `StateError` if the data is damaged or not a run record."""
    if isinstance(data, dict) and "case" in data:
        raise StateError("this is the result of one case, not a run record", cure=_AGAIN)
    with _damage_of("run record", data) as whole:
        cases = []
        for number, case in enumerate(_parts(whole, "cases")):
            try:
                cases.append(_read_case(case))
            except ValueError as error:
                raise ValueError(f"cases.{number}.{problem_text(error)}") from None
        own = {**whole, "version": whole.get("qdqspec"), "cases": ()}
        return replace(_validated(RunRecord, own), cases=tuple(cases))


def case_from_json(data: object) -> CaseRecord:
    """The case of a ``result.json``. Raises `StateError` if the data is damaged or not a case record."""
    with _damage_of("case record", data) as case:
        return _read_case(case)


def read_record(path: Path) -> RunRecord:
    """The run record in a file. Raises `StateError` naming the file if it cannot be read."""
    return _read(path, record_from_json, "check the path", _AGAIN)


def read_case(folder: Path) -> CaseRecord:
    """The result in the folder of a case. Raises `StateError` naming the file if it cannot be read."""
    absent = "name the folder of a case, which has its tuned.onnx"
    return _read(folder / RESULT, case_from_json, absent, "run the case again")


def _read(path: Path, parse: Callable[[object], _Record], absent: str, damaged: str) -> _Record:
    """The record in a file. Errors name the file, and what to do if it is absent or damaged."""
    try:
        return parse(read_json(path, most_bytes=_MOST_BYTES))
    except OSError as error:
        raise StateError(f"it cannot be read: {error.strerror}", where=path, cure=absent) from None
    except ValueError as error:
        raise StateError(f"this is not a JSON file: {error}", where=path, cure=damaged) from None
    except StateError as error:
        raise StateError(error.what, where=path, cure=damaged) from None


@contextmanager
def _damage_of(name: str, data: object) -> Iterator[dict[str, Any]]:
    """The data if it is an object of this version; the first error in it is raised as a `StateError`."""
    whole = data if isinstance(data, dict) else {}
    version = whole.get("schema_version")
    if version != SCHEMA_VERSION:
        found = f"schema_version {version}" if isinstance(version, int) else "no schema_version"
        raise StateError(f"this is no {name} of schema_version {SCHEMA_VERSION}: it has {found}", cure=_AGAIN)
    try:
        yield whole
    except ValueError as error:
        raise StateError(f"the {name} is damaged: {problem_text(error, 'the whole')}", cure=_AGAIN) from None


def _part(of: dict[str, Any], name: str, kind: Callable[[], _Kind]) -> _Kind:
    """A part of an object; an empty one if it is null. Raises ``ValueError`` if it is absent or of another kind."""
    empty = kind()
    if name not in of:
        raise ValueError(f"{name}: Field required")
    if of[name] is not None and not isinstance(of[name], type(empty)):
        raise ValueError(f"{name}: Input should be a valid {type(empty).__name__}")
    return empty if of[name] is None else of[name]


def _parts(of: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of a list, which is empty if it is null. Raises ``ValueError`` if it has other parts."""
    each = {f"{name}.{number}": value for number, value in enumerate(_part(of, name, list[Any]))}
    return [_part(each, place, dict[str, Any]) for place in each]


def _validated(kind: type[_Record], data: dict[str, Any]) -> _Record:
    """A record of its fields in JSON data; others are ignored. Raises ``ValueError`` with the first problem."""
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    record: _Record = _ADAPTERS[kind].validate_python(data)
    return record


def _read_case(data: dict[str, Any]) -> CaseRecord:
    """The case of its object. Raises ``ValueError`` if its parts are damaged or contradict each other."""
    model, speedup, latency, search, trials = (
        _part(data, name, dict[str, Any]) for name in ("model", "speedup", "latency", "search", "trials")
    )
    spec, path, ops = _part(data, "spec", str), _part(model, "path", str), _part(data, "ops", dict[str, Any])
    sites = _parts(data, "placement")
    timed = {role: _part(data, role, dict[str, Any]) for role in ("reference", "tuned")}
    timed |= {_part(other, "role", str): other for other in _parts(data, "others")}
    ends = _part(speedup, "ci95", list[Any]) if speedup else (None, None)
    bounds = dict(zip(("low", "high"), ends, strict=True))
    found = {
        **{name: data[name] for name in _EVIDENCE if name in data},
        "case": {
            **{name: data[name] for name in _CASE if name in data},
            "model": Path(spec).parent / path,
            "spec": spec or None,
        },
        "model_sha256": model.get("sha256"),
        "model_nodes": model.get("nodes", ""),
        "search": search
        and {
            **search,
            "winner": {"sites": sites},
            "trials": [
                {**trial, "placement": Placement.of_digest(_part(trial, "placement", str))}
                for trial in _parts(trials, "list")
            ],
            **{name: _part(data, name, dict[str, Any]).get("count", 0) for name in ("regions", "patterns")},
        },
        "pairs": [{**site, "site": site} for site in sites],
        "latency": latency
        and {
            **latency,
            "samples": {role: own.get("samples") for role, own in timed.items() if own},
            "speedup": {**speedup, **bounds},
        },
        "node_ops": {str(node): op_type for op_type in ops for node in _part(ops, op_type, list[Any])},
        "skipped": data.get("reason", "") if data.get("status") == "skipped" else "",
    }
    found |= {name: found[name] or None for name in ("search", "latency")}
    results = [
        {**check, "verdict": {**check, "outcome": check.get("verdict")}} for check in _parts(data, "checks")
    ]
    record = _validated(CaseRecord, {"evidence": found, "results": results})
    if record.evidence.latency is not None:
        _require_consistent(record.evidence.latency)
    return record


def _require_consistent(latency: LatencyEvidence) -> None:
    """Raise ``ValueError`` if times lack that a report shows."""
    for role, taken in latency.samples.items():
        if not taken.on(latency.clock):
            raise ValueError(f"{role} has no samples")
        if len(taken.profiles) != len(latency.profiles):
            count = len(taken.profiles)
            raise ValueError(f"{role} has samples of {count} profiles, not {len(latency.profiles)}")
    for role, test in latency.tested.items():
        if not all(ratio.median > 0 and ratio.high > 0 for ratio in (test.mean, test.enclosing)):
            raise ValueError(f"{role} has a tested ratio that is not positive")
