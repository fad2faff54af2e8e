"""Records of the difference between a model and its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from qdqspec.types.placement import Site

EXACT_DB = 200.0  # the SQNR of equal outputs as a finite number
DEFINED_DB = 40.0  # least SQNR of a run against ONNX's definition: below, its outputs are not relied on


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstSlice:
    """The slice of an output along an axis that has the lowest SQNR, over all samples."""

    axis: int
    index: int
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParity:
    """Difference of one output from the reference's.

    ``sqnr_db`` is ten times the log of signal power over noise power (infinite if equal), ``max_abs`` the
    largest absolute difference, ``max_steps`` the same in steps of an 8-bit grid over the reference's range.
    ``agreement`` is the share of the reference's best classes that are also its own, by `TopK.key`, if it has
    that many classes. ``is_single`` is true if each sample has one number, whose cosine is always 1 or -1: tables leave
    it out. ``worst_slice`` is the slice with the lowest SQNR; ``None`` if no slice has enough values and signal.
    """

    name: str
    sqnr_db: float
    cosine: float
    max_abs: float
    max_steps: float
    compared: bool = True  # false if the output is not a float tensor and was compared for equality
    matches: bool = True
    note: str = ""  # why it could not be compared, or did not match
    agreement: Mapping[str, float] = field(default_factory=dict)  # by `TopK.key`
    is_single: bool = False
    worst_slice: WorstSlice | None = None

    @property
    def slice_sqnr_db(self) -> float | None:
        """The SQNR of the worst slice."""
        return None if self.worst_slice is None else self.worst_slice.sqnr_db

    def far_slice(self, far_db: float = 20.0) -> WorstSlice | None:
        """The worst slice if its SQNR is ``far_db`` below that of the whole, and below ``far_db``; else ``None``.

        With a smaller distance, outputs are reported whose slices differ only in the power of their signal.
        """
        found = self.worst_slice if self.compared and self.matches else None
        is_far = found is not None and found.sqnr_db <= min(self.sqnr_db - far_db, far_db)
        return found if is_far else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Parameters of the agreement: how many of the ``k`` best classes two outputs share.

    Classes are along ``axis``; if it is ``None``, along the last axis longer than one, but never the first of
    several, which counts samples.
    """

    k: int = 1
    axis: int | None = None

    @property
    def key(self) -> str:
        """``top5``, or ``top5 on axis 1``."""
        return f"top{self.k}" if self.axis is None else f"top{self.k} on axis {self.axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionEvidence:
    """The given model as the backend runs it, compared with its definition in ONNX on the first samples.

    ``sqnr_db`` is that of the worst float ``output``, finite. ``node`` is the first node whose output differs so much;
    empty if it is not known.
    """

    sqnr_db: float
    output: str
    samples: int
    node: str = ""

    @property
    def holds(self) -> bool:
        """Whether the backend computes what ONNX defines, but for rounding."""
        return self.sqnr_db >= DEFINED_DB


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityEvidence:
    """Parity of the tuned model with the reference, over ``samples`` inputs.

    ``outputs`` compare the float model with the tuned one, both as the backend runs them. The two steps between:
    ``quantization`` compares the float model with the tuned one computed as ONNX defines it, ``runtime`` this
    arithmetic with the result of the backend; ``undivided`` is why both are empty. ``computed_by`` is the runtime that
    computed both models as ONNX defines them, if the backend runs nothing on this machine. If the given model's
    ``definition`` in ONNX does not hold, it is in place of the float model above.
    """

    outputs: tuple[TensorParity, ...]
    samples: int
    data: str  # "evaluation", "calibration" or "random"
    quantization: tuple[TensorParity, ...] = ()
    runtime: tuple[TensorParity, ...] = ()
    undivided: str = ""
    computed_by: str = ""
    definition: DefinitionEvidence | None = None

    @property
    def sqnr_db(self) -> float:
        """The worst output's SQNR in dB, a finite number: 200 if all outputs are equal."""
        worst = min((o.sqnr_db for o in self.outputs), default=EXACT_DB)
        return max(-EXACT_DB, min(EXACT_DB, worst))

    @property
    def cosine(self) -> float:
        """The worst output's cosine similarity."""
        return min((o.cosine for o in self.outputs), default=1.0)

    @property
    def max_abs(self) -> float:
        """The worst output's largest absolute difference."""
        return max((o.max_abs for o in self.outputs), default=0.0)

    @property
    def max_steps(self) -> float:
        """The worst output's largest difference in quantization steps."""
        return max((o.max_steps for o in self.outputs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One Q/DQ pair and its error.

    ``alone_db`` is the SQNR with this pair only, ``share`` its part of the error of all pairs. ``without_db``, known
    for the worst pairs only, is the SQNR if all that its readers, and those of the worse pairs, read stays in float.
    """

    site: Site
    alone_db: float
    share: float
    without_db: float | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that read the pair: excluding them from quantization removes the pair."""
        return tuple(dict.fromkeys(end.node for end in self.site.consumers if not end.is_output))

    @property
    def makes_output(self) -> bool:
        """Whether the pair quantizes a graph output."""
        return any(end.is_output for end in self.site.consumers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritEvidence:
    """The error of single Q/DQ pairs at one output, the worst first, over a few samples of ``data``.

    ``together_db`` is the SQNR with all ``total`` pairs, ``rest`` the part of the error of pairs not listed. All is
    computed as ONNX defines the operators: it shows quantization, not the runtime. ``missing`` is why pairs are not
    listed.
    """

    output: str = ""
    pairs: tuple[Culprit, ...] = ()
    total: int = 0
    rest: float = 0.0
    together_db: float = math.inf
    samples: int = 0
    data: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedInput:
    """One input of a model in a search: its values in words, their bounds, and the bounds seen in data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: str
    low: float
    high: float
    known_low: float
    known_high: float

    @property
    def within(self) -> bool:
        """Whether all its values are in the range seen in data."""
        return self.known_low <= self.low and self.high <= self.known_high


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One input that was tried alone, and messages of the limits it breaks, if any.

    ``parity`` is that of this input; it has no outputs if the tuned model does not run on it. ``file`` holds
    the input, and ``command`` tries it again: one command a line.
    """

    inputs: tuple[TriedInput, ...]
    broken: tuple[str, ...]
    parity: ParityEvidence
    file: str = ""
    command: str = ""

    @property
    def within(self) -> bool:
        """Whether all of it is in the range seen in data."""
        return all(one.within for one in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySearch:
    """A search for an input that breaks a parity check: ``tried`` different ones in ``seconds``.

    ``late`` is whether the time ended first. ``closest_db`` is the smallest SQNR of inputs that did not break it,
    ``found`` the smallest input that does. ``missing`` is why nothing was tried.
    """

    tried: int = 0
    seconds: float = 0.0
    late: bool = False
    closest_db: float = math.inf
    found: Probe | None = None
    missing: str = ""
