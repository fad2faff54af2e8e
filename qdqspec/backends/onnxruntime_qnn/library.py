"""Options of the emulator, and sessions of ONNX Runtime with the plugin for QNN: one architecture a process.

The library takes any number of a chip, and any text, without a message: it then computes as for its default, or leaves
all nodes to the CPU. Nothing is retried on the CPU here. Source: measured with onnxruntime-qnn 2.7.0 (QAIRT 2.51.0).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qdqspec._core.files import TemporaryFolder
from qdqspec._core.options import declare, one_of, option
from qdqspec.backends._engine import import_library, one_line
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime_qnn.graph import Kernel, read_kernels
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph.model import Model


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session, its kernels on the NPU, and names and types of the nodes that stay on the CPU."""

    session: Any
    kernels: tuple[Kernel, ...]
    on_cpu: tuple[tuple[str, str], ...]


def versions() -> dict[str, str]:
    """The versions of plugin, SDK and ONNX Runtime. Raises `BackendUnavailableError` if one cannot be used."""
    runtime, plugin = (import_library(module, INSTALL) for module in ("onnxruntime", "onnxruntime_qnn"))
    sdk = import_library("onnxruntime_qnn.build_and_package_info", INSTALL).qnn_version
    if not Path(plugin.get_qnn_htp_path()).is_file():
        raise BackendUnavailableError("this wheel of onnxruntime-qnn has no emulator", cure=INSTALL)
    version = importlib.metadata.version("onnxruntime-qnn")
    return {"onnxruntime-qnn": version, "qairt": str(sdk), "onnxruntime": runtime.__version__}


def open_session(model: Path, source: Model, options: BuildOptions) -> Opened:
    """Compile a model for the chip of the options. Raises `BackendError` with the compiler's reason on one line.

    QNN compiles static shapes only: a dimension without a size would leave the whole model to the CPU, silently.
    """
    import onnxruntime as ort
    import onnxruntime_qnn

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
    for name, size in _sizes(source, options).items():
        asked.add_free_dimension_override_by_name(name, size)
    with TemporaryFolder() as folder:
        settings = {
            "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
            "soc_model": str(chip.model),
            "offload_graph_io_quantization": str(int(words.io == "cpu")),
            "dump_json_qnn_graph": "1",
            "json_qnn_graph_dir": str(folder),
        }
        try:
            asked.add_provider_for_devices([_device()], settings)
            session = ort.InferenceSession(str(model), asked)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no public base class
            cure = "leave the node that the message names in float; `qdqspec reduce` finds the smallest such model"
            what = f"QNN could not build the model: {one_line(error)}"
            raise BackendError(what, where=model, cure=cure) from None
        session.disable_fallback()
        _opened[:] = [chip.arch]
        kernels = read_kernels(folder)
    parts = session.get_provider_graph_assignment_info()
    on_cpu = tuple((n.name, n.op_type) for part in parts if part.ep_name != PLUGIN for n in part.get_nodes())
    return Opened(session=session, kernels=kernels, on_cpu=on_cpu)


def _device() -> Any:
    """The plugin's device; the plugin is registered on first use."""
    import onnxruntime as ort
    import onnxruntime_qnn

    if all(device.ep_name != PLUGIN for device in ort.get_ep_devices()):
        ort.register_execution_provider_library(PLUGIN, onnxruntime_qnn.get_library_path())
    return next(device for device in ort.get_ep_devices() if device.ep_name == PLUGIN)


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
            if not size or not dim.dim_param or found.get(dim.dim_param, size) != size:
                raise BackendError(
                    f"dimension {index} of input '{value.name}' has no fixed size: all nodes would run on the CPU",
                    where=source.path,
                    cure=f"give one shape, as inputs: {{shapes: {{{value.name}: [...]}}}}, or export a fixed one",
                )
            found[dim.dim_param] = size
    return found
