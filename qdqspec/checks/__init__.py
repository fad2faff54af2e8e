"""Judges evidence of a finished search; never measures. The checks are files of `qdqspec.checks.kinds`.

- `Check`, `RequestingCheck`: the interface. `CheckParams`: the keys of every check.
- `Evidence`, `Verdict`, `Section`: what a check receives, and what it returns; `verdict`, `unmeasured` make one.
- `FigureRequest`, `ScoreRequest`: evidence that has parameters.
- `ByteSize`: a size in bytes, such as ``4MiB``. `require_a_limit` refuses a check without limits.
"""

from __future__ import annotations

from qdqspec.checks.base import (
    ByteSize,
    Check,
    CheckParams,
    RequestingCheck,
    require_a_limit,
    unmeasured,
    verdict,
)
from qdqspec.types import Evidence, Section, Verdict
from qdqspec.types.requests import FigureRequest, ScoreRequest

__all__ = [
    "ByteSize",
    "Check",
    "CheckParams",
    "Evidence",
    "FigureRequest",
    "RequestingCheck",
    "ScoreRequest",
    "Section",
    "Verdict",
    "require_a_limit",
    "unmeasured",
    "verdict",
]
