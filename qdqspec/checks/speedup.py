"""Is the tuned model faster than the reference by the factor asked for? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from qdqspec.checks._params import Positive
from qdqspec.checks.base import CheckParams
from qdqspec.types import EvidenceKind


class SpeedupParams(CheckParams):
    """The smallest factor that is good enough."""

    kind: Literal["speedup"]
    min: Positive = Field(description="Reference time over tuned time: 1.3 means 30 % more inferences.")


class SpeedupCheck:
    """Compares reference and tuned model, both measured interleaved in one run, on one device."""

    Params: ClassVar[type[CheckParams]] = SpeedupParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})


check = SpeedupCheck()
