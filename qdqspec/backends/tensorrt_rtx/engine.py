"""The backend `tensorrt-rtx`: engines that are built on any x86-64 machine, and timed where there is a GPU.

Without a GPU, or with option ``for``, an engine has a list of compiled kernels and nothing else: it neither runs nor
is timed. The classes of backend `tensorrt` run and time an engine on a GPU; that part has not been tested on one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from qdqspec._core.arrays import Array
from qdqspec._core.files import write_whole
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._source import read_source
from qdqspec.backends.base import PLAIN, BuildOptions, Capabilities, Engine
from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.build import BuiltEngine
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.device import RTX, DeviceState, look
from qdqspec.backends.tensorrt.engine import TensorRt, TensorRtEngine
from qdqspec.backends.tensorrt.layers import kernel_list_hash, parse_layers
from qdqspec.backends.tensorrt.log import open_log
from qdqspec.backends.tensorrt.run import Execution
from qdqspec.backends.tensorrt_rtx import compiler
from qdqspec.backends.tensorrt_rtx.compiler import CURRENT, OPTIONS
from qdqspec.backends.tensorrt_rtx.ops import capabilities
from qdqspec.errors import BackendError
from qdqspec.types import LayerTime, Samples


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
        wanted = [compiler.compute_capability(name) for name in targets] or [
            look(RTX, options.device).capability
        ]
        return replace(capabilities(wanted), runs=not targets, has_clock=not targets)

    def _built(self, model: Path, options: BuildOptions) -> Engine:
        if built_for(options):
            return CompiledEngine(model, options)
        cuda.select(options.device)
        return RtxEngine(model, options)


def built_for(options: BuildOptions) -> tuple[str, ...]:
    """The compute capabilities that engines are only built for; none if they run on the GPU here."""
    wanted = OPTIONS.of(options.extra).for_
    return wanted or (compiler.DEFAULT if look(RTX, options.device).no_gpu else ())


class CompiledEngine:
    """An engine that does not run here: its kernels are known."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        self.model = model
        targets = built_for(options)
        compiled = compiler.compile_model(model, options, open_log(), targets)
        self._kernels = compiled.kernels
        self.graph_hash = kernel_list_hash(self._kernels)
        shared = Shared(options.state, f"{RTX.module}-{'-'.join(targets)}".lower())
        shared.record({**compiled.facts, "graph_hash": self.graph_hash})

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:  # noqa: ARG002 - nothing runs
        """The compiled kernels in names of the model without Q/DQ; their times are 0."""
        return parse_layers(self._kernels, model=read_source(self.model))

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Accept inputs, which kernels do not depend on."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Raise `BackendError`: it does not run here."""
        del feeds
        self._refuse()

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Raise `BackendError`: it does not run here."""
        del runs, warmup, profile
        self._refuse()

    def close(self) -> None:
        """There is nothing to free."""

    def _refuse(self) -> NoReturn:
        raise BackendError(
            "the engine was built for other GPUs than one of this machine, and does not run here",
            where=self.model,
            cure="run it on a machine with the GPU, without tensorrt-rtx.for",
        )


class RtxEngine(TensorRtEngine):
    """An engine on one GPU, built for it. Not tested on a GPU.

    Machine code is compiled where a context is created, not during its first runs (eager specialization), and kept in a
    runtime cache that the builds of one run share. `bind` runs the model until two contexts take equally long.
    """

    def _build(self, model: Path, options: BuildOptions, key: str) -> BuiltEngine:
        import tensorrt as trt

        self._timing = OPTIONS.of(options.extra)
        self._shared = Shared(options.state, key, fresh=options.fresh)
        compiled = compiler.compile_model(model, options, self._log, (CURRENT,))
        runtime = trt.Runtime(self._log.logger)
        engine = runtime.deserialize_cuda_engine(compiled.plan)
        if engine is None:
            raise self._log.failure("TensorRT for RTX could not load the engine it built", model)
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
