"""The support of a backend for Q/DQ models: formats, labels of operators, and properties of its compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qdqspec._core.hooks import Hook
from qdqspec.types import Kind

_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The support of a backend for Q/DQ models on this device.

    Formats are names of `qdqspec.qdq.formats`. A linear operator is one with a weight: Conv, MatMul, Gemm.
    """

    # Formats and labels
    formats: tuple[str, ...]  # number formats that a spec may ask for
    # by operator type: labels under which it runs in integers, besides ``fp``
    labels: Mapping[str, tuple[Kind, ...]]
    # by format, if others
    labels_of: Mapping[str, Mapping[str, tuple[Kind, ...]]] = field(default_factory=dict)
    # by weight format: operators with a constant weight whose kernel computes the range of its activation at run time
    dynamic: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # by format: the type of activations (format ``int8``: uint8 on a CPU). A blocked format without one is for weights
    activations: Mapping[str, str]
    weights: Mapping[str, str]  # by format: the type of weights
    lacking: Mapping[str, str] = field(default_factory=dict)  # by format: why this device does not have it
    reduce_range: bool = False  # weights of 7 bits: sums of 8-bit products would saturate on this CPU
    symmetric_activations: bool = False

    # What kernels take
    absorbs: frozenset[str] = _NONE  # operators that fuse into a quantized producer: Q follows them
    # linear operators that run ``in-only`` with an int32 bias after a DQ only
    integer_bias: frozenset[str] = _NONE
    # linear operators that run ``in-only`` only if nothing is absorbed after them
    bare: frozenset[str] = _NONE
    constant_weight: frozenset[str] = _NONE  # operators, besides Conv, whose weight must be a constant
    # operators whose float weight the runtime quantizes itself if their data and their result have pairs: of
    # ``DQ > Conv > Q`` it makes an integer Conv, with a scale of its own for the weight
    completes: frozenset[str] = _NONE
    # operators that the runtime moves pairs across before that: of ``DQ > Reshape > Conv`` it makes
    # ``Reshape > DQ > Conv``
    moved_past: frozenset[str] = _NONE
    # operators whose float bias the runtime stores in steps of data scale times weight scale
    rounds_biases: frozenset[str] = _NONE
    # by operator type: axes of a weight of two dimensions along which blocks may lie
    blocked_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # operators past which a pair reaches a kernel that takes floats only, or operands of one format only, such as
    # the Transpose of ``DQ > Transpose > Softmax``
    carriers: frozenset[str] = _NONE
    # placement rules by name, in the order of their use: requirements of a compiler beyond single operators
    # (`qdqspec.qdq.units`)
    rules: Mapping[str, Hook] = field(default_factory=dict)
    # quantized kernels fuse like those of float16: fusion is read from a float16 build
    fuses_in_half: bool = False
    computes_in_half: bool = False  # native float16 kernels: a float16 model is timed for comparison
    quantizes_half: bool = True  # else candidates of a float16 model are converted to float32

    # What the runtime tells and needs
    runs: bool = True  # else engines are only built here, and outputs are computed as ONNX defines them
    has_clock: bool = True  # else nothing is timed, and placements are selected by their coverage
    computes: bool = True  # else (a simulated device) placements are neither rehearsed nor corrected
    observes: bool = True  # else outputs are too slow for calibration, and the default backend is used
    per_layer_profile: bool = True
    builds_side_by_side: bool = False  # a build times no kernels: builds in parallel give the same result
    one_processor: bool = False  # an engine of one thread computes on its caller's core, which can be pinned
    # ``cpu``, ``gpu`` or ``npu``, where one run at a time is timed; else the device is its own
    hardware: str = ""
    enforces_output_shapes: bool = False  # a run fails if an output has another shape than the model declares
    needs_shapes: bool = False  # a build fails if the shape of an input is unknown

    def kinds(self, number_format: str, op_type: str) -> tuple[Kind, ...]:
        """The kinds of labels under which an op runs in a format without blocks."""
        kinds = self.labels_of.get(number_format, self.labels).get(op_type, ())
        return (*kinds, "dynamic") if op_type in self.dynamic.get(number_format, ()) else kinds
