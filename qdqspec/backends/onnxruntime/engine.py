"""The backend of ONNX Runtime on the CPU, its engine, and the models that it writes.

``onnxruntime`` itself is imported inside functions, so that importing this module is fast.

Options are ``onnxruntime.WORD=VALUE``. ``optimization`` is the level of graph optimization: ``all`` (ONNX Runtime's
default), ``extended``, ``basic``, or ``off``, with which every QuantizeLinear and DequantizeLinear is computed as the
ONNX standard defines it and all other operators in floating point.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx

from qdqspec._core.arrays import Array
from qdqspec._core.options import declare, one_of, option, plugin_libraries
from qdqspec.backends import _cpu, _engine
from qdqspec.backends._engine import one_line
from qdqspec.backends._source import read_source
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.backends.onnxruntime import ops
from qdqspec.backends.onnxruntime.layers import graph_hash, layer_times, map_kernels, parse_profile
from qdqspec.errors import BackendError, ModelError
from qdqspec.graph import Model, convert_by
from qdqspec.types import DeviceKey, LayerTime, Samples

if TYPE_CHECKING:
    import onnxruntime as ort

AS_DEFINED = "off"
FULL = "all"
PAIRS_KEPT = "pairs-kept"  # all but the kernels for integers that replace Q/DQ pairs

LEVELS = {
    FULL: "ORT_ENABLE_ALL",
    PAIRS_KEPT: "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    AS_DEFINED: "ORT_DISABLE_ALL",
}

_KEEPING_PAIRS = "session.disable_quant_qdq", "1"

_PROVIDER = (
    "the CPU provider is the one whose kernels qdqspec knows",
    "for TensorRT take --backend tensorrt or trtexec; see docs/tensorrt.md for the other providers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeOptions:
    """The options after ``onnxruntime.`` in the configuration."""

    optimization: str = option(
        one_of(*LEVELS), "How far ONNX Runtime rewrites a model before it runs it.", FULL
    )
    plugins: tuple[Path, ...] = plugin_libraries("Libraries of custom operators.")


OPTIONS = declare("onnxruntime", OnnxRuntimeOptions, {"provider": _PROVIDER, "providers": _PROVIDER})


_PROGRAM = """import onnxruntime as ort

settings = ort.SessionOptions()
settings.intra_op_num_threads = {threads}
settings.graph_optimization_level = ort.GraphOptimizationLevel.{level}
{settings}{libraries}session = ort.InferenceSession(MODEL, settings, providers=["CPUExecutionProvider"])
session.run(None, FEEDS)
print("ONNX Runtime", ort.__version__, "builds and runs the model")
"""


def program(options: BuildOptions) -> str:
    """A Python program that builds ``MODEL`` and runs it on ``FEEDS``."""
    words = OPTIONS.of(options.extra)
    libraries = (f"settings.register_custom_ops_library({str(library)!r})\n" for library in words.plugins)
    keeping = (
        f"settings.add_session_config_entry{_KEEPING_PAIRS}\n" if words.optimization == PAIRS_KEPT else ""
    )
    return _PROGRAM.format(
        threads=options.threads,
        level=LEVELS[words.optimization],
        settings=keeping,
        libraries="".join(libraries),
    )


# "[ONNXRuntimeError] : 1 : FAIL : Load model from m.onnx failed:/onnxruntime_src/a.cc:256 onnxruntime::f(int) Why"
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_LOADING = re.compile(r"^Load model from .*? failed: ?", re.DOTALL)
# The reason follows the name of the function, or a condition: "... f(int) [with T = char] a == b was false. Why".
_FUNCTION = r"[^()]*\(.*?\) (?=[A-Z])|[^()]*::[^()]*\(.*?\)(?: const)?(?: \[with .*?\])? "
_SOURCE = re.compile(rf"/onnxruntime_src/\S+?:\d+ (?:{_FUNCTION})?")

_UNKNOWN = (
    "give the library of custom operators that has it with --plugin LIB.so (in pytest --qdq-plugin), or cut that part "
    "off the model"
)
_KERNEL = (
    "the inputs fit the model, and ONNX Runtime's kernel of that node refuses what it reads: give other shapes or "
    "values if these have no meaning, else export the node as several smaller ones, update onnxruntime, or choose "
    "another backend"
)
# Text contained in a message, and the remedy.
CURES = {
    "is not a registered function/op": _UNKNOWN,
    "No Op registered for": _UNKNOWN,
    "Unsupported model IR version": "save the model with an older IR version, or update onnxruntime",
    "Current official support for domain": "export the model with an older opset, or update onnxruntime",
    "Could not find an implementation": "ONNX Runtime has no kernel for this operator in this type on a CPU: "
    "export the model in float32, or choose another backend",
    "two nodes with same node name": "give the nodes names of their own, or none",
    "Non-zero status code returned while running": _KERNEL,
}


plainly = partial(one_line, noise=(_STATUS, _LOADING, _SOURCE))


_OPTIMIZER = (
    "ONNX Runtime's optimizer breaks the model, which runs without it (--backend-option onnxruntime.optimization=off): "
    "leave the nodes around the one that fails in float, or report it to ONNX Runtime"
)
_NO_LIBRARY = "give --plugin a library that exports RegisterCustomOps and was built for this ONNX Runtime"
_INSTALL = "pip install onnxruntime"
_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_refusals = partial(_engine.refusals, plainly=plainly, cures=CURES)
_FATAL = 4  # log severity: errors reach the caller as exceptions, standard error stays quiet
_INLINE_BYTES = "1024"  # larger constants of the optimized graph are written to an external file


class OnnxRuntime:
    """ONNX Runtime's CPU provider, with all optimizations on unless `options` state otherwise."""

    name = "onnxruntime"
    target = "onnxruntime-cpu"
    options = OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:  # noqa: ARG002 - there is one device only
        """Report whether ONNX Runtime can be imported, and the integer path of this processor."""
        cpu = _cpu.detect()
        facts = {"cpu": cpu.product, "int8 path": ops.describe(cpu), "cores": str(cpu.cores)}
        try:
            import onnxruntime as ort

            found = {"onnxruntime": ort.__version__, "providers": ", ".join(ort.get_available_providers())}
        except Exception as error:  # noqa: BLE001 - a broken wheel raises anything from ImportError to OSError
            why = f"onnxruntime cannot be imported: {plainly(error)}"
            return Availability(usable=False, why=why, install=_INSTALL, facts=facts)
        return Availability(usable=True, facts=found | facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """Processor, integer instruction set, ONNX Runtime major.minor and threads.

        Threads are part of the key because ratios depend on their number.
        """
        cpu = _cpu.detect()
        version = _installed_version()
        details = cpu.details(int8_path=ops.describe(cpu), threads=options.threads, onnxruntime=version)
        level = OPTIONS.of(options.extra).optimization
        if level != FULL:
            details["optimization"] = level
        return DeviceKey(key=cpu.key("onnxruntime", version, f"t{options.threads}"), details=details)

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:  # noqa: ARG002 - there is one device only
        """The operators that run in integers; the table is verified against the installed version by tests."""
        try:
            version = tuple(int(part) for part in _installed_version().split(".")[:2])
        except ImportError:  # without the package the table of operators is still shown
            version = (0, 0)
        blocked = (*ops.BLOCKED_4, *(ops.BLOCKED_8 if version >= ops.BLOCKED_8_SINCE else ()))
        return replace(
            ops.capabilities(blocked),
            reduce_range=ops.overflows(_cpu.detect()),
            rules={"copies-read-in-bodies": "qdqspec.backends.onnxruntime.ops:copies_read_in_bodies"},
            enforces_output_shapes=True,  # if it is given the memory of the outputs
        )

    def build(self, model: Path, options: BuildOptions) -> OnnxRuntimeEngine:
        """Load and optimize a model file; raise `BackendError` with ONNX Runtime's reason on one line."""
        return OnnxRuntimeEngine(model, options)


class OnnxRuntimeEngine(_engine.TimedEngine["ort.InferenceSession", dict[str, Array]]):
    """A session on one or more threads. The model file must exist as long as `layers` is used.

    Models are run as most callers do, by `InferenceSession.run` with arrays. I/O binding saves three to five
    microseconds, which is a tenth of a model of 0.03 ms and changes its ratio by 5 %.
    """

    def __init__(self, model: Path, options: BuildOptions) -> None:
        self.graph_hash = ""
        with tempfile.TemporaryDirectory(prefix="qdqspec-ort-") as folder:
            optimized = Path(folder) / "optimized.onnx" if options.hashed else None
            session = open_session(model, options, optimized=optimized)
            if optimized is not None:
                written = onnx.load(str(optimized), load_external_data=False)
                self.graph_hash = graph_hash(written.graph, optimized.parent)
        super().__init__(model, session)
        self._options = options
        self._outputs = [output.name for output in session.get_outputs()]
        # ONNX Runtime 1.32 returns the bits of this type, and refuses others that numpy lacks
        self._float8 = {o.name for o in session.get_outputs() if o.type == "tensor(float8e4m3fn)"}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        session = self._require_open()
        try:
            with _refusals(_engine.cannot_run(feeds), self.model):
                values = session.run(self._outputs, dict(feeds))
        except BackendError as error:
            if error.cure not in (_engine.CHECK_INPUTS, _KERNEL):
                raise
            extra = {**self._options.extra, "onnxruntime.optimization": AS_DEFINED}
            with suppress(BackendError), _refusals("", self.model):
                plain = open_session(self.model, replace(self._options, extra=extra))
                plain.run(self._outputs, dict(feeds))
                error = BackendError(error.what, where=self.model, cure=_OPTIMIZER)
            raise error from None
        found = dict(zip(self._outputs, values, strict=True))
        return found | {name: found[name].view(ml_dtypes.float8_e4m3fn) for name in self._float8}

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use; they are copied once."""
        inputs = {value.name for value in self._require_open().get_inputs()}
        if unknown := sorted(feeds.keys() - inputs):
            what = f"the inputs could not be bound: the model has no input {', '.join(unknown)}"
            raise BackendError(what, where=self.model, cure=_engine.CHECK_INPUTS)
        self._bind(profile, {name: np.array(value, order="C") for name, value in feeds.items()})

    def _timed(self, runs: int, warmup: int, profile: int) -> Samples:
        run = partial(self._require_open().run, self._outputs, self._require_bound(profile))
        with _refusals("the model could not be run", self.model):
            return _engine.time_runs(run, runs, warmup, alone=self._options.threads == 1)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per kernel, from a second session with profiling; its sum is scaled to the unprofiled latency.

        Profiling costs about a microsecond per kernel, so its own total is inaccurate for small models.
        """
        feeds = self._require_bound(profile)
        with tempfile.TemporaryDirectory(prefix="qdqspec-ort-") as folder:
            optimized = Path(folder) / "optimized.onnx"
            session = open_session(self.model, self._options, optimized=optimized, profile=Path(folder) / "p")
            with _refusals("the model could not be run", self.model):
                for _ in range(_engine.profile_warmup(runs) + runs):
                    session.run(self._outputs, feeds)
            events = parse_profile(Path(session.end_profiling()).read_text(encoding="utf-8"))
            kernels = read_source(optimized)
        origins = map_kernels(kernels.flat.graph, read_source(self.model))
        total_ms = self._latency_ms(runs, profile)
        return layer_times(kernels, origins, events, runs=runs, total_ms=total_ms)


def _installed_version() -> str:
    """The version of the package that provides ``onnxruntime``: builds for other hardware have other names."""
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    import onnxruntime as ort

    return str(ort.__version__)


def open_session(
    model: Path,
    options: BuildOptions,
    *,
    optimized: Path | None = None,
    profile: Path | None = None,
    failure: str = "ONNX Runtime could not build the model",
) -> ort.InferenceSession:
    """Open a session; write the graph it runs to ``optimized``, and with ``profile`` time its kernels.

    ``failure`` is the text of an error. Writing the graph with external weights costs 0.2 to 1 times a plain
    build, 30 ms for 20 MB.
    """
    ort = _engine.import_library("onnxruntime", _INSTALL)
    _engine.require_file(model)
    words = OPTIONS.of(options.extra)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[words.optimization])
    settings.log_severity_level = _FATAL
    if words.optimization == PAIRS_KEPT:
        settings.add_session_config_entry(*_KEEPING_PAIRS)
    if options.threads == 1:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for library in words.plugins:
        with _refusals("the library of custom operators could not be loaded", library, _NO_LIBRARY):
            settings.register_custom_ops_library(str(library))
    if optimized is not None:
        settings.optimized_model_filepath = str(optimized)
        external = "session.optimized_model_external_initializers_"
        settings.add_session_config_entry(f"{external}file_name", f"{optimized.stem}.weights")
        settings.add_session_config_entry(f"{external}min_size_in_bytes", _INLINE_BYTES)
    if profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(profile)
    with _refusals(failure, model, cure=None):
        return ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])


backend = OnnxRuntime


# ---- models that ONNX Runtime writes ---------------------------------------------------------------


def optimize(model: Path, folder: Path, *, level: str) -> Path:
    """Write the optimized model of the CPU provider into ``folder``, and return the file.

    Raises `BackendError` with ONNX Runtime's reason, `BackendUnavailableError` if it is not installed.
    """
    out = folder / f"{level}.onnx"
    options = BuildOptions(extra={"onnxruntime.optimization": level})
    open_session(model, options, optimized=out, failure="ONNX Runtime could not optimize the model")
    return out


basic = partial(optimize, level="basic")
extended = partial(optimize, level="extended")
everything = partial(optimize, level="all")


_CONVERTER = "onnxruntime.transformers.float16"


def half_model(model: Model, path: Path, *, keep_io: bool = False) -> onnx.ModelProto:
    """The network of a file in float16; every node has its name in ``model``.

    Inputs and outputs are float16 too, or keep their types, with casts, if ``keep_io`` is set.
    All weights are loaded into memory. Raises `ModelError` if the converter's result cannot be used.
    """
    proto = onnx.load(str(path))
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        logging.getLogger(_CONVERTER).setLevel(logging.ERROR)  # it warns of every value that float16 rounds
        convert = partial(
            convert_float_to_float16, keep_io_types=keep_io, disable_shape_infer=bool(model.external_files())
        )
        return convert_by(convert, proto, path)
    except Exception as error:  # noqa: BLE001 - a converter for all models fails in many ways
        why = one_line(error, 200)
        raise ModelError(f"it cannot be converted to float16: {why}", where=path) from None
