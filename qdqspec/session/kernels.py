"""Conclusions from kernels: operators that run in narrow formats, and costs of candidates that are slower. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdqspec.accuracy.constraint import AccuracyConstraint
from qdqspec.checks.rejected import SLOWER, UNPROVED
from qdqspec.graph.ops import HEAVY, MOVING_OPS, SHAPE_SOURCES
from qdqspec.measurement.explained import ExplainedEngine, Row, compare, op_of, short_place
from qdqspec.search.select import is_candidate
from qdqspec.types import (
    Interval,
    KernelComparison,
    LayerTime,
    PlaceChange,
    PlacedPair,
    Placement,
    QuantizedWork,
    RejectedCandidate,
    Trial,
)

_MOVING = MOVING_OPS | SHAPE_SOURCES


def quantized_work(
    pairs: Iterable[PlacedPair], ops: Mapping[str, str], layers: Sequence[LayerTime]
) -> QuantizedWork:
    """The nodes that kernels compute in narrow formats; without kernels, the heavy nodes that read pairs.

    ``ops`` are the operators of all nodes.
    """
    runs = any(not layer.boundary for layer in layers)
    if runs:
        computed = {node for layer in layers if layer.integer and not layer.boundary for node in layer.nodes}
        nodes = {name for name in computed if ops.get(name) not in _MOVING}
    else:
        readers = {end.node for pair in pairs for end in pair.site.consumers}
        nodes = {name for name in readers if ops.get(name) in HEAVY}
    return QuantizedWork(nodes=tuple(sorted(nodes)), runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCandidate:
    """A quantized candidate that was timed: ``trial`` has its accuracy, ``ratio`` its time over the reference's."""

    trial: Trial
    ratio: Interval
    is_confirmed: bool
    is_everything: bool
    layers: tuple[LayerTime, ...]


def known_candidates(
    trials: Sequence[Trial],
    lines: Mapping[str, Trial],
    ratios: Mapping[str, Interval],
    constraint: AccuracyConstraint,
    scale: float = 1.0,
) -> list[KnownCandidate]:
    """All quantized candidates of a search and its confirmation, by their last time, the fastest first.

    ``lines`` are the trials of the confirmation by role, ``ratios`` the times of these. ``scale`` is the time over the
    reference's of the model to which the ratios of other trials refer.
    """
    found: dict[str, KnownCandidate] = {}
    timed = [("", trial) for trial in trials if is_candidate(trial)]
    timed += [(role, trial) for role, trial in lines.items() if trial.ok and trial.placement.sites]
    for role, trial in timed:
        digest, own = trial.placement.digest, ratios.get(role)
        before = found.get(digest)
        if own is None:
            if trial.ratio is None or before is not None:
                continue
            ratio = scale * trial.ratio
            own = Interval(median=ratio, low=ratio, high=ratio)
        measured = replace(
            trial if before is None else before.trial,
            accuracy=constraint.score(trial.placement),
        )
        found[digest] = KnownCandidate(
            trial=measured,
            ratio=own,
            is_confirmed=role in ratios,
            is_everything=role == "everything" or (before is not None and before.is_everything),
            layers=trial.layers or (() if before is None else before.layers),
        )
    return sorted(found.values(), key=lambda known: known.ratio.median)


def rejected_candidates(
    known: Sequence[KnownCandidate],
    reference: tuple[LayerTime, ...],
    constraint: AccuracyConstraint,
    ops: Mapping[str, str],
) -> tuple[RejectedCandidate, ...]:
    """The candidates that show why the reference was selected, with the kernels of those that have a profile.

    ``known`` are all of them, the fastest first, and ``reference`` are the layers of the reference.
    """
    within = [one for one in known if constraint.reaches(one.trial)]
    beyond = [one for one in known if one not in within and one.ratio.median < 1]
    accurate = max(beyond, key=lambda one: constraint.sqnr_db(one.trial) or -math.inf, default=None)
    fastest = known[0] if known else None
    best = within[0] if within else None
    roles = [
        ("fastest candidate", fastest),
        ("fastest candidate within the limits", None if best is fastest else best),
        ("most accurate faster candidate", None if accurate is fastest else accurate),
        ("everything quantized", next((one for one in known if one.is_everything), None)),
        ("placement of the given model", next((one for one in known if one.trial.placement.given), None)),
    ]
    named: dict[str, tuple[list[str], KnownCandidate]] = {}
    for role, one in roles:
        if one is not None:
            named.setdefault(one.trial.placement.digest, ([], one))[0].append(role)
    return tuple(
        RejectedCandidate(
            role=names[0] if len(names) == 1 else f"{names[0]} ({', '.join(names[1:])})",
            placement=digest,
            pairs=one.trial.placement.pairs,
            ratio=one.ratio,
            is_confirmed=one.is_confirmed,
            sqnr_db=constraint.sqnr_db(one.trial),
            accuracy=one.trial.accuracy,
            reason=_reason(one, one in within, constraint),
            kernels=_compared(one, reference, ops),
        )
        for digest, (names, one) in named.items()
    )


def _reason(one: KnownCandidate, is_within: bool, constraint: AccuracyConstraint) -> str:
    if not is_within:
        gap = constraint.gap(one.trial)
        return f"{gap or 'not known to be'} {'below' if gap else 'above'} {constraint.limit_text(one.trial)}"
    return SLOWER if one.ratio.median >= 1 else UNPROVED


def _compared(
    one: KnownCandidate, reference: tuple[LayerTime, ...], ops: Mapping[str, str]
) -> KernelComparison | None:
    """The kernels of a candidate beside the reference's; ``None`` without times of both."""
    tuned = engine_of("candidate", one.trial.placement, one.layers, ops)
    before = ExplainedEngine(name="reference", layers=reference, ops=ops)
    if not one.layers or not before.timed or not tuned.timed:
        return None
    rows = compare(before, tuned).rows
    changes = [row for row in rows if row.kind == "kernel"]
    slower = [row for row in changes if row.difference_ms > 0]
    faster = [row for row in changes if row.difference_ms < 0]
    left = (op_of(layer.nodes[0], ops) for layer in tuned.left_in_float if layer.nodes)
    return KernelComparison(
        kernels=len(tuned.kernels),
        integer=len(tuned.integer),
        unfused=len(tuned.unfused_pairs),
        left_in_float=dict(Counter(op for op in left if op not in _MOVING)),
        reference_ms=before.sum_ms,
        tuned_ms=tuned.sum_ms,
        conversions_ms=math.fsum(row.difference_ms for row in rows if row.kind == "conversion"),
        slower_ms=math.fsum(row.difference_ms for row in slower),
        faster_ms=math.fsum(row.difference_ms for row in faster),
        slower=_places(slower),
        faster=_places(faster),
    )


def engine_of(
    name: str, placement: Placement, layers: tuple[LayerTime, ...], ops: Mapping[str, str]
) -> ExplainedEngine:
    """The profile of a placement, with the nodes that read its activation pairs."""
    sites = (site for site in placement.sites if not site.weight)
    quantized = frozenset(end.node for site in sites for end in site.consumers)
    return ExplainedEngine(name=name, layers=layers, ops=ops, quantized=quantized)


def _places(rows: Sequence[Row], most: int = 3) -> tuple[PlaceChange, ...]:
    return tuple(
        PlaceChange(place=short_place(row.text, 60), reference_ms=row.reference_ms, tuned_ms=row.tuned_ms)
        for row in rows[:most]
    )
