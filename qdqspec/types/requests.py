"""Evidence that checks request with parameters, once for all checks. Each names the field of `Evidence` in ``kind``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from qdqspec.types.evidence import EvidenceKind, LintTarget, Optimizer
from qdqspec.types.measurement import ParityEvidence, TensorParity, TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A task metric of reference and tuned model on the evaluation data, for one output or the metric's own choice."""

    kind: ClassVar[EvidenceKind] = "accuracy"
    metric: str
    output: str | None = None

    @property
    def key(self) -> str:
        """The key in ``Evidence.accuracy``: ``top1``, or ``top1:logits``."""
        return self.metric if self.output is None else f"{self.metric}:{self.output}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRequest:
    """The lint findings on the tuned model for a target: ``Evidence.lint[target]``.

    The runtime of the target loads the model if one of the requests has ``load``.
    """

    kind: ClassVar[EvidenceKind] = "lint"
    target: LintTarget
    load: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalRequest:
    """The pairs that survive an optimizer: ``Evidence.survival[optimizer]``."""

    kind: ClassVar[EvidenceKind] = "survival"
    optimizer: Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Whether a backend (default: that of the case) builds the tuned model for a target: ``Evidence.builds[key]``."""

    kind: ClassVar[EvidenceKind] = "builds"
    backend: str = ""
    target: str = ""

    @property
    def key(self) -> str:
        """The key in ``Evidence.builds``: ``backend:SM86``."""
        return f"{self.backend}:{self.target}" if self.target else self.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRequest:
    """A comparison with the entry ``key`` of the baseline file: ``Evidence.regression[key]``.

    ``allowed`` is the growth of the ratio that is accepted: a measurement beyond it is repeated more precisely.
    """

    kind: ClassVar[EvidenceKind] = "regression"
    key: str
    allowed: float


class InputLimits(Protocol):
    """Limits that single inputs are tried against: the parameters of a check, a pydantic model."""

    def broken_by(self, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
        """A message for each limit that the outputs exceed."""

    def error_excess(self, outputs: tuple[TensorParity, ...]) -> float:
        """The distance of an input's error from a limit: larger is worse."""

    def chosen(self, outputs: tuple[TensorParity, ...]) -> list[TensorParity]:
        """The outputs that the limits apply to."""

    def polygraphy_words(self, outputs: tuple[TensorParity, ...]) -> list[str]:
        """The options of `polygraphy run` for these limits; empty if it has none of them."""

    def model_dump(self, *, mode: str, exclude_none: bool) -> dict[str, Any]:
        """The parameters as JSON data, with the ``kind`` of the check that reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRequest:
    """The outputs compared with ``top``, and the errors of quantization and runtime separately: ``Evidence.parity``.

    ``culpable`` selects the output whose error is attributed to Q/DQ pairs (``Evidence.culprits``), if any.
    ``limits_slices`` is whether slices of outputs have a limit. If no check has one, very bad slices are noted. If the
    data breaks ``limits``, the worst input is kept in files of Polygraphy: ``Evidence.replays[key]``.
    """

    kind: ClassVar[EvidenceKind] = "parity"
    top: TopK = field(default_factory=TopK)
    culpable: Callable[[ParityEvidence], str | None] = lambda _: None
    limits_slices: bool = False
    key: str = ""
    limits: InputLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """A search for an input that breaks ``limits``, if the data breaks none: ``Evidence.parity_search[key]``.

    At most ``examples`` inputs are tried in ``seconds``. Floats are drawn from a range ``beyond`` times as wide as that
    of the data; ``values`` are the smallest and largest value by input.
    """

    kind: ClassVar[EvidenceKind] = "parity"
    key: str
    limits: InputLimits
    examples: int = 200
    seconds: float = 60.0
    beyond: float = 2.0
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class ComparedModels(Protocol):
    """The reference and the tuned model of a case, with the data that outputs are compared on."""

    @property
    def reference(self) -> Path:
        """The reference's file."""

    @property
    def tuned(self) -> Path:
        """The tuned model's file; the reference's if the model is unchanged."""

    def outputs(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]]:
        """For each input: its arrays, the reference's outputs, and the tuned model's, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRequest:
    """Figures that a check defines itself, by name: ``Evidence.figures[key]``, in records and reports.

    ``measure`` is called once for each ``key`` of a case. It may raise `QdqspecError`, which fails the check.
    """

    kind: ClassVar[EvidenceKind] = "figures"
    key: str
    measure: Callable[[ComparedModels], Mapping[str, float]]


Request: TypeAlias = (
    ScoreRequest
    | LintRequest
    | SurvivalRequest
    | BuildRequest
    | BaselineRequest
    | ParityRequest
    | InputRequest
    | FigureRequest
)
