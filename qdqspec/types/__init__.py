"""Frozen records that cross rooms. Standard library only: everything imports this package.

A case is what was asked, a placement is where Q/DQ pairs stand, a trial is one built candidate,
evidence is all that was measured of a case, a verdict is what a check makes of it.
"""

from __future__ import annotations

from qdqspec.types.asked import (
    Case,
    CheckSpec,
    Inputs,
    InputShape,
    PatternRules,
    QuantizeRules,
    RegionRules,
    ShapeProfile,
    SkipRules,
    TuneRules,
)
from qdqspec.types.compared import BaselineState, Change, RegressionEvidence
from qdqspec.types.evidence import (
    AccuracyEvidence,
    Evidence,
    LatencyEvidence,
    ParityEvidence,
    PlacedPair,
    SurvivalEvidence,
    TensorParity,
)
from qdqspec.types.judged import CaseRecord, CheckResult, RunRecord, Section, Verdict
from qdqspec.types.measured import (
    NOT_CANDIDATES,
    DeviceKey,
    FrontPoint,
    Interval,
    LayerTime,
    Progress,
    Provenance,
    Race,
    Samples,
    SearchResult,
    Trial,
)
from qdqspec.types.placed import Consumer, Placement, Region, Site
from qdqspec.types.words import LABELS, Clock, EvidenceKind, Label, Optimizer, Outcome, RegionType, Severity

__all__ = [
    "LABELS",
    "NOT_CANDIDATES",
    "AccuracyEvidence",
    "BaselineState",
    "Case",
    "CaseRecord",
    "Change",
    "CheckResult",
    "CheckSpec",
    "Clock",
    "Consumer",
    "DeviceKey",
    "Evidence",
    "EvidenceKind",
    "FrontPoint",
    "InputShape",
    "Inputs",
    "Interval",
    "Label",
    "LatencyEvidence",
    "LayerTime",
    "Optimizer",
    "Outcome",
    "ParityEvidence",
    "PatternRules",
    "PlacedPair",
    "Placement",
    "Progress",
    "Provenance",
    "QuantizeRules",
    "Race",
    "Region",
    "RegionRules",
    "RegionType",
    "RegressionEvidence",
    "RunRecord",
    "Samples",
    "SearchResult",
    "Section",
    "Severity",
    "ShapeProfile",
    "Site",
    "SkipRules",
    "SurvivalEvidence",
    "TensorParity",
    "Trial",
    "TuneRules",
    "Verdict",
]
