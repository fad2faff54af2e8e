"""Conclusions from kernels: operators that run in narrow formats, and costs of candidates that are slower. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdqspec.checks.rejected import SLOWER, UNPROVED
from qdqspec.graph.ops import HEAVY, MOVING_OPS, SHAPE_SOURCES
from qdqspec.search.limits import Limits
from qdqspec.search.select import is_candidate, missed_text
from qdqspec.timing.explained import ExplainedEngine, Row, compare, op_of, short_place
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
    """The nodes that kernels compute in narrow formats; without kernels, heavy nodes (by ``ops``) that read pairs."""
    runs = any(not layer.boundary for layer in layers)
    if runs:
        computed = {node for layer in layers if layer.integer and not layer.boundary for node in layer.nodes}
        nodes = {name for name in computed if ops.get(name) not in _MOVING}
    else:
        readers = {end.node for pair in pairs for end in pair.site.consumers}
        nodes = {name for name in readers if ops.get(name) in HEAVY}
    return QuantizedWork(nodes=tuple(sorted(nodes)), runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A quantized candidate that was timed: ``trial`` has its accuracy, ``ratio`` its time over the reference's."""

    trial: Trial
    ratio: Interval
    roles: tuple[str, ...] = ()  # in the confirmation


def rejected_candidates(
    trials: Sequence[Trial],
    lines: Iterable[tuple[str, Trial]],
    ratios: Mapping[str, Interval],
    reference: tuple[LayerTime, ...],
    limits: Limits,
    ops: Mapping[str, str],
    scale: float = 1.0,
) -> tuple[RejectedCandidate, ...]:
    """The candidates of a search and its confirmation that show why the reference was selected, by their last time.

    ``lines`` are the trials of the confirmation by role, ``ratios`` their times. ``scale`` is the time over the
    reference's of the model to which the ratios of other trials refer. ``reference`` are the reference's kernels.
    """
    by_digest: dict[str, _Candidate] = {}
    for trial in trials:
        if is_candidate(trial) and trial.ratio is not None:
            ratio = scale * trial.ratio
            candidate = _Candidate(trial=trial, ratio=Interval(median=ratio, low=ratio, high=ratio))
            by_digest.setdefault(trial.placement.digest, candidate)
    for role, line in lines:
        if role in ratios and line.placement.sites:
            before = by_digest.get(line.placement.digest, _Candidate(trial=line, ratio=ratios[role]))
            by_digest[line.placement.digest] = replace(
                before, ratio=ratios[role], roles=(*before.roles, role)
            )
    known = sorted(by_digest.values(), key=lambda candidate: candidate.ratio.median)
    within = [one for one in known if limits.admits(one.trial.placement)]
    beyond = [one for one in known if one not in within and one.ratio.median < 1]
    beyond.sort(key=lambda one: limits.figures(one.trial.placement).sqnr_db or -math.inf, reverse=True)
    groups: dict[str, Sequence[_Candidate]] = {
        "fastest candidate": known,
        "fastest candidate within the limits": [] if within[:1] == known[:1] else within,
        "most accurate faster candidate": [] if beyond[:1] == known[:1] else beyond,
        "everything quantized": [one for one in known if "everything" in one.roles],
        "placement of the given model": [one for one in known if one.trial.placement.given],
    }
    named: dict[str, tuple[_Candidate, list[str]]] = {}
    for role, group in groups.items():
        if group:
            named.setdefault(group[0].trial.placement.digest, (group[0], []))[1].append(role)
    return tuple(
        RejectedCandidate(
            role=roles[0] if len(roles) == 1 else f"{roles[0]} ({', '.join(roles[1:])})",
            placement=digest,
            pairs=one.trial.placement.pairs,
            ratio=one.ratio,
            is_confirmed=bool(one.roles),
            sqnr_db=limits.figures(one.trial.placement).sqnr_db,
            accuracy=one.trial.accuracy,
            reason=_reason(one, one in within, limits),
            kernels=_compared(one.trial, reference, ops),
        )
        for digest, (one, roles) in named.items()
    )


def _reason(one: _Candidate, is_within: bool, limits: Limits) -> str:
    if not is_within:
        return missed_text(limits, one.trial.placement)
    return SLOWER if one.ratio.median >= 1 else UNPROVED


def _compared(
    trial: Trial, reference: tuple[LayerTime, ...], ops: Mapping[str, str]
) -> KernelComparison | None:
    """The kernels of a candidate beside the reference's; ``None`` without times of both."""
    tuned = engine_of("candidate", trial.placement, trial.layers, ops)
    before = ExplainedEngine(name="reference", layers=reference, ops=ops)
    if not trial.layers or not before.timed or not tuned.timed:
        return None
    rows = compare(before, tuned).rows
    slower = [row for row in rows if row.kind == "kernel" and row.difference_ms > 0]
    faster = [row for row in rows if row.kind == "kernel" and row.difference_ms < 0]
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
