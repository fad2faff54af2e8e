"""The options of TensorRT, ``tensorrt.WORD=VALUE``, and builds of an engine from an ONNX file.

Numbers of enum members changed between the major versions (``STRONGLY_TYPED`` from 1 to 0, where 1 is now another
flag), and members and whole attributes were removed: this package uses no numbers, and accesses a name that is not in
every version with `optional`. TensorRT logs the reason of a failure, which every error here quotes.

Optimization profiles are made of the shapes of a spec; kernels are selected for a profile's optimum shapes. A dynamic
dimension without a given shape is an error: trtexec uses 1 for it, which measures another shape than intended.

A plugin library that exports ``getCreators`` is loaded by TensorRT's plugin registry. The common kind, made with
``REGISTER_TENSORRT_PLUGIN``, registers its creators when the system loads it, and the registry rejects it (TensorRT
issue 4121: "SymbolAddress for getCreators could not be loaded"). trtexec has an option for each.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from qdqspec._core.arrays import Shape
from qdqspec._core.options import PATH, SWITCH, TEXT, declare, one_of, option, plugin_libraries, whole
from qdqspec._core.registry import did_you_mean
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.log import Log, plainly, refusals
from qdqspec.errors import BackendError
from qdqspec.types import ShapeProfile

if TYPE_CHECKING:
    import tensorrt as trt

Tiling: TypeAlias = Literal["none", "fast", "moderate", "full"]
Hardware: TypeAlias = Literal["none", "ampere-plus", "same-compute-capability"]

_NO_TIMING_CACHE = " (0 takes the first kernel that works and does not use the timing cache)"
_OWN = "TensorRT's"  # default, which TensorRT has if the value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Options that all products with TensorRT's API have."""

    plugins: tuple[Path, ...] = plugin_libraries()
    cuda_graph: bool = option(SWITCH, "Whether runs are timed as CUDA graphs where possible.", True)
    warmup_ms: int = option(whole(0), "How long an idle engine runs before it is timed.", 100)
    verbose: bool = option(SWITCH, "Whether the whole log of the compiler goes to the build's.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtOptions(TimingOptions):
    """Options of building and timing."""

    opt_level: int | None = option(
        whole(1, 5, _NO_TIMING_CACHE), "Builder optimization level.", shown=f"{_OWN} (3)"
    )
    workspace: int | None = option(
        whole(1), "MiB that kernels may use as scratch memory.", shown="all available memory"
    )
    avg_timing: int = option(whole(1), "How often the builder times each kernel.", 8)  # as trtexec
    max_tactics: int | None = option(whole(1), "How many kernels it considers a layer at most.", shown=_OWN)
    tiling: Tiling | None = option(one_of(*get_args(Tiling)), "Tiling optimization.", shown="none")
    aux_streams: int | None = option(whole(0), "Streams an engine may use besides its own.", shown=_OWN)
    tf32: bool = option(SWITCH, "Whether float32 may be computed as TF32.", True)
    sparse: bool = option(SWITCH, "Whether kernels for sparse weights may be chosen.", False)
    hardware: Hardware = option(
        one_of(*get_args(Hardware)), "Other GPUs on which the engine must run.", "none"
    )
    version_compatible: bool = option(
        SWITCH, "Whether the engine must run in later versions of TensorRT.", False
    )
    build_route: str | None = option(
        TEXT,
        "TensorRT 11's compiler knobs, -name=value separated by spaces.",
        shown="the compiler's",
        in_files=False,
    )
    timing_cache: Path | None = option(
        PATH,
        "A timing cache that builds read and extend, kept across runs.",
        shown="one in the run's folder",
        in_files=False,
    )


# In a strongly typed network the model determines all types, and TensorRT 11 has no other kind.
_TYPED = (
    "networks are built strongly typed, in the types the model has",
    "convert the model itself to that type, for example to float16",
)
OPTIONS = declare(
    "tensorrt",
    TensorRtOptions,
    refused=dict.fromkeys(("fp16", "bf16", "int8", "fp8", "int4", "fp4", "best"), _TYPED),
)


# ---- builds --------------------------------------------------------------------------------------

_ROUTE = "build_route"  # of IBuilderConfig, since 11
_CANNOT_BUILD = "TensorRT could not build the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine with the runtime that it depends on, and the recorded facts of its build.

    ``runtime_config`` is what its execution contexts are created with, if it has one; ``kernels`` the list of them that
    the compiler logged, if the engine has no other layer information.
    """

    engine: trt.ICudaEngine
    runtime: trt.Runtime
    runtime_config: Any = None
    kernels: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # TensorRT's warnings about the engine


def build_engine(
    model: Path, words: TensorRtOptions, profiles: Sequence[ShapeProfile], shared: Shared, log: Log
) -> BuiltEngine:
    """Build and load an engine. Raises `BackendError` with TensorRT's own reasons, `ConfigError` for options."""
    import tensorrt as trt

    with refusals(log, _CANNOT_BUILD, model):
        builder, network, config = open_network(model, words.plugins, profiles, log)
        _configure(config, words, model)
        cache = shared.attach(config)
        route = optional(config, _ROUTE)
        for note in shared.notes:
            log.add("WARNING", note)
        plan, facts = build_plan(builder, network, config, log, model)
        if plan is None:
            raise log.failure(_CANNOT_BUILD, model)
        if cache is not None:
            shared.keep(config)
        runtime = trt.Runtime(log.logger)
        if words.version_compatible:  # such a plan contains host code; this one was built here
            runtime.engine_host_code_allowed = True
        engine = load_plan(runtime, plan, log, model)
    facts |= {
        "build_route": None if route is None else str(route),
        "timing_cache": shared.kind,
        "short_of_memory": log.dropped_kernels,  # kernels were skipped: its latency may be too high
        "tensorrt": trt.__version__,
        "layers": engine.num_layers,
    }
    return BuiltEngine(engine=engine, runtime=runtime, facts=facts, notes=log.notes)


def build_plan(
    builder: trt.Builder, network: trt.INetworkDefinition, config: trt.IBuilderConfig, log: Log, model: Path
) -> tuple[trt.IHostMemory | None, dict[str, Any]]:
    """Build an engine, ``None`` if the compiler refuses, with the facts of the build."""
    start = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    return plan, {
        "model": model.name,
        "seconds": round(time.perf_counter() - start, 3),
        "plan_bytes": 0 if plan is None else int(plan.nbytes),
        "warnings": list(log.warnings),
    }


def load_plan(runtime: trt.Runtime, plan: trt.IHostMemory, log: Log, model: Path) -> trt.ICudaEngine:
    """Load an engine that was built."""
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise log.failure("TensorRT could not load the engine it built", model)
    return engine


def open_network(
    model: Path, plugins: Sequence[Path], profiles: Sequence[ShapeProfile], log: Log
) -> tuple[trt.Builder, trt.INetworkDefinition, trt.IBuilderConfig]:
    """The builder, the parsed network and its configuration, with one optimization profile for each of the spec's."""
    import tensorrt as trt

    builder = trt.Builder(log.logger)
    _load_plugins(plugins, model, log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else layers have names only
    _parse(network, model, log)
    _add_profiles(builder, network, config, profiles, model)
    return builder, network, config


def _configure(config: trt.IBuilderConfig, words: TensorRtOptions, model: Path) -> None:
    import tensorrt as trt

    numbers = {
        "avg_timing_iterations": words.avg_timing,
        "builder_optimization_level": words.opt_level,
        "max_num_tactics": words.max_tactics,
        "max_aux_streams": words.aux_streams,
    }
    for name, number in numbers.items():
        if number is not None:
            setattr(config, name, number)
    if words.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, words.workspace << 20)
    if words.tiling is not None:
        known = trt.TilingOptimizationLevel
        config.tiling_optimization_level = required(known, words.tiling.upper(), "tensorrt.tiling")
    if words.hardware != "none":
        known, level = trt.HardwareCompatibilityLevel, words.hardware.replace("-", "_").upper()
        config.hardware_compatibility_level = required(known, level, "tensorrt.hardware")
    if not words.tf32:  # on by default, as in trtexec
        config.clear_flag(trt.BuilderFlag.TF32)
    if words.sparse:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if words.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if words.build_route is not None:
        _set_route(config, words.build_route, model)


def _set_route(config: trt.IBuilderConfig, route: str, model: Path) -> None:
    """Set the route and read it back: the bindings drop the result of the setter, which rejects unknown knobs.

    TensorRT lists the knobs as JSON (``all_build_routes``).
    """
    required(config, _ROUTE, "tensorrt.build-route")
    setattr(config, _ROUTE, route)
    if sorted(str(optional(config, _ROUTE)).split()) == sorted(route.split()):
        return
    why = "it lists no build routes on this platform"
    if known := str(optional(config, "all_build_routes") or ""):
        allowed = {each["option"]: each["allowed_values"] for each in json.loads(known)["tuner_options"]}
        why = "it gave no reason"
        for name, _, value in (token.partition("=") for token in route.split()):
            if name not in allowed:
                why = f"it has no '{name}'{did_you_mean(name, list(allowed))}"
                break
            if value not in allowed[name].removeprefix(f"{name}=").strip("[]").split("|"):
                why = f"'{name}={value}' is none of {allowed[name]}"
                break
    raise BackendError(
        f"TensorRT does not take the build route '{route}': {why}",
        where=model,
        cure='write it as -name=value, separated by spaces: "-conv_use_long_w=off -kgen:codegen:cuda_tile=2"',
    )


def _load_plugins(libraries: Sequence[Path], model: Path, log: Log) -> None:
    """Load NVIDIA's plugins and these libraries. Raises `BackendError` if one cannot be loaded.

    The plugin registry writes why to the log of the first builder, which must exist.
    """
    import tensorrt as trt

    trt.init_libnvinfer_plugins(log.logger, "")
    for library in libraries:
        if exports_creators(library):
            if trt.get_plugin_registry().load_library(str(library)) is None:
                raise log.failure(f"the plugin library {library} could not be loaded", model)
            continue
        try:  # its symbols must be visible to all others
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            what = f"the plugin library {library} could not be loaded: {error}"
            raise BackendError(what, where=model) from None


def _parse(network: trt.INetworkDefinition, model: Path, log: Log) -> None:
    """Parse the file, not a copy in memory: external data is found, and the 2 GB limit does not apply.

    Raises `BackendError` with all nodes that the parser rejects: operator, node, reason and code; without a node if the
    whole file is rejected.
    """
    import tensorrt as trt

    parser = trt.OnnxParser(network, log.logger)
    if parser.parse_from_file(str(model)):
        return
    problems = []
    for error in (parser.get_error(index) for index in range(parser.num_errors)):
        reason = f"{plainly(error.desc())} ({error.code().name})"
        if error.node() >= 0 or error.node_name():
            inside = "".join(f" in function {name}" for name in error.local_function_stack())
            reason = (
                f"{error.node_operator() or 'node'} '{error.node_name() or error.node()}'{inside}: {reason}"
            )
        problems.append(reason)
    if not problems:
        raise log.failure("TensorRT could not read the model", model)
    what = "the model" if len(problems) == 1 else f"{len(problems)} nodes of the model"
    raise BackendError(
        f"TensorRT refuses {what}: {' | '.join(problems)}",
        where=model,
        cure="leave these nodes in float, or change how the model is exported",
    )


def _add_profiles(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    config: trt.IBuilderConfig,
    profiles: Sequence[ShapeProfile],
    model: Path,
) -> None:
    """Add one optimization profile for each of the spec's, in its order.

    A network without dynamic inputs needs none. Raises `BackendError` with every input that has a dynamic
    dimension and no shape, or a shape that does not match.
    """
    dynamic: dict[str, Shape] = {}  # inputs with unknown dimensions, which TensorRT represents as -1
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise BackendError(
                f"the values of input '{tensor.name}' decide shapes inside the model, which a spec cannot state",
                where=model,
                cure="make it a constant of the model",
            )
        if -1 in (shape := tuple(tensor.shape)):
            dynamic[tensor.name] = shape
    for profile in (profiles or (ShapeProfile(),)) if dynamic else ():
        if missing := {name: shape for name, shape in dynamic.items() if name not in profile.shapes}:
            names = ", ".join(f"'{name}' {_text(shape)}" for name, shape in missing.items())
            what = f"input {names} has dynamic dimensions and no shape is given"
            raise BackendError(what, where=model, cure=_cure(missing))
        added = builder.create_optimization_profile()
        for name, own in dynamic.items():
            given = profile.shapes[name]
            for shape in (given.min, given.opt, given.max):
                if not fits(shape, own, own):
                    raise BackendError(
                        f"input '{name}' is declared with shape {list(shape)}, but the model has {_text(own)}",
                        where=model,
                        cure="declare in inputs.shapes a shape that the model accepts",
                    )
            added.set_shape(name, given.min, given.opt, given.max)
        if config.add_optimization_profile(added) < 0:
            raise BackendError("TensorRT refused the shapes of the inputs", where=model, cure=_cure(dynamic))


def choose_profile(
    engine: trt.ICudaEngine, shapes: Mapping[str, Shape], model: Path, *, only: int | None = None
) -> int:
    """The first optimization profile that accepts these shapes; with ``only``, that one, if there are several.

    Raises `BackendError` if none accepts them.
    """
    ranges: dict[str, list[str]] = {}  # the shapes that each profile accepts, of inputs that it rejects
    count = engine.num_optimization_profiles
    for index in range(count) if only is None or count == 1 else (only,):
        is_accepted = True
        for name, shape in shapes.items():
            own = tuple(engine.get_tensor_shape(name))
            low, high, span = own, own, str(list(own))
            if -1 in own:  # profiles are for dynamic inputs
                low, _, high = (tuple(dims) for dims in engine.get_tensor_profile_shape(name, index))
                span = f"{list(low)} to {list(high)}"
            if not fits(shape, low, high):
                is_accepted = False
                ranges.setdefault(name, []).append(span)
        if is_accepted:
            return index
    name, spans = next(iter(ranges.items()))
    raise BackendError(
        f"input '{name}' has shape {list(shapes[name])}, and the engine takes {' or '.join(spans)}",
        where=model,
        cure="feed a shape that inputs.shapes declares",
    )


def fits(shape: Shape, low: Shape, high: Shape) -> bool:
    """Whether a shape is between two others, where -1 means no bound."""
    return len(shape) == len(low) and all(
        (least < 0 or least <= size) and (most < 0 or size <= most)
        for size, least, most in zip(shape, low, high, strict=True)
    )


def _cure(shapes: Mapping[str, Shape]) -> str:
    text = ", ".join(f"{name}: {_text(shape)}" for name, shape in shapes.items())
    return f"declare them in the spec: inputs: {{shapes: {{{text}}}}}"


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if size < 0 else str(size) for size in shape) + "]"


_EXPORT = b"\0getCreators\0"  # as it occurs in a library's symbol table


def exports_creators(library: Path) -> bool:
    """Whether a library is for TensorRT's plugin registry, rather than one that registers itself."""
    return _EXPORT in library.read_bytes()


def trtexec_option(library: Path) -> str:
    """The option of trtexec for a library: ``--dynamicPlugins`` for the registry, ``--staticPlugins`` for others."""
    return f"--{'dynamic' if exports_creators(library) else 'static'}Plugins={library}"


# ---- names that differ between versions ------------------------------------------------------------


def optional(owner: object, name: str) -> Any:
    """An attribute or enum member that some versions do not have; ``None`` in those."""
    return getattr(owner, name, None)


def required(owner: object, name: str, wanted_by: str) -> Any:
    """The same for an attribute that the user requested: an error if it is missing."""
    found = optional(owner, name)
    if found is None:
        raise BackendError(
            f"{wanted_by} cannot be used: this version of TensorRT has no {name}",
            cure="leave the option out, or install the version it is for",
        )
    return found
