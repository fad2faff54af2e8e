"""The backend `onnxruntime-qnn`, and its engine: Qualcomm's NPU as its own emulator computes it on x86-64.

The emulator tells what the compiler accepts, which nodes leave the NPU, which of the others run in integers, and the
outputs. It tells no time: its cycles are the clock of the machine it runs on. That it computes as a device does was not
verified on one. What runs in integers was measured by the types of its compiled graphs (QAIRT 2.51.0):

- Activations are uint8 with any zero point on both sides of an operator: with another type on one side it runs in
  float, and signed symmetric activations break Softmax (-40 dB on a whole model).
- Weights are int8 with zero point 0, per channel for convolutions.
- A LayerNormalization stays float: in integers it costs 5 dB more than its pairs, and with a bias of int32 beside
  activations of another type than its scale it leaves the NPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qdqspec._core.arrays import Array
from qdqspec.backends._cpu import major_minor
from qdqspec.backends._engine import BoundEngine, cannot_run, check_names, refusals_of
from qdqspec.backends._source import PAIRS, Source, read_given
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.backends.onnxruntime_qnn.graph import Kernel, hash_of
from qdqspec.backends.onnxruntime_qnn.library import CHOOSE, INSTALL, OPTIONS, PLUGIN, open_session, versions
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph.model import Model
from qdqspec.types import DeviceKey, LayerTime, Samples

CPU, NPU = "cpu", "npu"
_LISTED = 20  # most nodes that an error names
_LEFT = "leave these nodes and their inputs in float; `qdqspec lint` says why, `qdqspec reduce` finds a small model"
_refusals = refusals_of()

INTEGER_OPS = (
    "Add", "AveragePool", "Concat", "Conv", "ConvTranspose", "DepthToSpace", "Flatten", "Gather", "Gelu", "Gemm",
    "GlobalAveragePool", "HardSwish", "MatMul", "MaxPool", "Mul", "Reshape", "Sigmoid", "Slice", "Softmax",
    "SpaceToDepth", "Split", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze",
)  # fmt: skip
# Computed with the operator before them if the Q that follows clips as they do; a pair between them and the operator
# makes the compiler lose the bound of a Clip (-0.1 dB where the pair's range is wider).
ABSORBED = frozenset({"Clip", "Relu"})


class OnnxRuntimeQnn:
    """Qualcomm's HTP emulator."""

    name = "onnxruntime-qnn"
    target = "onnxruntime-qnn-htp-emulator"
    options = OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether the emulator is installed and a chip is chosen."""
        words = OPTIONS.of(options.extra)
        try:
            facts = versions()
        except BackendUnavailableError as error:
            return Availability(usable=False, why=error.what, install=INSTALL)
        if not words.soc:
            return Availability(usable=False, why="no chip is chosen", install=CHOOSE, facts=facts)
        return Availability(usable=True, facts={**facts, "emulates": f"{words.soc}, HTP v{words.chip.arch}"})

    def device(self, options: BuildOptions) -> DeviceKey:
        """The architecture that is emulated, and major.minor of the SDK."""
        words, facts = OPTIONS.of(options.extra), versions()
        key = f"htp-v{words.chip.arch}-emulator-qairt-{major_minor(facts['qairt'])}"
        return DeviceKey(key=key, details={**facts, "soc": words.soc, "io": words.io})

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:  # noqa: ARG002 - the same for every chip
        """The operators that run in integers; nothing is timed, shapes are static."""
        return Capabilities(
            formats=("int8",),
            labels=dict.fromkeys(INTEGER_OPS, ("in+out",)),
            activations={"int8": "uint8"},
            weights={"int8": "int8"},
            absorbs=ABSORBED,
            completes=frozenset({"Conv"}),
            has_clock=False,
            observes=False,
            per_layer_profile=False,
            needs_shapes=True,
            hardware="cpu",
        )

    def build(self, model: Path, options: BuildOptions) -> QnnEngine:
        """Compile a model file; raise `BackendError` with the compiler's reason on one line."""
        versions()
        return QnnEngine(model, options)


class QnnEngine(BoundEngine[Any, Mapping[str, Array]]):
    """A compiled model in the emulator."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        source = read_given(model)
        opened = open_session(model, source, options)
        super().__init__(model, opened.session)
        self._source, self._opened = source, opened
        self.graph_hash = hash_of(opened.kernels)
        if OPTIONS.of(options.extra).fallback == "none" and (left := tuple(self._on_cpu())):
            ops = ", ".join(sorted({layer.op_type for layer in left}))
            names = ", ".join(f"'{layer.name}'" for layer in left[:_LISTED])
            raise BackendError(f"{ops} would run on the CPU: {names}", where=model, cure=_LEFT)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once in the emulator and return the outputs by name."""
        session = self._require_open()
        check_names(self._source.inputs, feeds, self.model)
        with _refusals(cannot_run(feeds), self.model):
            values = session.run(self._source.outputs, dict(feeds))
        return dict(zip(self._source.outputs, values, strict=True))

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Check inputs, which kernels do not depend on."""
        check_names(self._source.inputs, feeds, self.model)
        self._bound[profile] = feeds

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Raise `BackendError`: an emulator's time is not a latency."""
        del runs, warmup, profile
        what = "an emulator's time is not a latency"
        raise BackendError(what, where=self.model, cure="measure on a device")

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """The compiled operators by place and type, in names of the model; their times are 0."""
        del runs
        self._require_bound(profile)
        return (*self._on_npu(), *self._on_cpu())

    def _on_npu(self) -> Iterator[LayerTime]:
        source = Source(self._source)
        for kernel in self._opened.kernels:
            nodes = _nodes(self._source, source, kernel)
            yield LayerTime(
                name=kernel.name,
                op_type=kernel.op_type,
                milliseconds=0.0,
                nodes=nodes,
                tensors=() if nodes else (source.base(kernel.data),),
                boundary=not nodes,
                integer=kernel.is_integer,
                precision=kernel.precision,
                place=f"{NPU}-{kernel.part + 1}" if kernel.part else NPU,
            )

    def _on_cpu(self) -> Iterator[LayerTime]:
        """Nodes on the CPU, without pairs of inputs, outputs and constants, which are there on purpose."""
        model, source = self._source, Source(self._source)
        fed = {*model.inputs, *model.constants, *source.static}
        for name, op_type in self._opened.on_cpu:
            node = model.by_name.get(name)
            is_pair = op_type in PAIRS
            is_end = node is None or source.base(node.inputs[0]) in fed or node.outputs[0] in model.outputs
            if is_pair and is_end:
                continue
            nodes = () if is_pair or node is None else (name,)
            yield LayerTime(
                name=name,
                op_type=op_type,
                milliseconds=0.0,
                nodes=nodes,
                boundary=is_pair,
                precision="" if is_pair else "unknown",  # the runtime does not tell it of nodes on the CPU
                place=CPU,
            )


def _nodes(model: Model, source: Source, kernel: Kernel) -> tuple[str, ...]:
    """The node that a kernel is named after; else those that make its result, with what it absorbed.

    Where ONNX Runtime changed the layout, a result has the name of the node that makes it.
    """
    if kernel.node in source.nodes or kernel.converts:
        return (kernel.node,) if kernel.node in source.nodes else ()
    maker = model.by_name.get(kernel.made)
    found, tensor = list[str](), source.base(kernel.made if maker is None else maker.outputs[0])
    while (node := source.producer.get(tensor)) is not None:
        found.insert(0, node.name)
        if node.op_type not in ABSORBED:
            break
        tensor = source.base(node.inputs[0])
    return tuple(found)


_PROGRAM = """import onnxruntime as ort
import onnxruntime_qnn

ort.register_execution_provider_library("{plugin}", onnxruntime_qnn.get_library_path())
settings = ort.SessionOptions()
settings.add_session_config_entry("session.disable_cpu_ep_fallback", "{alone}")
device = next(each for each in ort.get_ep_devices() if each.ep_name == "{plugin}")
options = {{
    "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
    "soc_model": "{soc}",
    "offload_graph_io_quantization": "{offloaded}",
}}
settings.add_provider_for_devices([device], options)
session = ort.InferenceSession(MODEL, settings)
session.disable_fallback()
session.run(None, FEEDS)
print("onnxruntime-qnn", onnxruntime_qnn.__version__, "builds and runs the model")
"""


def program(options: BuildOptions) -> str:
    """A Python program that builds ``MODEL`` for the chip and runs it on ``FEEDS``, without qdqspec."""
    words = OPTIONS.of(options.extra)
    return _PROGRAM.format(
        plugin=PLUGIN,
        soc=words.chip.model,
        offloaded=int(words.io == "cpu"),
        alone=int(words.fallback == "none"),
    )


backend = OnnxRuntimeQnn
