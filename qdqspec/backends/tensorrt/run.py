"""Runs a TensorRT engine: buffers, streams, CUDA graphs, per-layer profiles.

Every set of input shapes gets a separate execution context, with its buffers and its stream: on the
default stream TensorRT synchronizes more often than necessary.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqspec._core.arrays import Array, Shape
from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.build import BuiltEngine, choose_profile
from qdqspec.backends.tensorrt.log import Log, refusals
from qdqspec.errors import BackendError

if TYPE_CHECKING:
    import tensorrt as trt

_CANNOT_RUN = "the model could not be run"

# TensorRT's name of an element type, and numpy's. `trt.nptype` has none for the last two.
_NUMPY = {
    "FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32", "BOOL": "bool", "UINT8": "uint8",
    "INT64": "int64", "BF16": "bfloat16", "FP8": "float8_e4m3fn",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An input or output of an engine."""

    name: str
    dtype: np.dtype[np.generic]
    shape: Shape  # -1 where it is not known yet
    is_input: bool


def ports_of(engine: trt.ICudaEngine) -> tuple[Port, ...]:
    """The inputs and outputs of an engine, in its order; raises `BackendError` for packed elements."""
    import ml_dtypes  # types that are not part of numpy
    import tensorrt as trt

    ports = []
    for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
        dtype = engine.get_tensor_dtype(name).name
        if dtype not in _NUMPY:
            raise BackendError(
                f"tensor '{name}' has elements of type {dtype}, which cannot be exchanged with numpy",
                cure="end the model with a type that numpy knows",
            )
        port = Port(
            name=name,
            dtype=np.dtype(getattr(ml_dtypes, _NUMPY[dtype], _NUMPY[dtype])),
            shape=tuple(engine.get_tensor_shape(name)),
            is_input=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        )
        ports.append(port)
    return tuple(ports)


class Execution:
    """One execution context with inputs on the device, ready for repeated runs.

    ``profile`` is the optimization profile to run with; by default the first that accepts the shapes of the inputs.
    """

    def __init__(
        self,
        built: BuiltEngine,
        ports: tuple[Port, ...],
        feeds: Mapping[str, Array],
        stream: cuda.Stream,
        log: Log,
        model: Path,
        *,
        profile: int | None = None,
    ) -> None:
        self.feeds = dict(feeds)
        self.graph: cuda.Graph | None = None  # the run, once it is captured
        self.note = ""  # why its times may be unreliable
        self._stream = stream
        self._log = log
        self._model = model
        self._inputs = tuple(port for port in ports if port.is_input)
        self._outputs = tuple(port for port in ports if not port.is_input)
        self._device: dict[str, cuda.DeviceBuffer] = {}
        self._host: dict[str, cuda.HostBuffer] = {}
        self._allocators: dict[str, Any] = {}
        self.context: trt.IExecutionContext | None = None
        self._check(feeds)
        values = {port.name: np.asarray(feeds[port.name], order="C") for port in self._inputs}
        try:
            with refusals(log, _CANNOT_RUN, model):
                self._open(built, values, profile)
        except BaseException:
            self.close()
            raise

    def _check(self, feeds: Mapping[str, Array]) -> None:
        """Raise `BackendError` with an input that is missing or of another type or rank. Types are never converted."""
        for port in self._inputs:
            if port.name not in feeds:
                raise BackendError(f"no value is given for input '{port.name}'", where=self._model)
            value = feeds[port.name]
            if value.dtype != port.dtype or value.ndim != len(port.shape):
                raise BackendError(
                    f"input '{port.name}' takes {port.dtype} of rank {len(port.shape)}, not {value.dtype} of rank "
                    f"{value.ndim}",
                    where=self._model,
                    cure="feed arrays of the model's types and ranks",
                )

    def feed(self, feeds: Mapping[str, Array]) -> bool:
        """Copy other values of the same shapes to the device; nothing is copied, and false returned, for others."""
        self._check(feeds)
        if any(feeds[port.name].shape != self.feeds[port.name].shape for port in self._inputs):
            return False
        for port in self._inputs:
            staged = self._host[port.name]
            staged.view(port.dtype, feeds[port.name].shape)[...] = feeds[port.name]
            cuda.copy(self._device[port.name], staged, self._stream)
        self._stream.synchronize()
        return True

    def launch(self) -> None:
        """Enqueue one run on the stream, as a CUDA graph if it was captured."""
        if self.graph is None:
            self.enqueue()
        else:
            self.graph.launch(self._stream)

    def enqueue(self) -> None:
        """Enqueue one run on the stream."""
        assert self.context is not None
        if not self.context.execute_async_v3(self._stream.handle):
            raise self._log.failure(_CANNOT_RUN, self._model)

    def fetch(self) -> dict[str, Array]:
        """Run once and copy the outputs to main memory."""
        self.settle()
        with refusals(self._log, _CANNOT_RUN, self._model):
            return {port.name: self._fetched(port) for port in self._outputs}

    def settle(self) -> None:
        """Run once before a capture: errors occur here, and TensorRT's lazy initialization is not part of the graph."""
        with refusals(self._log, _CANNOT_RUN, self._model):
            self.enqueue()
            self._stream.synchronize()

    def capture(self) -> str:
        """Capture the run as a CUDA graph, after a run; returns the reason if it cannot be captured.

        Loops, conditionals and data-dependent shapes cannot be captured. There is a second attempt for other reasons.
        """
        why = ""
        for _ in range(2):
            self.settle()
            if self._allocators:  # the size of an output is known only during a run
                return f"the shape of output {', '.join(self._allocators)} depends on data"
            try:
                self.graph = self._stream.capture(self.enqueue)
                return ""
            except BackendError as error:
                if isinstance(error, cuda.CudaError) and error.out_of_memory:
                    raise
                why = error.what
        return why

    def profile(self, warmup: int, runs: int) -> list[dict[str, Any]]:
        """Mean milliseconds of every layer in order of execution, as trtexec exports them; names may repeat.

        The sum exceeds a run without profiling.
        """
        assert self.context is not None
        profiler = _profiler_type()()
        with refusals(self._log, "the model could not be profiled", self._model):
            self.context.profiler = profiler
            for number in range(warmup + runs):
                if number == warmup:
                    profiler.runs.clear()
                profiler.runs.append([])
                self.enqueue()
                self._stream.synchronize()
        names = [name for name, _ in profiler.runs[-1]] if profiler.runs else []
        # runs of another length had a branch that was not executed
        alike = [run for run in profiler.runs if [name for name, _ in run] == names]
        means = (statistics.fmean(run[position][1] for run in alike) for position in range(len(names)))
        return [{"name": name, "averageMs": mean} for name, mean in zip(names, means, strict=True)]

    def close(self) -> None:
        """Free graph, context and buffers; closing twice has no effect."""
        if self.graph is not None:
            self.graph.close()
        self.context = None
        every: tuple[dict[str, Any], ...] = (self._allocators, self._device, self._host)
        for opened in every:
            for each in opened.values():
                each.close()
            opened.clear()

    # ---- opening --------------------------------------------------------------------------------

    def _open(self, built: BuiltEngine, feeds: Mapping[str, Array], profile: int | None) -> None:
        import tensorrt as trt

        shapes = {name: value.shape for name, value in feeds.items()}
        index = choose_profile(built.engine, shapes, self._model, only=profile)
        create, config = built.engine.create_execution_context, built.runtime_config
        context = create() if config is None else create(config)
        if context is None:
            raise self._log.failure("TensorRT could not prepare the engine to run", self._model)
        self.context = context
        context.nvtx_verbosity = trt.ProfilingVerbosity.NONE  # profiler annotations cost time on every launch
        self._require(context.set_optimization_profile_async(index, self._stream.handle), "its shapes")
        for port in self._inputs:
            value = feeds[port.name]
            self._host[port.name] = cuda.HostBuffer(value.nbytes)
            self._device[port.name] = cuda.DeviceBuffer(value.nbytes)
            address = self._device[port.name].address
            named = f"input '{port.name}'"
            self._require(context.set_input_shape(port.name, value.shape), f"the shape of {named}")
            self._require(context.set_tensor_address(port.name, address), f"the address of {named}")
        self.feed(feeds)
        if unknown := context.infer_shapes():
            raise BackendError(f"the shapes of {', '.join(unknown)} are not known", where=self._model)
        for port in self._outputs:
            shape = tuple(context.get_tensor_shape(port.name))
            if -1 in shape:
                allocator = self._allocators[port.name] = _allocator_type()()
                self._require(context.set_output_allocator(port.name, allocator), f"memory for '{port.name}'")
                continue
            size = port.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._host[port.name] = cuda.HostBuffer(size)
            self._device[port.name] = cuda.DeviceBuffer(size)
            address = self._device[port.name].address
            self._require(context.set_tensor_address(port.name, address), f"output '{port.name}'")

    def _require(self, done: bool, what: str) -> None:
        if not done:
            raise self._log.failure(f"TensorRT refused {what}", self._model)

    def _fetched(self, port: Port) -> Array:
        assert self.context is not None
        with contextlib.ExitStack() as opened:
            if (allocator := self._allocators.get(port.name)) is None:
                shape = tuple(self.context.get_tensor_shape(port.name))
                source, staged = self._device[port.name], self._host[port.name]
            else:
                source, shape = allocator.buffer, allocator.shape
                size = port.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
                staged = opened.enter_context(contextlib.closing(cuda.HostBuffer(size)))
            if staged.size_bytes:
                cuda.copy(staged, source, self._stream)
                self._stream.synchronize()
            return np.array(staged.view(port.dtype, shape))


@cache
def _profiler_type() -> type:
    import tensorrt as trt

    class Profiler(trt.IProfiler):  # type: ignore[misc]  # TensorRT ships no types
        """Collects the time of every layer of every run."""

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.runs: list[list[tuple[str, float]]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.runs[-1].append((layer_name, float(ms)))

    return Profiler


@cache
def _allocator_type() -> type:
    import tensorrt as trt

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]  # TensorRT ships no types
        """Allocates memory for an output whose size is known only during a run."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.buffer: cuda.DeviceBuffer | None = None
            self.shape: Shape = ()

        def reallocate_output_async(
            self,
            tensor_name: str,  # noqa: ARG002 - there is an allocator for every output
            memory: int,  # noqa: ARG002 - it is the buffer's own
            size: int,
            alignment: int,  # noqa: ARG002 - CUDA aligns to 256 bytes, more than is ever asked for
            stream: int,  # noqa: ARG002 - memory is taken at once
        ) -> int:
            if self.buffer is None or self.buffer.size_bytes < size:
                self.close()
                try:
                    self.buffer = cuda.DeviceBuffer(size)
                except cuda.CudaError:
                    return 0  # TensorRT's value for no memory; an exception must not propagate through it
            return self.buffer.address

        def notify_shape(self, tensor_name: str, shape: trt.Dims) -> None:  # noqa: ARG002 - as above
            self.shape = tuple(shape)

        def close(self) -> None:
            if self.buffer is not None:
                self.buffer.close()

    return Allocator
