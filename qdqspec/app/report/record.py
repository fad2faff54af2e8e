"""The JSON of records: `result.json` and the run record.

Each class ``...Part`` is one JSON object. The decorator `written` gives it the fields of a record class, so that a new
field of the record is written and read without further code.

``record_from_json(record_to_json(record))`` keeps all that reports show, and a second round trip changes
nothing. Trial placements, check parameters and layer times, which only the journal and the spec hold, are not
in a record.

Reading ignores unknown keys, so that records of a newer minor version stay readable; ``schema_version``
changes if an old reader would misinterpret a record. Numbers that JSON lacks are the strings ``"Infinity"``,
``"-Infinity"`` and ``"NaN"``: an output with an SQNR of ``"Infinity"`` is equal to the reference.
``parity.sqnr_db``, that of the whole model, is always a number: 200 if all outputs are equal. No absolute
path, user or host name is written.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, computed_field, create_model

from qdqspec._core.files import RESULT
from qdqspec._core.records import problem_text, read_json, record_of
from qdqspec.app.report.tables import spec_path
from qdqspec.errors import StateError
from qdqspec.types import (
    AccuracyEvidence,
    BuildEvidence,
    Case,
    CaseRecord,
    CheckResult,
    DeviceKey,
    Evidence,
    GraphPart,
    Interval,
    LatencyEvidence,
    Outcome,
    ParityEvidence,
    PlacedPair,
    Placement,
    Provenance,
    QuantizedWork,
    RegressionEvidence,
    RunRecord,
    RuntimeComparison,
    Samples,
    SearchResult,
    Section,
    Severity,
    ShapeProfile,
    Site,
    Status,
    Trial,
    Verdict,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION: Final = 1
_MOST_BYTES = 256 << 20  # a record of a thousand cases has a tenth of it
_AGAIN = "name a file that `pytest --qdq-json` or `tune --report run.json` wrote, or run the specs again"
# Keys of texts of a runtime or of this program, which may name folders. Names of nodes and tensors look like paths.
_FREE_TEXTS = {"advice", "changed", "command", "details", "error", "errors_missing", "failure", "headline"}
_FREE_TEXTS |= {"notes", "reason", "text", "undivided", "warnings"}


class RecordPart(BaseModel):
    """One JSON object."""

    model_config = ConfigDict(frozen=True, from_attributes=True, ser_json_inf_nan="strings")


_Part = TypeVar("_Part", bound=RecordPart)
_Record = TypeVar("_Record")


def written(record: type[DataclassInstance], *without: str) -> Callable[[type[_Part]], type[_Part]]:
    """A class decorator: the object has the fields of a record too, except those in ``without``."""
    kinds = get_type_hints(record)
    kept = (each for each in fields(record) if each.init and each.name not in without)
    own: dict[str, Any] = {each.name: (kinds[each.name], each) for each in kept}

    def decorate(part: type[_Part]) -> type[_Part]:
        return create_model(part.__name__, __base__=part, __doc__=part.__doc__, **own)

    return decorate


def _digest(placement: object) -> object:
    return placement.digest if isinstance(placement, Placement) else placement


class ModelPart(RecordPart):
    """The model's SHA-256, and its path relative to the spec, or its name if it is outside that folder.

    ``nodes`` are digests of its nodes and constants, from which ``compare`` names what changed.
    """

    sha256: str
    path: str
    nodes: str = ""


class SchemePart(RecordPart):
    """The digest of the placement: equal digests have Q/DQ at the same places."""

    digest: str


class TimedPart(RecordPart):
    """One role's samples, and their median on the gating clock."""

    median_ms: float
    samples: Samples


class OtherPart(TimedPart):
    """Another candidate of the final measurement: quantize-everything, or the runner-up."""

    role: str


class SpeedupPart(RecordPart):
    """Reference time over tuned time. ``interval``, also written as ``ci95``, is its 95 % prediction interval.

    ``at_least`` is the bound that is proved, null if it was not tested.
    """

    median: float
    ci95: tuple[float, float]
    at_least: float | None = None

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the prediction interval."""
        return self.ci95


@written(LatencyEvidence, "samples", "speedup", "failures")
class LatencyPart(RecordPart):
    """Conditions of the times above. ``ratios`` are times over the reference's, by role.

    With several shape ``profiles`` these and the times above are weighted geometric means; each profile's
    samples are among the role's ``samples``, in this order.
    """


@written(
    Trial,
    *("placement", "samples", "rival", "graph_hash", "layers", "subgraph"),
    *("all_data_db", "is_part", "eps"),
)
class TrialPart(RecordPart):
    """One build of the search, with the digest of its placement; the journal keeps its sites and samples."""

    placement: Annotated[str, BeforeValidator(_digest)] = ""


class TrialsPart(RecordPart):
    """The search's builds; ``list`` also has the rebuilds for noise and confirmation."""

    total: int
    built: int
    failed: int
    list: tuple[TrialPart, ...]


@written(SearchResult, "winner", "trials", "regions", "patterns")
class SearchPart(RecordPart):
    """The search and its winner."""


class CountPart(RecordPart):
    """A count."""

    count: int


@written(Site)
class PairPart(RecordPart):
    """One Q/DQ pair, in names of the model without Q/DQ. ``consumers`` are (node, input) pairs."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]


@written(ParityEvidence)
class ParityPart(RecordPart):
    """Parity of the worst output, of each output, and of quantization and the runtime separately."""

    sqnr_db: float
    cosine: float
    max_abs: float
    max_steps: float


class CheckPart(RecordPart):
    """The result of one check."""

    id: str
    kind: str
    severity: Severity
    verdict: Outcome
    headline: str
    numbers: Mapping[str, float]
    sections: tuple[Section, ...]
    advice: str


class CasePart(RecordPart):
    """``result.json``. Parts that were not measured are null. ``ops`` lists all nodes by op type, ``graph`` the
    model folded into a few parts with their times and errors.

    ``regression`` is the result for each entry of the committed baseline. ``reason`` explains ``status``.
    """

    schema_version: Literal[1]
    case: str
    status: Status = "tuned"
    reason: str = ""
    id: str
    spec: str | None
    title: str
    tags: tuple[str, ...]
    matrix: Mapping[str, str | int | float]
    backend: str
    target: str
    device: DeviceKey
    model: ModelPart
    scheme: SchemePart | None
    reference: TimedPart | None
    tuned: TimedPart | None
    others: tuple[OtherPart, ...]
    speedup: SpeedupPart | None
    latency: LatencyPart | None
    trials: TrialsPart | None
    search: SearchPart | None
    regions: CountPart | None
    patterns: CountPart | None
    placement: tuple[PairPart, ...]
    parity: ParityPart | None
    accuracy: Mapping[str, AccuracyEvidence]
    regression: Mapping[str, RegressionEvidence] = {}
    builds: Mapping[str, BuildEvidence] = {}
    figures: Mapping[str, Mapping[str, float]] = {}
    size_bytes: Mapping[str, int]
    profiles: tuple[ShapeProfile, ...] = ()
    ops: Mapping[str, tuple[str, ...]]
    quantized: QuantizedWork | None = None
    graph: tuple[GraphPart, ...] = ()
    checks: tuple[CheckPart, ...]
    warnings: tuple[str, ...]
    provenance: Provenance


class RunPart(RecordPart):
    """The run record: all cases of a run, and ``runtimes``: comparisons of cases that differ in the runtime only."""

    schema_version: Literal[1]
    qdqspec: str
    started: str
    seconds: float
    cases: tuple[CasePart, ...]
    runtimes: tuple[RuntimeComparison, ...] = ()


# ---- writing -------------------------------------------------------------------------------------


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """The run record as strict JSON data, without NaN or Infinity."""
    own = {**_fields(RunPart, record), "qdqspec": record.version, "cases": ()}
    data = _data(RunPart, {"schema_version": SCHEMA_VERSION, **own})
    data["cases"] = [case_to_json(case) for case in record.cases]
    folders = {case.evidence.case.name: case.evidence for case in record.cases}
    for comparison in data["runtimes"]:
        comparison["models"] = [
            _redacted(model, folders.get(model["case"])) for model in comparison["models"]
        ]
    return data


def case_to_json(record: CaseRecord) -> dict[str, Any]:
    """One case as strict JSON data: the content of ``result.json``, and an entry of the run record."""
    found, search, latency = record.evidence, record.evidence.search, record.evidence.latency
    timed: dict[str, dict[str, Any]] = {}
    if latency is not None:
        for role, samples in latency.samples.items():
            timed[role] = {"role": role, "median_ms": latency.median_ms(role), "samples": samples}
    ops: dict[str, list[str]] = {}
    for node, op_type in found.node_ops.items():
        ops.setdefault(op_type, []).append(node)
    pairs = found.pairs
    if not pairs and search is not None:  # without scales if the scales were not requested
        sites = sorted(search.winner.sites, key=lambda site: (site.tensor, site.consumers))
        pairs = tuple(PlacedPair(site=site, scale=(), zero_point=()) for site in sites)
    model, spec = found.case.model, found.case.spec
    is_below = spec is not None and model.is_relative_to(spec.parent)
    source = latency or search  # of the times; if none were taken, of the search's result
    provenance = Provenance() if source is None else source.provenance
    if found.status == "untimed":
        provenance = Provenance(source="untimed")
    data = _data(
        CasePart,
        {
            **_fields(CasePart, found.case, found),
            "schema_version": SCHEMA_VERSION,
            "case": found.case.name,
            "spec": spec_path(found.case),
            "model": {
                "sha256": found.model_sha256,
                "path": model.relative_to(spec.parent).as_posix() if spec and is_below else model.name,
                "nodes": found.model_nodes,
            },
            "scheme": search and {"digest": search.winner.digest},
            "reference": timed.pop("reference", None),
            "tuned": timed.pop("tuned", None),
            "others": tuple(timed.values()),
            "speedup": latency
            and {
                "median": latency.speedup.median,
                "ci95": (latency.speedup.low, latency.speedup.high),
                "at_least": latency.at_least,
            },
            "trials": search and {**_fields(TrialsPart, search), "list": search.trials},
            "regions": search and {"count": search.regions},
            "patterns": search and {"count": search.patterns},
            "placement": tuple(_fields(PairPart, pair.site, pair) for pair in pairs),
            "ops": ops,
            "checks": tuple(
                {**_fields(CheckPart, result.verdict, result), "verdict": result.verdict.outcome}
                for result in record.results
            ),
            "provenance": provenance,
        },
    )
    return _redacted(data, found)


def parity_to_json(parity: ParityEvidence) -> dict[str, Any]:
    """A comparison of outputs as strict JSON data, as in ``result.json``."""
    return _data(ParityPart, parity)


def json_text(data: dict[str, Any]) -> str:
    """The data as a file's text: two spaces, sorted keys, strict JSON, a newline at the end."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _data(part: type[RecordPart], values: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(part.model_validate(values).model_dump_json())
    return data


def _fields(part: type[RecordPart], *records: object) -> dict[str, Any]:
    """The values of the fields that these records have by the same name, the last one's first."""
    names = part.model_fields
    return {name: getattr(each, name) for each in records for name in names if hasattr(each, name)}


def _redacted(data: dict[str, Any], evidence: Evidence | None) -> dict[str, Any]:
    """The data without this machine's folders in free texts: error messages of a runtime name temporary files."""
    if evidence is None:
        return data
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
        return pattern.sub(lambda hit: names[hit[1]], value) if free and isinstance(value, str) else value

    redacted: dict[str, Any] = walk(data, False)
    return redacted


# ---- reading -------------------------------------------------------------------------------------


def record_from_json(data: object) -> RunRecord:
    """The run record of JSON data. Raises `StateError` if the data is damaged or not a run record."""
    if isinstance(data, dict) and "case" in data:
        raise StateError("this is the result of one case, not a run record", cure=_AGAIN)
    with _damage_of("run record", data):
        part = RunPart.model_validate(data)
        cases = tuple(map(_case_from_part, part.cases))
        return record_of(RunRecord, part, version=part.qdqspec, cases=cases)


def case_from_json(data: object) -> CaseRecord:
    """The case of a ``result.json``. Raises `StateError` if the data is damaged or not a case record."""
    with _damage_of("case record", data):
        return _case_from_part(CasePart.model_validate(data))


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
def _damage_of(name: str, data: object) -> Iterator[None]:
    """Raise the first error in the data as a `StateError`."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        found = f"schema_version {version}" if isinstance(version, int) else "no schema_version"
        raise StateError(f"this is no {name} of schema_version {SCHEMA_VERSION}: it has {found}", cure=_AGAIN)
    try:
        yield
    except ValueError as error:
        raise StateError(f"the {name} is damaged: {problem_text(error, 'the whole')}", cure=_AGAIN) from None


def _case_from_part(part: CasePart) -> CaseRecord:
    """The case record. Raises ``ValueError`` if its parts contradict each other."""
    spec = Path(part.spec) if part.spec is not None else None
    model = Path(part.model.path) if spec is None else spec.parent / part.model.path
    pairs = tuple(record_of(PlacedPair, pair, site=record_of(Site, pair)) for pair in part.placement)
    search = None
    if part.search is not None and part.trials is not None:
        search = record_of(
            SearchResult,
            part.search,
            winner=Placement(sites=frozenset(pair.site for pair in pairs)),
            trials=tuple(
                record_of(Trial, trial, placement=Placement.of_digest(trial.placement))
                for trial in part.trials.list
            ),
            regions=part.regions.count if part.regions else 0,
            patterns=part.patterns.count if part.patterns else 0,
        )
    evidence = record_of(
        Evidence,
        part,
        case=Case(id=part.id, model=model, spec=spec, title=part.title, tags=part.tags, matrix=part.matrix),
        model_sha256=part.model.sha256,
        model_nodes=part.model.nodes,
        search=search,
        pairs=pairs,
        latency=_latency_evidence(part),
        parity=None if part.parity is None else record_of(ParityEvidence, part.parity),
        node_ops={node: op_type for op_type, nodes in part.ops.items() for node in nodes},
        skipped=part.reason if part.status == "skipped" else "",
    )
    results = tuple(
        record_of(CheckResult, check, verdict=record_of(Verdict, check, outcome=check.verdict))
        for check in part.checks
    )
    return CaseRecord(evidence=evidence, results=results)


def _latency_evidence(part: CasePart) -> LatencyEvidence | None:
    if part.latency is None or part.speedup is None:
        return None
    roles = {"reference": part.reference, "tuned": part.tuned, **{other.role: other for other in part.others}}
    samples = {role: timed.samples for role, timed in roles.items() if timed is not None}
    low, high = part.speedup.ci95
    speedup = Interval(median=part.speedup.median, low=low, high=high)
    found = record_of(LatencyEvidence, part.latency, samples=samples, speedup=speedup)
    for role, taken in samples.items():
        if not taken.on(found.clock):
            raise ValueError(f"{role} has no samples")
        if len(taken.profiles) != len(found.profiles):
            count = len(taken.profiles)
            raise ValueError(f"{role} has samples of {count} profiles, not {len(found.profiles)}")
    for role, test in found.tested.items():
        if not all(ratio.median > 0 and ratio.high > 0 for ratio in (test.mean, test.enclosing)):
            raise ValueError(f"{role} has a tested ratio that is not positive")
    return found
