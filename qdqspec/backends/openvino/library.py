"""Imports OpenVINO without its telemetry, and opens its core with the settings of a run."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.openvino.messages import plainly
from qdqspec.backends.openvino.options import CPU, device_from, libraries_from
from qdqspec.errors import BackendError, BackendUnavailableError

INSTALL = "pip install 'qdqspec[openvino]'"
_TELEMETRY = "openvino_telemetry"


def import_openvino() -> Any:
    """The module ``openvino``. Raises `BackendUnavailableError` if it cannot be imported.

    Importing it starts a thread and a process that report usage over the network, unless package
    ``openvino_telemetry`` is missing: then OpenVINO uses its own substitute, which does nothing. Here the package is
    hidden during the first import.
    """
    if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # the documented way to make an import fail
        try:
            return _imported()
        finally:
            del sys.modules[_TELEMETRY]
    return _imported()


def _imported() -> Any:
    try:
        import openvino
    except Exception as error:  # noqa: BLE001 - a broken wheel raises anything from ImportError to OSError
        raise BackendUnavailableError(
            f"openvino cannot be imported: {plainly(error)}", cure=INSTALL
        ) from None
    return openvino


def installed_version() -> str:
    """The version of the package. Raises `BackendUnavailableError` if it is not installed."""
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError("openvino is not installed", cure=INSTALL) from None


def device_name(options: BuildOptions) -> str:
    """OpenVINO's name of the selected device: ``CPU``, ``GPU.1``."""
    kind = device_from(options.extra)
    return f"GPU.{options.device}" if kind == "gpu" and options.device else kind.upper()


def core_with_extensions(options: BuildOptions) -> Any:
    """A core with the extension libraries named on the command line."""
    core = import_openvino().Core()
    for library in libraries_from(options.extra):
        try:
            core.add_extension(str(library))
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            raise BackendError(
                f"the extension library could not be loaded: {plainly(error)}",
                where=library,
                cure="give --plugin a library of OpenVINO extensions that was built for this OpenVINO",
            ) from None
    return core


def properties(options: BuildOptions, *, profile: bool = False) -> dict[str, Any]:
    """The settings of every build: one stream, float32 where the model is float32, nothing quantized at run time.

    Threads are not pinned to cores by OpenVINO: with one thread the calling thread computes, and it stays where
    `qdqspec.measurement` puts it.
    """
    kind = device_from(options.extra)
    found: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": profile}
    if kind != "npu":  # which has no float32
        found |= {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    if kind == CPU:
        found |= {
            "INFERENCE_NUM_THREADS": options.threads,
            "ENABLE_CPU_PINNING": False,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    return found


_PROGRAM = """import sys

sys.modules["openvino_telemetry"] = None  # else importing openvino starts a process that reports usage
import openvino

core = openvino.Core()
{extensions}settings = {properties!r}
model = core.read_model(MODEL)
compiled = core.compile_model(model, {device!r}, settings)
compiled.create_infer_request().infer(FEEDS)
print("OpenVINO", openvino.__version__, "builds and runs the model")
"""


def program(options: BuildOptions) -> str:
    """A Python program that builds ``MODEL`` and runs it on ``FEEDS``."""
    extensions = "".join(f"core.add_extension({str(lib)!r})\n" for lib in libraries_from(options.extra))
    return _PROGRAM.format(extensions=extensions, device=device_name(options), properties=properties(options))
