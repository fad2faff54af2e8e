"""CUDA through ``cuda.bindings.runtime``: streams, events, graphs, memory.

Independent of TensorRT; runs on any NVIDIA GPU. The bindings are imported inside functions, and no import
initializes the device, because a process that has initialized CUDA cannot be forked.
Every failure is a `CudaError` with CUDA's own name for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec.backends._engine import import_library
from qdqspec.errors import BackendError

INSTALL = "pip install 'qdqspec[tensorrt]'"
_IN_FLIGHT = 64  # runs that are queued before their times are read: the device never waits for the host
_OUT_OF_MEMORY = "cudaErrorMemoryAllocation"
_CURES = {
    _OUT_OF_MEMORY: "free memory on the GPU, or take a smaller batch",
    "cudaErrorNoDevice": "check that nvidia-smi lists a GPU, and CUDA_VISIBLE_DEVICES",
    "cudaErrorInsufficientDriver": "update the NVIDIA driver, or install the packages for a driver of CUDA 12: "
    "pip install 'qdqspec[tensorrt-cu12]'",
    "cudaErrorDevicesUnavailable": "another process holds the GPU in compute mode EXCLUSIVE_PROCESS: engines that are "
    "compared are open in two processes; set it with nvidia-smi --compute-mode=DEFAULT",
    "cudaErrorInitializationError": "CUDA was initialized before this process was forked",
}


class CudaError(BackendError):
    """A CUDA call failed. ``name`` is CUDA's name of the error: ``cudaErrorMemoryAllocation``."""

    def __init__(self, function: str, name: str, text: str) -> None:
        self.name = name
        super().__init__(f"{function} failed: {name} ({text})", cure=_CURES.get(name))

    @property
    def out_of_memory(self) -> bool:
        """Whether device memory ran out."""
        return self.name == _OUT_OF_MEMORY


def runtime() -> Any:
    """The module of the package cuda-bindings. Raises `BackendUnavailableError` if it is not installed."""
    return import_library("cuda.bindings.runtime", INSTALL, "cuda-bindings")


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime by name and return its result; raise `CudaError` if it fails."""
    cuda = runtime()
    error, *values = getattr(cuda, function)(*arguments)
    if error != cuda.cudaError_t.cudaSuccess:
        text = cuda.cudaGetErrorString(error)[1]
        raise CudaError(function, error.name, _text(text))
    return values[0] if len(values) == 1 else tuple(values)


# ---- devices ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, and the CUDA versions of its driver and of the bindings, such as ``12.8``."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    driver: str
    runtime: str


def count_devices() -> int:
    """The number of GPUs that this process may use. Initializes CUDA."""
    return int(call("cudaGetDeviceCount"))


def describe(index: int = 0) -> Gpu:
    """The properties of a GPU. Initializes CUDA."""
    properties = call("cudaGetDeviceProperties", index)
    return Gpu(
        name=_text(properties.name),
        capability=(int(properties.major), int(properties.minor)),
        memory_bytes=int(properties.totalGlobalMem),
        driver=_version(call("cudaDriverGetVersion")),
        runtime=_version(call("cudaRuntimeGetVersion")),
    )


def bus_id(index: int = 0) -> str:
    """The PCI address of a GPU, which identifies it for nvidia-smi. Initializes CUDA."""
    return _text(call("cudaDeviceGetPCIBusId", 32, index))


def select(index: int) -> None:
    """Select the GPU that this process uses."""
    call("cudaSetDevice", index)


def memory() -> tuple[int, int]:
    """Free and total bytes of the GPU in use."""
    free, total = call("cudaMemGetInfo")
    return int(free), int(total)


def _text(value: bytes | str) -> str:
    """The text of a string of C, which ends at its first null byte, whatever follows in its buffer."""
    if isinstance(value, str):
        return value.partition("\0")[0]
    return value.partition(b"\0")[0].decode()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# ---- streams, events, graphs --------------------------------------------------------------------


class _Owned:
    """A resource of CUDA, and the function that frees it."""

    _freed_by: ClassVar[str]
    raw: Any

    def close(self) -> None:
        """Free the resource; closing twice has no effect."""
        raw, self.raw = self.raw, None
        if raw is not None:
            _free(self._freed_by, raw)


class Stream(_Owned):
    """A separate queue of work, which does not wait for the default stream."""

    _freed_by = "cudaStreamDestroy"

    def __init__(self) -> None:
        self.raw = call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking)

    @property
    def handle(self) -> int:
        """The address of the stream, as libraries expect it."""
        return int(self.raw)

    def synchronize(self) -> None:
        """Wait until all work is done; errors of that work are raised here."""
        call("cudaStreamSynchronize", self.raw)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture the work that ``work`` enqueues on this stream, without running it.

        If it cannot be captured, the exception of ``work`` or a `CudaError` is raised, and the stream stays usable.
        """
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self.raw, mode)
        try:
            work()
        except BaseException:
            with contextlib.suppress(CudaError):
                call("cudaGraphDestroy", call("cudaStreamEndCapture", self.raw))
            runtime().cudaGetLastError()
            raise
        try:
            return Graph(call("cudaStreamEndCapture", self.raw))
        except CudaError:
            runtime().cudaGetLastError()  # otherwise the next call would report this error
            raise


class Graph(_Owned):
    """Captured work that is launched as one unit. Takes ownership of the captured graph it is made from."""

    _freed_by = "cudaGraphExecDestroy"

    def __init__(self, captured: Any) -> None:
        try:
            self.raw = call("cudaGraphInstantiate", captured, 0)
        finally:
            _free("cudaGraphDestroy", captured)

    def launch(self, stream: Stream) -> None:
        """Enqueue the graph on a stream."""
        call("cudaGraphLaunch", self.raw, stream.raw)


class Event(_Owned):
    """A point in time on a stream."""

    _freed_by = "cudaEventDestroy"

    def __init__(self) -> None:
        self.raw = call("cudaEventCreate")

    def record(self, stream: Stream) -> None:
        """Enqueue the event; it occurs when the work queued so far is done."""
        call("cudaEventRecord", self.raw, stream.raw)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds between two events that have occurred, with a resolution of about half a microsecond."""
        return float(call("cudaEventElapsedTime", since.raw, self.raw))


class RunTimes(NamedTuple):
    """Milliseconds of runs: on the device, and on the host to enqueue each."""

    device_ms: tuple[float, ...]
    host_ms: tuple[float, ...]


def time_runs(stream: Stream, work: Callable[[], None], runs: int) -> RunTimes:
    """Time each run of ``work`` on the device, between two events on the stream, and on the host.

    Runs are enqueued one after the other, so that launches by the host are not part of the times as long as a launch
    is shorter than a run; if the queue runs empty, the launch is part of the time between the events.
    """
    times, host = list[float](), list[float]()
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(contextlib.closing(Event())) for _ in range(2 * min(runs, _IN_FLIGHT))]
        pairs = list(zip(made[::2], made[1::2], strict=True))
        while len(times) < runs:
            batch = pairs[: runs - len(times)]
            for start, stop in batch:
                began = time.perf_counter()
                start.record(stream)
                work()
                stop.record(stream)
                host.append(1e3 * (time.perf_counter() - began))
            stream.synchronize()
            times.extend(stop.elapsed_ms(start) for start, stop in batch)
    return RunTimes(tuple(times), tuple(host))


def warm_up(stream: Stream, work: Callable[[], None], runs: int, milliseconds: float) -> int:
    """Run ``work`` at least ``runs`` times and for ``milliseconds``; return the number of runs.

    A GPU raises its clocks after a time, not after a number of runs.
    """
    start, done = time.perf_counter(), 0
    while done < runs or 1e3 * (time.perf_counter() - start) < milliseconds:
        work()
        done += 1
        stream.synchronize()
    return done


# ---- memory -------------------------------------------------------------------------------------


class _Buffer(_Owned):
    """Bytes at an address; at least one, since libraries reject a null address."""

    _made_by: ClassVar[str]

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.raw = int(call(self._made_by, max(size_bytes, 1)))

    @property
    def address(self) -> int:
        """The address; 0 once the memory is freed."""
        return self.raw or 0


class DeviceBuffer(_Buffer):
    """Bytes on the GPU."""

    _made_by, _freed_by = "cudaMalloc", "cudaFree"


class HostBuffer(_Buffer):
    """Page-locked bytes in main memory, for direct copies to and from the GPU."""

    _made_by, _freed_by = "cudaMallocHost", "cudaFreeHost"

    def view(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        """The memory as an array, without a copy. It must not be used after `close`."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size > self.size_bytes:
            raise ValueError(f"{size} bytes do not fit into {self.size_bytes}")
        memory = (ctypes.c_byte * max(size, 1)).from_address(self.address)
        return np.ndarray(shape, dtype=dtype, buffer=memoryview(memory))


def copy(target: _Buffer, source: _Buffer, stream: Stream) -> None:
    """Enqueue a copy to or from the GPU, of as many bytes as both have."""
    kinds = runtime().cudaMemcpyKind
    is_upload = isinstance(source, HostBuffer)
    direction = kinds.cudaMemcpyHostToDevice if is_upload else kinds.cudaMemcpyDeviceToHost
    if size_bytes := min(target.size_bytes, source.size_bytes):
        call("cudaMemcpyAsync", target.address, source.address, size_bytes, direction, stream.raw)


def _free(function: str, raw: Any) -> None:
    """Free a resource. After a device error every call fails, and nothing remains to be freed."""
    with contextlib.suppress(CudaError):
        call(function, raw)
