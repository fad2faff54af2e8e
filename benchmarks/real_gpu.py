"""The GPU of this machine in place of the simulated one: kernels that take the times of the cost model.

Work is enqueued on streams and can be captured. A layer is one kernel of dependent multiplications on every
multiprocessor: its time follows the clock of the GPU as that of real kernels does. Outputs are computed on the CPU
outside captures; a run copies them to the device. Addresses and streams are those of CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np

from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.cuda import Event, HostBuffer

ROUNDS_PER_MS = 25_000  # of 16 multiplications, at about 1.9 GHz; constant: equal layers take equal time
BLOCKS, THREADS = 132, 128
_BODY = "fma.rn.f32 %value, %value, %factor, %factor;\n" * 16
_PTX = f"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spend(.param .u64 rounds, .param .u64 sink)
{{
.reg .pred %more; .reg .f32 %value, %factor; .reg .u64 %left, %to;
ld.param.u64 %left, [rounds];
ld.param.u64 %to, [sink];
mov.f32 %value, 0f3F800000;
mov.f32 %factor, 0f3F000000;
again:
{_BODY}
sub.u64 %left, %left, 1;
setp.ne.u64 %more, %left, 0;
@%more bra again;
cvta.to.global.u64 %to, %to;
st.global.f32 [%to], %value;
ret;
}}
"""


class _Streams:
    """All streams: CUDA itself refuses a wrong handle."""

    def __contains__(self, handle: int) -> bool:
        return handle != 0


class _Blocks:
    """Memory that the GPU can access."""

    def __contains__(self, address: int) -> bool:
        kinds = cuda.runtime().cudaMemoryType
        kind = cuda.call("cudaPointerGetAttributes", address).type
        return kind in (kinds.cudaMemoryTypeDevice, kinds.cudaMemoryTypeHost)


class Gpu:
    """Enqueues the work of the fake TensorRT on a stream of CUDA."""

    is_simulated = False
    streams = _Streams()
    blocks = _Blocks()

    def __init__(self) -> None:
        self._stream = 0
        self._staged: dict[int, HostBuffer] = {}  # by the address of the output

    def queue(self, handle: int, work: Callable[[], None]) -> None:
        """Enqueue work on a stream."""
        self._stream = handle
        work()

    def spend(self, milliseconds: float, *, timed: bool) -> float:
        """Enqueue a kernel; with ``timed`` wait for it. Return the milliseconds that it took or will take."""
        if not timed:
            self._launch(milliseconds)
            return milliseconds
        with closing(Event()) as before, closing(Event()) as after:
            cuda.call("cudaEventRecord", before.raw, self._stream)
            self._launch(milliseconds)
            cuda.call("cudaEventRecord", after.raw, self._stream)
            cuda.call("cudaStreamSynchronize", self._stream)
            return after.elapsed_ms(before)

    def deliver(self, outputs: Mapping[str, int], values: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Enqueue copies of the outputs. During a capture they are those of the run before."""
        if not self._is_capturing():
            cuda.call("cudaStreamSynchronize", self._stream)
            for name, value in values().items():
                if name in outputs:
                    self._stage(outputs[name], value)
        kind = cuda.runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        for address in outputs.values():
            staged = self._staged[address]
            cuda.call("cudaMemcpyAsync", address, staged.address, staged.size_bytes, kind, self._stream)

    def read(self, address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """A copy of the array at an address."""
        found = np.empty(shape, dtype)
        kind = cuda.runtime().cudaMemcpyKind.cudaMemcpyDefault
        cuda.call("cudaMemcpy", found.ctypes.data, address, found.nbytes, kind)
        return found

    def write(self, address: int, value: np.ndarray) -> None:
        """Copy an array to an address."""
        kind = cuda.runtime().cudaMemcpyKind.cudaMemcpyDefault
        cuda.call("cudaMemcpy", address, value.ctypes.data, value.nbytes, kind)

    def _stage(self, address: int, value: np.ndarray) -> None:
        staged = self._staged.get(address)
        if staged is None or staged.size_bytes != value.nbytes:
            staged = self._staged[address] = HostBuffer(value.nbytes)
        staged.view(value.dtype, value.shape)[...] = value

    def _is_capturing(self) -> bool:
        cudart = cuda.runtime()
        status = cuda.call("cudaStreamIsCapturing", self._stream)
        return bool(status != cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone)

    def _launch(self, milliseconds: float) -> None:
        from cuda.bindings import driver

        rounds = max(1, round(milliseconds * ROUNDS_PER_MS))
        arguments = ((rounds, _sink().address), (ctypes.c_uint64, ctypes.c_uint64))
        (error,) = driver.cuLaunchKernel(
            _kernel(), BLOCKS, 1, 1, THREADS, 1, 1, 0, self._stream, arguments, 0
        )
        assert error == driver.CUresult.CUDA_SUCCESS, error


@cache
def _kernel() -> Any:
    from cuda.bindings import driver

    _sink()  # initializes the context that the driver's functions use
    error, module = driver.cuModuleLoadData(_PTX.encode() + b"\0")
    assert error == driver.CUresult.CUDA_SUCCESS, error
    error, kernel = driver.cuModuleGetFunction(module, b"spend")
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return kernel


@cache
def _sink() -> cuda.DeviceBuffer:
    return cuda.DeviceBuffer(4)


gpu = Gpu()
