"""Imports OpenVINO without its telemetry, opens its core with the options of a run and explains its messages.

The options are ``openvino.WORD=VALUE``. OpenVINO's own properties are not passed on: one of them (``CACHE_DIR``) makes
it load compiled models from a folder, and others change the arithmetic.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqspec._core.options import declare, one_of, option, plugin_libraries
from qdqspec.backends._engine import import_library
from qdqspec.backends.base import BuildOptions
from qdqspec.errors import BackendError, BackendUnavailableError

CPU = "cpu"

_PINNED = ("qdqspec sets it, so that times of different runs are comparable", "leave it out")
_THREADS = ("the number of threads is an option of the run", "give --threads")

_REFUSED = {
    "cache-dir": (
        "OpenVINO would load compiled models from that folder, and builds would not be measured",
        "leave it out; qdqspec keeps its own cache of results",
    ),
    "inference-precision-hint": _PINNED,
    "num-streams": _PINNED,
    "inference-num-threads": _THREADS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """The options after ``openvino.`` in the configuration."""

    device: str = option(
        one_of(CPU, "gpu", "npu"),
        "The kind of device that runs the models; the index of a GPU is given with --device.",
        CPU,
    )
    plugins: tuple[Path, ...] = plugin_libraries("OpenVINO extension libraries with custom operators.")


OPTIONS = declare("openvino", OpenVinoOptions, _REFUSED)


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
            return import_library("openvino", INSTALL)
        finally:
            del sys.modules[_TELEMETRY]
    return import_library("openvino", INSTALL)


def installed_version() -> str:
    """The version of the package. Raises `BackendUnavailableError` if it is not installed."""
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError("openvino is not installed", cure=INSTALL) from None


def device_name(options: BuildOptions) -> str:
    """OpenVINO's name of the selected device: ``CPU``, ``GPU.1``."""
    kind = OPTIONS.of(options.extra).device
    return f"GPU.{options.device}" if kind == "gpu" and options.device else kind.upper()


def core_with_extensions(options: BuildOptions) -> Any:
    """A core with the extension libraries named on the command line."""
    core = import_openvino().Core()
    for library in OPTIONS.of(options.extra).plugins:
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
    `qdqspec.timing` puts it.
    """
    kind = OPTIONS.of(options.extra).device
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
    extensions = "".join(f"core.add_extension({str(lib)!r})\n" for lib in OPTIONS.of(options.extra).plugins)
    return _PROGRAM.format(extensions=extensions, device=device_name(options), properties=properties(options))


# "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'a == b' failed at src/plugins/x.cpp:669:\nWhy"
_SOURCE = re.compile(r"Exception from \S+:\d+:\s*")
_CHECK = re.compile(r"Check '.*?' failed at (\S+):\d+:\s*", re.DOTALL)
_LONGEST = 500

# Text contained in a message, and the remedy.
_CURES = {
    "No conversion rule found": "give the extension library that has the operator with --plugin LIB.so (in pytest "
    "--qdq-plugin), or cut that part off the model",
    "is not supported": "export the model with other operators, or choose another backend",
}


def plainly(error: Exception) -> str:
    """The message of an exception, on one line; the failed assertion is kept only if there is nothing else."""
    text = _SOURCE.sub("", str(error))
    short = _CHECK.sub("", text).strip() or text
    return " ".join(short.split())[:_LONGEST].strip() or type(error).__name__


def cure_for(text: str) -> str | None:
    """The remedy for an error, if known."""
    return next((cure for sign, cure in _CURES.items() if sign in text), None)
