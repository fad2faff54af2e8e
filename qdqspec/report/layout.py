"""The layout of a written record: each class is one JSON object of `result.json` or of the run record.

A class has the fields of the record that it is `written` for, so that a new field of a record is in it, and in those
that are read again.

Reading ignores unknown keys, so that records of a newer minor version stay readable; ``schema_version``
changes if an old reader would misinterpret a record. Numbers that JSON lacks are the strings ``"Infinity"``,
``"-Infinity"`` and ``"NaN"``: an output with an SQNR of ``"Infinity"`` is equal to the reference.
``parity.sqnr_db``, that of the whole model, is always a number: 200 if all outputs are equal. No absolute
path, user or host name is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model
from pydantic import Field as ModelField

from qdqspec.types import (
    AccuracyEvidence,
    CommonPlacement,
    DeviceKey,
    GraphPart,
    LatencyEvidence,
    Outcome,
    ParityEvidence,
    Placement,
    Provenance,
    RegressionEvidence,
    RuntimeComparison,
    Samples,
    SearchResult,
    Section,
    Severity,
    ShapeProfile,
    Site,
    Status,
    Trial,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION: Final = 1


class RecordPart(BaseModel):
    """One JSON object."""

    model_config = ConfigDict(frozen=True, from_attributes=True, ser_json_inf_nan="strings")


_Part = TypeVar("_Part", bound=type[RecordPart])


def written(record: type[DataclassInstance], *without: str) -> Callable[[_Part], _Part]:
    """A class decorator: the object has the fields of a record too, except those in ``without``."""
    kinds = get_type_hints(record)
    own: dict[str, Any] = {
        each.name: (kinds[each.name], _default(each))
        for each in fields(record)
        if each.init and each.name not in without
    }

    def decorate(part: _Part) -> _Part:
        return cast("_Part", create_model(part.__name__, __base__=part, __doc__=part.__doc__, **own))

    return decorate


def _default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return ModelField(default_factory=each.default_factory)
    return ... if each.default is MISSING else each.default


def _digest(placement: object) -> object:
    return placement.digest if isinstance(placement, Placement) else placement


class ModelPart(RecordPart):
    """The model's SHA-256, and its path relative to the spec, or its name if it is outside that folder."""

    sha256: str
    path: str


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
    """Reference time over tuned time, with the bounds of its 95 % interval."""

    median: float
    ci95: tuple[float, float]


@written(LatencyEvidence, "samples", "speedup", "failures", "tested")
class LatencyPart(RecordPart):
    """Conditions of the times above. ``ratios`` are times over the reference's, by role.

    With several shape ``profiles`` these and the times above are weighted geometric means; each profile's
    samples are among the role's ``samples``, in this order.
    """


@written(
    Trial,
    *("placement", "samples", "rival", "graph_hash", "layers", "twin", "subgraph"),
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
    figures: Mapping[str, Mapping[str, float]] = {}
    size_bytes: Mapping[str, int]
    profiles: tuple[ShapeProfile, ...] = ()
    ops: Mapping[str, tuple[str, ...]]
    graph: tuple[GraphPart, ...] = ()
    checks: tuple[CheckPart, ...]
    warnings: tuple[str, ...]
    provenance: Provenance


class RunPart(RecordPart):
    """The run record: all cases of a run, and ``runtimes``: comparisons of cases that differ in the runtime only.

    ``common`` is one placement for all runtimes of such cases, if it was asked for.
    """

    schema_version: Literal[1]
    qdqspec: str
    started: str
    seconds: float
    cases: tuple[CasePart, ...]
    runtimes: tuple[RuntimeComparison, ...] = ()
    common: tuple[CommonPlacement, ...] = ()
