"""The backend `tensorrt-rtx`: engines that are built on any x86-64 machine, and timed where there is a GPU.

Its options are ``tensorrt-rtx.WORD=VALUE``. Without a GPU, or with option ``for``, an engine has a list of compiled
kernels and nothing else: it neither runs nor is timed. The classes of backend `tensorrt` run and time an engine on a
GPU; that part has not been tested on one.

One build is made for all requested compute capabilities; it takes as long as one. If it is refused, a build for each
shows which capabilities refuse the model. With detailed verbosity the compiler logs the list of the compiled
kernels; for several capabilities that is the list of the lowest one (measured with 1.7.1.116). The final machine code
is compiled on the GPU, so that a list shows which kernels run in which types, and no time. The command that repeats a
build makes Polygraphy load this file as a script.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from qdqspec._core.arrays import Array
from qdqspec._core.files import write_whole
from qdqspec._core.options import ValueType, declare, option
from qdqspec._core.registry import did_you_mean
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._source import read_source
from qdqspec.backends.base import PLAIN, BuildOptions, Capabilities, Engine
from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.build import BuiltEngine, TimingOptions, build_plan, load_plan, open_network
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.device import RTX, DeviceState, look
from qdqspec.backends.tensorrt.engine import TensorRt, TensorRtEngine
from qdqspec.backends.tensorrt.layers import kernel_list_hash, parse_layers
from qdqspec.backends.tensorrt.log import Log, open_log, refusals
from qdqspec.backends.tensorrt.run import Execution
from qdqspec.backends.tensorrt_rtx.ops import capabilities
from qdqspec.errors import BackendError
from qdqspec.qdq.lint import named_node
from qdqspec.types import LayerTime

if TYPE_CHECKING:
    import tensorrt as trt

    from qdqspec.graph import Model

# The compute capabilities that version 1.7 builds for ahead of time, as its API names them.
CAPABILITIES = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
DEFAULT = ("SM86", "SM89", "SM120")


def _capabilities(value: object) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(re.split(r"[,\s]+", str(value).strip().upper())))
    if unknown := [name for name in names if name not in CAPABILITIES]:
        near = did_you_mean(unknown[0], CAPABILITIES)
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(CAPABILITIES)}{near}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class RtxOptions(TimingOptions):
    """Options of building and timing."""

    for_: tuple[str, ...] = option(
        ValueType(expects="compute capabilities, separated by commas", read=_capabilities),
        "GPUs that engines are built for, by compute capability. With it they do not run here.",
        (),
        shown=f"the GPU here; without one {','.join(DEFAULT)}",
    )


_NO_EFFECT = (
    "TensorRT for RTX accepts it without an effect (measured with 1.7.1.116)",
    "leave it out: its compiler chooses kernels without timing them",
)
_NOT_BUILT = (
    "TensorRT for RTX has no library for it (libnvinfer_lean), or ignores it (measured with 1.7.1.116)",
    "name the GPUs with tensorrt-rtx.for=SM86,SM89",
)
OPTIONS = declare(
    "tensorrt-rtx",
    RtxOptions,
    refused={
        **dict.fromkeys(
            (
                "opt-level", "workspace", "avg-timing", "max-tactics", "tiling", "tf32", "sparse", "timing-cache",
                "build-route", "aux-streams",
            ),
            _NO_EFFECT,
        ),
        **dict.fromkeys(("version-compatible", "hardware"), _NOT_BUILT),
    },
)  # fmt: skip


def compute_capability(name: str) -> tuple[int, int]:
    """``SM89`` as (8, 9), ``SM120`` as (12, 0)."""
    digits = name.removeprefix("SM")
    return int(digits[:-1]), int(digits[-1])


# ---- the command that repeats a build --------------------------------------------------------------

_FOR = "QDQSPEC_RTX_FOR"  # compute capabilities, separated by commas


def replay_command(model: Model, file: str, options: BuildOptions) -> str:  # noqa: ARG001 - its shapes are in the options
    """The shell command that builds ``file`` for the compute capabilities of a run, with its shapes and plugins."""
    words = OPTIONS.of(options.extra)
    variables = f"{_FOR}={','.join(words.for_ or DEFAULT)} POLYGRAPHY_USE_TENSORRT_RTX=1"
    arguments = ["polygraphy", "convert", file, "--convert-to", "trt", "-o", f"{file}.engine"]
    arguments += ["--trt-config-postprocess-script", f"{__file__}:set_capabilities"]
    for profile in options.profiles:
        for bound in ("min", "opt", "max") if profile.shapes else ():
            dims = ((name, map(str, getattr(shape, bound))) for name, shape in profile.shapes.items())
            arguments += [f"--trt-{bound}-shapes", *(f"{name}:[{','.join(sizes)}]" for name, sizes in dims)]
    arguments += ["--plugins", *map(str, words.plugins)] if words.plugins else []
    return f"{variables} {shlex.join(arguments)}"


def set_capabilities(builder: Any, network: Any, config: Any) -> None:  # noqa: ARG001 - what Polygraphy passes
    """Set the compute capabilities of a build configuration from the environment; Polygraphy calls it."""
    _build_for(config, os.environ[_FOR].split(","))


def _build_for(config: Any, names: Sequence[str]) -> None:
    import tensorrt_rtx as trt

    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)


# ---- builds ----------------------------------------------------------------------------------------

_CANNOT_BUILD = "TensorRT for RTX could not build the model"
_READ_AS_INT8 = "Defaulting to INT8"  # of a warning; the values then differ from those that ONNX defines
_QUOTED = 2  # lines of the log in a refusal
CURRENT = "CURRENT"  # the GPU of this machine, in the API's names of compute capabilities


class Compiled(NamedTuple):
    """An engine for some compute capabilities, the list of its kernels as logged, and the facts of its build."""

    plan: trt.IHostMemory
    kernels: str
    facts: dict[str, Any]


def compile_model(model: Path, options: BuildOptions, log: Log, capabilities: Sequence[str]) -> Compiled:
    """Build a model for compute capabilities.

    Raises `BackendError` with the compiler's words, the node that they name, and the capabilities that refuse.
    """

    def built(names: Sequence[str]) -> Compiled | str:
        """The engine for all of these capabilities, or the compiler's reason for its refusal."""
        log.clear()
        _build_for(config, names)
        plan, facts = build_plan(builder, network, config, log, model)
        if plan is None:
            return " | ".join(log.errors[-_QUOTED:]) or "the compiler gave no reason"
        return Compiled(plan, log.kernels, {**facts, "for": list(names)})

    words = OPTIONS.of(options.extra)
    log.verbose = words.verbose
    with refusals(log, _CANNOT_BUILD, model):
        log.clear()
        builder, network, config = open_network(model, words.plugins, options.profiles, log)
        if any(_READ_AS_INT8 in warning for warning in log.warnings):
            raise BackendError(
                "TensorRT for RTX reads the model's uint8 as int8: values above 127 are clipped",
                where=model,
                cure="quantize to int8; `qdqspec lint --target tensorrt-rtx-1` names the pairs (TRT006)",
            )
        whole = built(capabilities)
        if isinstance(whole, Compiled):
            return whole
        alone = {name: built([name]) for name in capabilities} if len(capabilities) > 1 else {}
    refused = {name: text for name, text in alone.items() if isinstance(text, str)}
    source = read_source(model)
    refusing: dict[str, list[str]] = {}  # capabilities by reason
    for name, text in (refused or {", ".join(capabilities): whole}).items():
        refusing.setdefault(text, []).append(name)
    reasons = []
    for text, names in refusing.items():
        node = named_node(source, text)
        at = f" at node '{node}'" if node else ""
        reasons.append(f"for {', '.join(names)}{at}: {text}")
    cure = "leave the named node in float, or leave the capability out of tensorrt-rtx.for; to repeat: "
    raise BackendError(
        f"TensorRT for RTX refuses the model {' ; '.join(reasons)}",
        where=model,
        cure=cure + replay_command(source, str(model), options),
    )


# ---- the backend and its engines --------------------------------------------------------------------


class TensorRtRtx(TensorRt):
    """NVIDIA TensorRT for RTX, which needs no GPU to build."""

    name = "tensorrt-rtx"
    target = "tensorrt-rtx-1"
    options = OPTIONS
    product = RTX

    def _hardware(self, found: DeviceState, options: BuildOptions) -> str:
        targets = built_for(options)
        return slug_from_text(f"built for {'-'.join(targets)}") if targets else found.slug

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The formats that all requested compute capabilities support, or those of the GPU where engines run."""
        targets = built_for(options)
        wanted = [compute_capability(name) for name in targets] or [look(RTX, options.device).capability]
        return replace(capabilities(wanted), runs=not targets, has_clock=not targets)

    def _built(self, model: Path, options: BuildOptions) -> Engine:
        if built_for(options):
            return CompiledEngine(model, options)
        cuda.select(options.device)
        return RtxEngine(model, options)


def built_for(options: BuildOptions) -> tuple[str, ...]:
    """The compute capabilities that engines are only built for; none if they run on the GPU here."""
    wanted = OPTIONS.of(options.extra).for_
    return wanted or (DEFAULT if look(RTX, options.device).no_gpu else ())


class CompiledEngine:
    """An engine that does not run here: its kernels are known."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        self.model = model
        targets = built_for(options)
        compiled = compile_model(model, options, open_log(), targets)
        self._kernels = compiled.kernels
        self.graph_hash = kernel_list_hash(self._kernels)
        shared = Shared(options.state, f"{RTX.module}-{'-'.join(targets)}".lower())
        shared.record({**compiled.facts, "graph_hash": self.graph_hash})

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:  # noqa: ARG002 - nothing runs
        """The compiled kernels in names of the model without Q/DQ; their times are 0."""
        return parse_layers(self._kernels, model=read_source(self.model))

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Accept inputs, which kernels do not depend on."""

    def close(self) -> None:
        """There is nothing to free."""

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise `BackendError`: it does not run here."""
        raise BackendError(
            "the engine was built for other GPUs than one of this machine, and does not run here",
            where=self.model,
            cure="run it on a machine with the GPU, without tensorrt-rtx.for",
        )

    run = time = refuse


class RtxEngine(TensorRtEngine):
    """An engine on one GPU, built for it. Not tested on a GPU.

    Machine code is compiled where a context is created, not during its first runs (eager specialization), and kept in a
    runtime cache that the builds of one run share. `bind` runs the model until two contexts take equally long.
    """

    def _build(self, model: Path, options: BuildOptions, key: str) -> BuiltEngine:
        import tensorrt as trt

        self._timing = OPTIONS.of(options.extra)
        self._shared = Shared(options.state, key, fresh=options.fresh)
        compiled = compile_model(model, options, self._log, (CURRENT,))
        runtime = trt.Runtime(self._log.logger)
        engine = load_plan(runtime, compiled.plan, self._log, model)
        config = engine.create_runtime_config()
        strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = strategy
        cache = config.create_runtime_cache()
        folder = None if options.fresh else options.state
        self._cache_file = folder and folder / f"{key}.runtime-cache"
        if self._cache_file is not None and self._cache_file.is_file():
            cache.deserialize(self._cache_file.read_bytes())  # one of another driver or GPU is ignored
        config.set_runtime_cache(cache)
        return BuiltEngine(
            engine=engine,
            runtime=runtime,
            runtime_config=config,
            kernels=compiled.kernels,
            facts=compiled.facts,
            notes=self._log.notes,
        )

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs as `TensorRtEngine.bind` does, and warm up until a second context agrees with the first."""
        super().bind(feeds, profile)
        bound = self._bound[profile]
        with closing(self._open(feeds, profile)) as second:
            bound.note = bound.note or self._warmed_up(bound, second)
        if self._cache_file is not None:
            cache = self._require_open().runtime_config.get_runtime_cache()
            write_whole(self._cache_file, bytes(cache.serialize()), what="the runtime cache")

    def _warmed_up(
        self,
        first: Execution,
        second: Execution,
        *,
        runs: int = 20,
        rounds: int = 10,
        agreement: float = 0.02,
    ) -> str:
        """Run two contexts in turns until they agree; the note of samples if they do not within ``rounds``.

        They agree if the medians of their ``runs`` differ by the share ``agreement`` at most: a smaller one makes a
        slow start less likely in samples, and each binding longer.
        """
        apart = 0.0
        for _ in range(rounds):
            times = [cuda.time_runs(self._stream, each.enqueue, runs).device_ms for each in (first, second)]
            medians = [*map(statistics.median, times)]
            apart = max(medians) / max(min(medians), 1e-6) - 1
            if apart <= agreement:
                return ""
        return f"two contexts of the engine differ by {apart:.0%} after {2 * rounds * runs} runs"


backend = TensorRtRtx
