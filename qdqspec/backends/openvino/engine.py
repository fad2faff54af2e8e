"""The backend `openvino`: the operators that its CPU plugin runs in integers, its options, and its engine.

``openvino`` is imported inside functions, so that importing this module is fast. The options are
``openvino.WORD=VALUE``. OpenVINO's own properties are not passed on: one of them (``CACHE_DIR``) makes it load compiled
models from a folder, and others change the arithmetic. No GPU or NPU has been available: operators and formats hold for
the CPU.

The table of operators was derived from the runtime graphs of small models with OpenVINO 2026.4.1 (uint8 activations
with any zero point, int8 weights per channel) and is verified entry by entry against the installed version in
``tests/unit/backends/test_openvino.py``. Conditions that an operator type cannot express:

- Conv, Gemm and MatMul need a constant weight (`Capabilities.constant_weight`); a float bias is added in the integer
  kernel. A ConvTranspose runs in float32 with uint8 activations.
- An Add or Sub of two quantized tensors is computed in the kernel of the convolution that makes one of them. If one
  side only has a pair, the sum is a separate kernel in float32.
- A Mul reads and writes integers if one operand is broadcast, as in squeeze-and-excitation blocks; of two
  convolutions of equal shape it is computed in float32.
- Resize runs in integers in mode ``nearest`` only.
- Where scale or zero point differ between both sides of an operator that moves values, a kernel that converts follows.
- If the output is in float32, operators that move values are followed by a kernel that dequantizes.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec._core.options import declare, one_of, option, plugin_libraries
from qdqspec.backends import _cpu, _engine
from qdqspec.backends._engine import import_library
from qdqspec.backends._source import read_given, read_source
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities, labels_of
from qdqspec.backends.openvino.layers import graph_hash, layer_times, read_kernels
from qdqspec.errors import BackendUnavailableError
from qdqspec.types import DeviceKey, LayerTime, Samples

LINEAR = ("Conv", "Gemm", "MatMul")
REDUCING = ("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum")
JOINING = ("Add", "Concat", "Mul", "Sub")
MOVING = (
    "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "MaxPool", "ReduceMax", "Reshape", "Resize",
    "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS = labels_of(alone=LINEAR + REDUCING, between=JOINING + MOVING)

# They are computed in the kernel of the convolution before them, with the Q after them. BatchNormalization is folded.
ABSORBED = frozenset(
    {
        "Abs", "BatchNormalization", "Clip", "Dropout", "Elu", "Gelu", "HardSwish", "Identity", "LeakyRelu", "Mish",
        "Neg", "PRelu", "Relu", "Sigmoid", "Sqrt", "Tanh",
    }
)  # fmt: skip


# ---- options and messages --------------------------------------------------------------------------

CPU = "cpu"
_PRECISION, _FLOAT32 = "INFERENCE_PRECISION_HINT", "f32"

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


def properties(options: BuildOptions, *, profile: bool = False) -> dict[str, Any]:
    """The settings of every build: one stream, float32 where the model is float32, nothing quantized at run time.

    Threads are not pinned to cores by OpenVINO: with one thread the calling thread computes, and it stays where
    `qdqspec.timing` puts it.
    """
    kind = OPTIONS.of(options.extra).device
    found: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": profile}
    if kind != "npu":  # which has no float32
        found |= {_PRECISION: _FLOAT32, "NUM_STREAMS": 1}
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

# Text contained in a message, and the remedy.
_CURES = {
    "No conversion rule found": "give the extension library that has the operator with --plugin LIB.so (in pytest "
    "--qdq-plugin), or cut that part off the model",
    "is not supported": "export the model with other operators, or choose another backend",
}


plainly = partial(_engine.one_line, noise=(_SOURCE, _CHECK))


# ---- the backend and its engine --------------------------------------------------------------------

_refusals = partial(_engine.refusals, plainly=plainly, cures=_CURES)
_NO_LIBRARY = "give --plugin a library of OpenVINO extensions that was built for this OpenVINO"


class OpenVino:
    """OpenVINO with one stream, its arithmetic pinned: see `properties`."""

    name = "openvino"
    target = "openvino-cpu"
    options = OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether OpenVINO can be imported and has the selected device."""
        cpu = _cpu.detect()
        path = cpu.int8_text(saturates=cpu.may_saturate)
        facts = {"cpu": cpu.product, "int8 path": path, "cores": str(cpu.cores)}
        try:
            openvino = import_openvino()
            core = openvino.Core()
            devices = list(core.available_devices)
            named = (f"{device}: {core.get_property(device, 'FULL_DEVICE_NAME')}" for device in devices)
            facts = {"openvino": str(openvino.__version__), "devices": "; ".join(named)} | facts
            wanted = device_name(options)
        except Exception as error:  # noqa: BLE001 - a broken plugin or driver raises anything
            why = error.what if isinstance(error, BackendUnavailableError) else plainly(error)
            return Availability(usable=False, why=why, install=INSTALL, facts=facts)
        if not any(device == wanted or device.startswith(f"{wanted}.") for device in devices):
            why = f"OpenVINO finds no device {wanted}: it has {', '.join(devices) or 'none'}"
            return Availability(usable=False, why=why, install="install the device's driver", facts=facts)
        return Availability(usable=True, facts=facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """Processor or other device, integer instruction set, OpenVINO major.minor and threads."""
        cpu, version, kind = _cpu.detect(), installed_version(), OPTIONS.of(options.extra).device
        path = cpu.int8_text(saturates=cpu.may_saturate)
        details = cpu.details(int8_path=path, threads=options.threads, openvino=version)
        if kind == CPU:
            return DeviceKey(key=cpu.key("openvino", version, f"t{options.threads}"), details=details)
        name = device_name(options)
        with _refusals(f"OpenVINO cannot use device {name}", None, cure="see: qdqspec doctor"):
            product = str(import_openvino().Core().get_property(name, "FULL_DEVICE_NAME"))
        key = f"{_cpu.slug_from_text(f'{kind} {product}')}-openvino-{_cpu.major_minor(version)}"
        return DeviceKey(key=key, details={kind: product, **details})

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The operators that run in integers; the table is verified against the installed version by tests."""
        on_cpu = OPTIONS.of(options.extra).device == CPU
        return Capabilities(
            formats=("int8", "uint8"),
            labels=LABELS,
            activations={"int8": "uint8", "uint8": "uint8"},
            weights={"int8": "int8", "uint8": "int8"},
            absorbs=ABSORBED,
            constant_weight=frozenset(LINEAR),
            reduce_range=on_cpu and _cpu.detect().may_saturate,
            builds_side_by_side=on_cpu,
            one_processor=on_cpu,
            hardware=OPTIONS.of(options.extra).device,
        )

    def build(self, model: Path, options: BuildOptions) -> OpenVinoEngine:
        """Read and compile a model file; raise `BackendError` with OpenVINO's reason on one line."""
        return OpenVinoEngine(model, options)


class OpenVinoEngine(_engine.TimedEngine[Any, tuple[Any, dict[str, Array]]]):
    """A compiled model; a request and its inputs are bound. The model file must exist as long as `layers` is used."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        source = read_given(model)  # OpenVINO itself would try parsers of other formats too
        compiled = _compiled(model, options)
        super().__init__(model, compiled)
        self._options = options
        self._inputs, self._outputs = source.inputs, source.outputs
        with _refusals("OpenVINO could not build the model", model, cure=None):
            kernels = read_kernels(compiled.get_runtime_model())
            self.graph_hash = graph_hash(kernels, source)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        compiled = self._require_open()
        with _refusals(_engine.cannot_run(feeds), self.model):
            request = _request(compiled, self._complete(feeds))
            request.infer(share_outputs=True)
            values = [np.array(request.get_output_tensor(i).data) for i in range(len(self._outputs))]
        return dict(zip(self._outputs, values, strict=True))

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use; they are copied once."""
        compiled = self._require_open()
        with _refusals("the inputs could not be bound", self.model):
            values = self._complete(feeds)
            self._bind(profile, (_request(compiled, values), values))

    def _timed(self, runs: int, warmup: int, profile: int) -> Samples:
        run = partial(self._require_bound(profile)[0].infer, share_outputs=True)
        alone = self._options.threads == 1 and OPTIONS.of(self._options.extra).device == CPU
        with _refusals("the model could not be run", self.model):
            samples = _engine.time_runs(run, runs, warmup, alone=alone)
            return replace(samples, notes=_other_default(device_name(self._options)))

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per kernel, from a second build with counters; its sum is scaled to the latency without them."""
        values = self._require_bound(profile)[1]
        profiled = _compiled(self.model, self._options, profile=True)
        with _refusals("the model could not be run", self.model):
            request, warmup = _request(profiled, values), _engine.profile_warmup(runs)
            sums = list[dict[str, float]]()  # microseconds of each kernel since the build: counters are means
            for count, since in ((warmup, warmup), (runs, warmup + runs)):
                for _ in range(count):
                    request.infer(share_outputs=True)
                counters = request.get_profiling_info()
                sums.append({c.node_name: c.real_time.total_seconds() * 1e6 * since for c in counters})
            before, after = sums
            times = {name: max(0.0, (total - before.get(name, 0.0)) / runs) for name, total in after.items()}
            kernels = read_kernels(profiled.get_runtime_model())
        return layer_times(kernels, read_source(self.model), times, self._latency_ms(runs, profile))

    def _complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Copies of the inputs in the model's order. Raises `BackendError` if their names are not the model's."""
        _engine.check_names(self._inputs, feeds, self.model)
        return {name: np.array(feeds[name], order="C") for name in self._inputs}


def _compiled(model: Path, options: BuildOptions, *, profile: bool = False) -> Any:
    """The compiled model, with the extension libraries named on the command line."""
    core = import_openvino().Core()
    for library in OPTIONS.of(options.extra).plugins:
        with _refusals("the extension library could not be loaded", library, cure=_NO_LIBRARY):
            core.add_extension(str(library))
    with _refusals("OpenVINO could not build the model", model, cure=None):
        return core.compile_model(
            core.read_model(model), device_name(options), properties(options, profile=profile)
        )


@cache
def _other_default(device: str) -> tuple[str, ...]:
    """A note if OpenVINO computes a float model otherwise by default than qdqspec times it."""
    if device == "NPU":  # nothing is set there
        return ()
    default = import_openvino().Core().get_property(device, _PRECISION).to_string()
    advice = (
        f"timed in {_FLOAT32}, and OpenVINO's default here is {default}: set {_PRECISION} in your application"
    )
    return () if default == _FLOAT32 else (f"{advice}, else float layers are faster and less exact there",)


def _request(compiled: Any, values: Mapping[str, Array]) -> Any:
    """An inference request with these inputs, which are in the model's order. Raises on other types and shapes."""
    tensor_of = import_openvino().Tensor
    request = compiled.create_infer_request()
    for index, value in enumerate(values.values()):
        request.set_input_tensor(index, tensor_of(value))
    return request


backend = OpenVino
