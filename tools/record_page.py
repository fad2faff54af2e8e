"""The JSON schema of the record, for the page docs/reference/record.md: its layout, and the fields of its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from qdqspec.types import (
    AccuracyEvidence,
    BuildEvidence,
    DeviceKey,
    GraphPart,
    LatencyEvidence,
    Outcome,
    ParityEvidence,
    Provenance,
    QuantizedWork,
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


def _object(name: str, about: str, own: Mapping[str, Any], record: Any = None, *lacking: str) -> Any:
    """An object with these fields, and those of a record but the ``lacking`` ones."""
    found = dict(own)
    if record is not None:
        kinds = get_type_hints(record)
        found |= {f.name: kinds[f.name] for f in fields(record) if f.init and f.name not in (*lacking, *own)}
    exact, named = ConfigDict(extra="forbid"), {each: (kind, ...) for each, kind in found.items()}
    model: Any = create_model(name, __doc__=about, __config__=exact, **named)
    return model


_MODEL = _object(
    "Model",
    "The model's SHA-256, and its path relative to the spec, or its name if it is outside that folder.\n\n"
    "``nodes`` are digests of its nodes and constants, from which ``compare`` names what changed.",
    {"sha256": str, "path": str, "nodes": str},
)
_SCHEME = _object(
    "Scheme", "The digest of the placement: equal digests have Q/DQ at the same places.", {"digest": str}
)
_TIMES = {"median_ms": float, "samples": Samples}
_TIMED = _object("Timed", "One role's samples, and their median on the gating clock.", _TIMES)
_OTHER = _object(
    "Other",
    "Another candidate of the final measurement: quantize-everything, or the runner-up.",
    {**_TIMES, "role": str},
)
_BOUNDS = tuple[float, float]
_SPEEDUP = _object(
    "Speedup",
    "Reference time over tuned time. ``interval``, also written as ``ci95``, is its 95 % prediction interval.\n\n"
    "``at_least`` is the bound that is proved, null if it was not tested.",
    {"median": float, "ci95": _BOUNDS, "at_least": float | None, "interval": _BOUNDS},
)
_LATENCY = _object(
    "Latency",
    "Conditions of the times above. ``ratios`` are times over the reference's, by role.\n\nWith several shape "
    "``profiles`` these and the times above are weighted geometric means; each profile's samples are among the role's "
    "``samples``, in this order.",
    {},
    LatencyEvidence,
    *("samples", "speedup", "failures"),
)
_TRIAL = _object(
    "Trial",
    "One build of the search, with the digest of its placement; the journal keeps its sites and samples.",
    {"placement": str},
    Trial,
    *("samples", "rival", "graph_hash", "layers", "subgraph", "all_data_db", "is_part", "eps"),
)
_TRIALS = _object(
    "Trials",
    "The search's builds; ``list`` also has the rebuilds for noise and confirmation.",
    {"total": int, "built": int, "failed": int, "list": tuple[_TRIAL, ...]},
)
_SEARCH = _object(
    "Search",
    "The search and its winner.",
    {},
    SearchResult,
    *("winner", "trials", "regions", "patterns"),
)
_COUNT = _object("Count", "A count.", {"count": int})
_PAIR = _object(
    "Pair",
    "One Q/DQ pair, in names of the model without Q/DQ. ``consumers`` are (node, input) pairs.",
    {"scale": tuple[float, ...], "zero_point": tuple[int, ...]},
    Site,
)
_PARITY = _object(
    "Parity",
    "Parity of the worst output, of each output, and of quantization and the runtime separately.",
    dict.fromkeys(("sqnr_db", "cosine", "max_abs", "max_steps"), float),
    ParityEvidence,
)
_CHECK = _object(
    "Check",
    "The result of one check.",
    {
        "id": str,
        "kind": str,
        "severity": Severity,
        "verdict": Outcome,
        "headline": str,
        "numbers": Mapping[str, float],
        "sections": tuple[Section, ...],
        "advice": str,
    },
)
_CASE = _object(
    "Case",
    "``result.json``. Parts that were not measured are null. ``ops`` lists all nodes by op type, ``graph`` the model "
    "folded into a few parts with their times and errors.\n\n``regression`` is the result for each entry of the "
    "committed baseline. ``reason`` explains ``status``.",
    {
        "schema_version": Literal[1],
        "case": str,
        "status": Status,
        "reason": str,
        "id": str,
        "spec": str | None,
        "title": str,
        "tags": tuple[str, ...],
        "matrix": Mapping[str, str | int | float],
        "backend": str,
        "target": str,
        "device": DeviceKey,
        "model": _MODEL,
        "scheme": _SCHEME | None,
        "reference": _TIMED | None,
        "tuned": _TIMED | None,
        "others": tuple[_OTHER, ...],
        "speedup": _SPEEDUP | None,
        "latency": _LATENCY | None,
        "trials": _TRIALS | None,
        "search": _SEARCH | None,
        "regions": _COUNT | None,
        "patterns": _COUNT | None,
        "placement": tuple[_PAIR, ...],
        "parity": _PARITY | None,
        "accuracy": Mapping[str, AccuracyEvidence],
        "regression": Mapping[str, RegressionEvidence],
        "builds": Mapping[str, BuildEvidence],
        "figures": Mapping[str, Mapping[str, float]],
        "size_bytes": Mapping[str, int],
        "profiles": tuple[ShapeProfile, ...],
        "ops": Mapping[str, tuple[str, ...]],
        "quantized": QuantizedWork | None,
        "graph": tuple[GraphPart, ...],
        "checks": tuple[_CHECK, ...],
        "warnings": tuple[str, ...],
        "provenance": Provenance,
    },
)
RUN: type[BaseModel] = _object(
    "Run",
    "The run record: all cases of a run, and ``runtimes``: comparisons of cases that differ in the runtime only.",
    {
        "schema_version": Literal[1],
        "qdqspec": str,
        "started": str,
        "seconds": float,
        "cases": tuple[_CASE, ...],
        "runtimes": tuple[RuntimeComparison, ...],
    },
)
