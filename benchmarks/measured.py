"""Time, SQNR, cosine and agreement of quantized models compared with float; for `real.py` and `accuracy.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from agreement import agreement, recall_at_1, rule_for
from independent import BUILDS, ROUNDS, Feed, Interval, Outputs, compare, outputs, reason_of, time_models
from real_data import RealModel

RECALL = "recall@1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model compared with float. ``failed`` is the reason if there are no figures."""

    failed: str = ""
    ratio: Interval | None = None  # time relative to float
    sqnr_db: float | None = None
    cosine: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """All models of one comparison, by role, and the figures of the float model."""

    float_ms: float | None
    judged: str
    float_agreement: float | None
    samples: int
    models: Mapping[str, Measured]


def measure(
    model: RealModel,
    files: Mapping[str, Path],
    failures: Mapping[str, str],
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
) -> Beside:
    """Time the files interleaved with the float model on one sample, and compare them on all evaluation data.

    If timing takes more than ``seconds``, there are fewer rounds and builds.
    """
    feeds = model.feeds()
    timing = time_models(
        {"float": model.path, **files}, feeds[0], builds=builds, rounds=rounds, seconds=seconds
    )
    failed = {**failures, **timing.failures}
    found = {role: Measured(failed=why) for role, why in failed.items() if role != "float"}
    wanted = list(outputs(model.path, feeds)) if "float" not in failed else []
    for role in files:
        if role not in failed and wanted:
            found[role] = _measured(model, wanted, files[role], feeds, timing.ratio(role, "float"))
    return Beside(
        float_ms=timing.median_ms("float") if "float" in timing.samples else None,
        judged=judged_by(model),
        float_agreement=agreement_of(model, wanted, wanted, feeds) if wanted else None,
        samples=len(feeds),
        models=found,
    )


def _measured(
    model: RealModel, wanted: Sequence[Outputs], path: Path, feeds: Sequence[Feed], ratio: Interval
) -> Measured:
    try:
        found = list(outputs(path, feeds))
    except Exception as error:  # noqa: BLE001 - the reason is the result
        return Measured(failed=reason_of(error))
    close = compare(wanted, found)
    return Measured(
        ratio=ratio,
        sqnr_db=close.sqnr_db,
        cosine=close.cosine,
        agreement=agreement_of(model, wanted, found, feeds),
    )


def judged_by(model: RealModel) -> str:
    """The measure of agreement of a model; empty if there is none."""
    return RECALL if "minilm" in model.name else (rule_for(model.judged) or ("",))[0]


def agreement_of(
    model: RealModel, wanted: Sequence[Outputs], found: Sequence[Outputs], feeds: Sequence[Feed]
) -> float | None:
    """The share of samples with the result of the float model; of sentence embeddings, recall at one."""
    if judged_by(model) == RECALL:
        return _recall(found, feeds)
    return agreement(model.judged, wanted, found)


def _recall(found: Sequence[Outputs], feeds: Sequence[Feed]) -> float:
    """Recall of sentence embeddings (normalized mean over the mask); samples are queries and documents in turns."""
    vectors = []
    for made, feed in zip(found, feeds, strict=True):
        mask = feed["attention_mask"].reshape(-1, 1)
        states = next(iter(made.values())).reshape(len(mask), -1)
        mean = (states * mask).sum(0) / mask.sum()
        vectors.append(mean / np.linalg.norm(mean))
    return recall_at_1(vectors[::2], vectors[1::2])


# ---- texts of tables ------------------------------------------------------------------------------


def ratio_text(one: Measured | None) -> str:
    """``.712 [.705, .718]``, or the reason for a missing ratio."""
    if one is None:
        return "-"
    if one.failed or one.ratio is None:
        return f"failed: {one.failed}"[:80].replace("|", "/")
    return f"{one.ratio.median:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]"


def db_text(one: Measured | None) -> str:
    """Decibels, or ``exact``."""
    if one is None or one.sqnr_db is None:
        return "-"
    return "exact" if one.sqnr_db == math.inf else f"{one.sqnr_db:.1f}"


def agreement_text(one: Measured | None) -> str:
    """A share with three decimals."""
    return "-" if one is None or one.agreement is None else f"{one.agreement:.3f}"
