"""The backend `onnxruntime-qnn`, and its engine: Qualcomm's NPU as its own emulator computes it on x86-64.

ONNX Runtime's plugin for QNN has the emulator, of one architecture a process. It reports what the compiler accepts,
which nodes leave the NPU, which of the others run in integers, and the outputs. It reports no time: its cycles are the
clock of the machine it runs on. That it computes as a device does was not verified on one. What runs in integers was
measured by the types of its compiled graphs (onnxruntime-qnn 2.7.0, QAIRT 2.51.0):

- Activations are uint8 with any zero point on both sides of an operator: with another type on one side it runs in
  float, and signed symmetric activations break Softmax (-40 dB on a whole model).
- Weights are int8 with zero point 0, per channel for convolutions.
- A LayerNormalization stays float: in integers it costs 5 dB more than its pairs, and with a bias of int32 beside
  activations of another type than its scale it leaves the NPU.

The library takes any number of a chip, and any text, without a message: it then computes as for its default, or leaves
all nodes to the CPU. Nothing is retried on the CPU here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.options import declare, one_of, option
from qdqspec.backends._cpu import major_minor
from qdqspec.backends._engine import BoundEngine, cannot_run, check_names, import_library, refusals
from qdqspec.backends._source import Source, read_given
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph import Model
from qdqspec.graph.ops import OF_PAIRS
from qdqspec.types import DeviceKey, LayerTime, Samples


class Chip(NamedTuple):
    """A chip: its number in QNN, and the architecture of its NPU."""

    model: int
    arch: int


# Source: ExecuTorch's qc_schema.py. Each was tried here: the plugin places all nodes of a quantized network on it.
CHIPS: dict[str, Chip] = {
    "sm8350": Chip(30, 68), "sm8450": Chip(36, 69), "sm8550": Chip(43, 73), "sm8635": Chip(68, 73),
    "sm8650": Chip(57, 75), "sm8735": Chip(85, 79), "sm8750": Chip(69, 79), "sm8850": Chip(87, 81),
    "sa8255": Chip(52, 73), "sa8295": Chip(39, 68), "sc8380xp": Chip(60, 73), "ssg2115p": Chip(46, 73),
    "ssg2125p": Chip(58, 73), "sxr1230p": Chip(45, 73),
}  # fmt: skip
CHOOSE = f"set onnxruntime-qnn.soc to one of {', '.join(CHIPS)}"
_NO_TIMES = (
    "an emulator has no power or performance to set: it times nothing",
    "leave it out, and time on a device",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QnnOptions:
    """The options after ``onnxruntime-qnn.`` in the configuration."""

    soc: str = option(one_of(*CHIPS), "The chip whose NPU is emulated (required).", "", shown="none")
    io: str = option(one_of("cpu", "npu"), "Where inputs are quantized and outputs dequantized.", "cpu")
    fallback: str = option(
        one_of("cpu", "none"), "Where nodes run that the NPU does not take; `none`: the build fails.", "cpu"
    )

    @property
    def chip(self) -> Chip:
        """The chip. Raises `BackendUnavailableError` if none was chosen."""
        if not self.soc:
            raise BackendUnavailableError("no chip is chosen for the emulator", cure=CHOOSE)
        return CHIPS[self.soc]


OPTIONS = declare(
    "onnxruntime-qnn",
    QnnOptions,
    refused={
        **dict.fromkeys(("htp-performance-mode", "vtcm-mb", "profiling-level"), _NO_TIMES),
        "htp-arch": ("it is that of the chip", CHOOSE),
        "soc-model": ("a number that the library does not know is taken silently", CHOOSE),
    },
)


INSTALL = "pip install 'qdqspec[qnn]'"
PLUGIN = "QNNExecutionProvider"
_opened: list[int] = []  # the architecture of this process


def versions() -> dict[str, str]:
    """The versions of plugin, SDK and ONNX Runtime. Raises `BackendUnavailableError` if one cannot be used."""
    runtime, plugin = (import_library(module, INSTALL) for module in ("onnxruntime", "onnxruntime_qnn"))
    sdk = import_library("onnxruntime_qnn.build_and_package_info", INSTALL).qnn_version
    if not Path(plugin.get_qnn_htp_path()).is_file():
        raise BackendUnavailableError("this wheel of onnxruntime-qnn has no emulator", cure=INSTALL)
    version = importlib.metadata.version("onnxruntime-qnn")
    return {"onnxruntime-qnn": version, "qairt": str(sdk), "onnxruntime": runtime.__version__}


def _name_dimensions(graph: onnx.GraphProto) -> bool:
    """Name the open dimensions of inputs that have no name, or -1 as size. Changes the graph; whether it did."""
    dims = ((p.name, *each) for p in graph.input for each in enumerate(p.type.tensor_type.shape.dim))
    unnamed = [
        (d, f"{name}:{index}") for name, index, d in dims if d.dim_value < 0 or not d.WhichOneof("value")
    ]
    for dim, name in unnamed:
        dim.dim_param = name
    return bool(unnamed)


def _sizes(source: Model, options: BuildOptions) -> dict[str, int]:
    """The sizes of the model's named dimensions. Raises `BackendError` for a dimension without one size."""
    found: dict[str, int] = {}
    for value in source.proto.graph.input:
        if value.name in source.constants:
            continue
        dims = value.type.tensor_type.shape.dim
        shapes = [profile.shapes[value.name] for profile in options.profiles if value.name in profile.shapes]
        sizes = {tuple(bound) for shape in shapes for bound in (shape.min, shape.opt, shape.max)}
        (given,) = sizes if len(sizes) == 1 else ((0,) * len(dims),)
        for index, dim in enumerate(dims):
            if dim.HasField("dim_value"):
                continue
            size = given[index] if index < len(given) else 0
            if not size or found.get(dim.dim_param, size) != size:
                raise BackendError(
                    f"dimension {index} of input '{value.name}' has no fixed size: all nodes would run on the CPU",
                    where=source.path,
                    cure=f"give one shape, as inputs: {{shapes: {{{value.name}: [...]}}}}, or export a fixed one",
                )
            found[dim.dim_param] = size
    return found


# ---- the compiled graph ----------------------------------------------------------------------------

_TYPES = {  # the number of a type of QNN, as qdqspec names it; fixed-point types are quantized
    0x0008: "int8", 0x0016: "int16", 0x0032: "int32", 0x0064: "int64", 0x0108: "uint8", 0x0116: "uint16",
    0x0132: "uint32", 0x0216: "float16", 0x0232: "float32", 0x0308: "int8", 0x0316: "int16", 0x0332: "int32",
    0x0408: "uint8", 0x0416: "uint16", 0x0432: "uint32", 0x0508: "bool", 0x0304: "int4", 0x0404: "uint4",
}  # fmt: skip
_FIXED = range(0x0300, 0x0500)
_CONVERTS = frozenset({"Cast", "Convert", "Dequantize", "Quantize", "Transpose"})
_SUFFIX = re.compile(r"(?:_token_\d+|/duplicated|_(?:nhwc|transpose)\w*)+$")


class Kernel(NamedTuple):
    """An operator of a compiled graph; ``part`` counts the graphs, into which nodes on the CPU divide a model."""

    name: str
    op_type: str
    part: int
    reads: tuple[str, ...]  # types of its inputs and of its outputs
    gives: tuple[str, ...]
    is_integer: bool
    data: str  # the tensor that it reads
    made: str  # the tensor that it makes
    constants: str  # digest of its quantization parameters


def read_kernels(folder: Path) -> tuple[Kernel, ...]:
    """The operators of all graphs that one build wrote."""
    files = sorted(file for file in folder.glob("*.json") if not file.stem.endswith("_tensor_log"))
    kernels = []
    for part, file in enumerate(files):
        graph = json.loads(file.read_text(encoding="utf-8"))["graph"]
        for name, node in graph["nodes"].items():
            sides = node["input_names"], node["output_names"]
            read, given = ([graph["tensors"].get(tensor, {}) for tensor in side] for side in sides)
            taken, made = ([int(tensor.get("data_type", 0)) for tensor in side] for side in (read, given))
            parameters = [[tensor.get("dims"), tensor.get("quant_params")] for tensor in (*read, *given)]
            data = [*taken[:1], *made]
            kernels.append(
                Kernel(
                    name=name,
                    op_type=node["type"],
                    part=part,
                    reads=tuple(_TYPES.get(number, hex(number)) for number in taken),
                    gives=tuple(_TYPES.get(number, hex(number)) for number in made),
                    is_integer=bool(data) and all(number in _FIXED for number in data),
                    data=_SUFFIX.sub("", next(iter(node["input_names"]), "")),
                    made=_SUFFIX.sub("", next(iter(node["output_names"]), "")),
                    constants=hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[
                        :16
                    ],
                )
            )
    return tuple(kernels)


# ---- the backend and its engine --------------------------------------------------------------------

CPU, NPU = "cpu", "npu"
_LISTED = 20  # most nodes that an error names
_LEFT = "leave these nodes and their inputs in float; `qdqspec lint` says why, `qdqspec reduce` finds a small model"
_UNBUILT = "leave the node that the message names in float; `qdqspec reduce` finds the smallest such model"

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
    """A compiled model in the emulator.

    QNN compiles static shapes only: a dimension without a size would leave the whole model to the CPU, silently.
    """

    def __init__(self, model: Path, options: BuildOptions) -> None:
        import onnxruntime as ort
        import onnxruntime_qnn

        self._source = read_given(model)
        words = OPTIONS.of(options.extra)
        chip = words.chip
        if _opened and _opened[0] != chip.arch:
            # Measured: sessions of v68 and v73 open together fail when they run, and are retried on the CPU.
            raise BackendError(
                f"a process emulates one architecture: this one has v{_opened[0]}, not v{chip.arch}",
                where=model,
                cure="run the other chip in a process of its own",
            )
        asked = ort.SessionOptions()
        asked.log_severity_level = 3
        asked.intra_op_num_threads = options.threads
        asked.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        given: str | bytes = str(model)
        if _name_dimensions(self._source.proto.graph):  # a size is given by name
            given = self._source.proto.SerializeToString()
            asked.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(model.parent)
            )
        for name, size in _sizes(self._source, options).items():
            asked.add_free_dimension_override_by_name(name, size)
        with TemporaryFolder() as folder:
            settings = {
                "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
                "soc_model": str(chip.model),
                "offload_graph_io_quantization": str(int(words.io == "cpu")),
                "dump_json_qnn_graph": "1",
                "json_qnn_graph_dir": str(folder),
            }
            with refusals("QNN could not build the model", model, _UNBUILT):
                if all(device.ep_name != PLUGIN for device in ort.get_ep_devices()):
                    ort.register_execution_provider_library(PLUGIN, onnxruntime_qnn.get_library_path())
                device = next(device for device in ort.get_ep_devices() if device.ep_name == PLUGIN)
                asked.add_provider_for_devices([device], settings)
                session = ort.InferenceSession(given, asked)
            session.disable_fallback()
            _opened[:] = [chip.arch]
            self._kernels = read_kernels(folder)
        super().__init__(model, session)
        # contexts that QNN saves differ from build to build
        rows = sorted(repr(tuple(kernel)) for kernel in self._kernels)
        self.graph_hash = hashlib.sha256("\n".join(rows).encode()).hexdigest()
        parts = session.get_provider_graph_assignment_info()
        left = [(n.name, n.op_type) for part in parts if part.ep_name != PLUGIN for n in part.get_nodes()]
        self._left = tuple(self._on_cpu(left))
        if words.fallback == "none" and self._left:
            ops = ", ".join(sorted({layer.op_type for layer in self._left}))
            names = ", ".join(f"'{layer.name}'" for layer in self._left[:_LISTED])
            raise BackendError(f"{ops} would run on the CPU: {names}", where=model, cure=_LEFT)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once in the emulator and return the outputs by name."""
        session = self._require_open()
        check_names(self._source.inputs, feeds, self.model)
        with refusals(cannot_run(feeds), self.model):
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
        source, layers = Source(self._source), list[LayerTime]()
        for kernel in self._kernels:
            nodes = _nodes(self._source, source, kernel)
            layer = LayerTime(
                name=kernel.name,
                op_type=kernel.op_type,
                milliseconds=0.0,
                nodes=nodes,
                tensors=() if nodes else (source.base(kernel.data),),
                boundary=not nodes,
                integer=kernel.is_integer,
                precision=" > ".join(dict.fromkeys((*kernel.reads[:1], *kernel.gives[:1]))),
                place=f"{NPU}-{kernel.part + 1}" if kernel.part else NPU,
            )
            layers.append(layer)
        return (*layers, *self._left)

    def _on_cpu(self, left: Iterable[tuple[str, str]]) -> Iterator[LayerTime]:
        """The nodes ``left`` to the CPU, without pairs of inputs, outputs and constants, which are there on purpose."""
        model, source = self._source, Source(self._source)
        fed = {*model.inputs, *model.constants, *source.static}
        for name, op_type in left:
            node = model.by_name.get(name)
            is_pair = op_type in OF_PAIRS
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
    name = _SUFFIX.sub("", kernel.name)  # without what ONNX Runtime added
    if name in source.nodes or kernel.op_type in _CONVERTS:  # it only converts values or their layout
        return (name,) if name in source.nodes else ()
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
