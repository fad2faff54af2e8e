"""Sessions of ONNX Runtime with the plugin for QNN: one architecture a process, nothing retried silently on the CPU."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqspec._core.temporary import TemporaryFolder
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime_qnn.graph import Kernel, read_kernels
from qdqspec.backends.onnxruntime_qnn.options import options_from
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph.model import Model

INSTALL = "pip install 'qdqspec[qnn]'"
PLUGIN = "QNNExecutionProvider"
_LONGEST = 500
_opened: list[int] = []  # the architecture of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session, its kernels on the NPU, and names and types of the nodes that stay on the CPU."""

    session: Any
    kernels: tuple[Kernel, ...]
    on_cpu: tuple[tuple[str, str], ...]


def versions() -> dict[str, str]:
    """The versions of plugin, SDK and ONNX Runtime. Raises `BackendUnavailableError` if one cannot be used."""
    try:
        import onnxruntime
        import onnxruntime_qnn
        from onnxruntime_qnn.build_and_package_info import qnn_version
    except Exception as error:  # noqa: BLE001 - a broken wheel raises anything from ImportError to OSError
        raise BackendUnavailableError(
            f"onnxruntime-qnn cannot be imported: {plainly(error)}", cure=INSTALL
        ) from None
    plugin = importlib.metadata.version("onnxruntime-qnn")
    if not Path(onnxruntime_qnn.get_qnn_htp_path()).is_file():
        raise BackendUnavailableError("this wheel of onnxruntime-qnn has no emulator", cure=INSTALL)
    return {"onnxruntime-qnn": plugin, "qairt": str(qnn_version), "onnxruntime": onnxruntime.__version__}


def open_session(model: Path, source: Model, options: BuildOptions) -> Opened:
    """Compile a model for the chip of the options. Raises `BackendError` with the compiler's reason on one line.

    QNN compiles static shapes only: a dimension without a size would leave the whole model to the CPU, silently.
    """
    import onnxruntime as ort
    import onnxruntime_qnn

    words = options_from(options.extra)
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
            why = plainly(error)
            cure = "leave the node that the message names in float; `qdqspec reduce` finds the smallest such model"
            raise BackendError(f"QNN could not build the model: {why}", where=model, cure=cure) from None
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

    found = [device for device in ort.get_ep_devices() if device.ep_name == PLUGIN]
    if not found:
        ort.register_execution_provider_library(PLUGIN, onnxruntime_qnn.get_library_path())
        found = [device for device in ort.get_ep_devices() if device.ep_name == PLUGIN]
    return found[0]


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


def plainly(error: Exception) -> str:
    """The message of an exception on one line."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
