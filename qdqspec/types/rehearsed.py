"""Records of a rehearsal: the computed error of a placement, of single blocks, and before and after corrections."""

from __future__ import annotations

from dataclasses import dataclass

from qdqspec.types.parity import TensorParity


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockError:
    """The error that one block makes with all others in floating point: SQNR at the worst guiding tensor.

    ``block`` is a unit of the search, called after its operator; ``label`` is how it is quantized.
    """

    block: str
    label: str
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionGain:
    """What a correction gives with everything quantized: the SQNR at the worst guiding tensor on held-out samples.

    ``changed`` are the ranges, weights, biases or groups of channels that it changes. One that is not ``taken`` does
    not help enough.
    """

    name: str
    before_db: float
    after_db: float
    changed: int
    taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The error of a placement against the float model over ``samples`` inputs, computed as ONNX defines Q/DQ.

    ``outputs`` are the graph outputs. ``guiding`` are the tensors before trailing operators that saturate or
    select, such as a Softmax; if an output has none, the output itself. Errors of single pairs are additive
    there. ``accuracy`` is the task metric of the case's constraint on the evaluation data, ``None`` without one.
    """

    outputs: tuple[TensorParity, ...]
    guiding: tuple[TensorParity, ...]
    samples: int
    data: str = ""  # "evaluation", "calibration" or "random"
    accuracy: float | None = None

    @property
    def sqnr_db(self) -> float:
        """The worst graph output's SQNR in dB."""
        return min((one.sqnr_db for one in self.outputs), default=float("inf"))

    @property
    def guiding_db(self) -> float:
        """The worst guiding tensor's SQNR in dB."""
        return min((one.sqnr_db for one in self.guiding), default=float("inf"))

    @property
    def cosine(self) -> float:
        """The worst graph output's cosine similarity."""
        return min((one.cosine for one in self.outputs), default=1.0)

    @property
    def max_abs(self) -> float:
        """The largest absolute difference of any graph output."""
        return max((one.max_abs for one in self.outputs), default=0.0)
