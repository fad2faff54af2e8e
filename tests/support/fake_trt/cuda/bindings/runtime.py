"""The functions of the CUDA runtime that qdqspec calls; as in the bindings, results are tuples with the error first."""

# ruff: noqa: N801, N802, N815, N816 - the names are CUDA's

from __future__ import annotations

import ctypes
import enum
import time
from types import SimpleNamespace
from typing import Any

from fake_gpu import MEMORY_BYTES, Stream, fault, gpu

cudaStreamNonBlocking = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorDevicesUnavailable = 46
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


BYTES_PER_MS = 25e6  # transfer rate of the bus
Answer = tuple[Any, ...]
OK = cudaError_t.cudaSuccess


def cudaGetErrorString(error: cudaError_t) -> Answer:
    return OK, f"error {error.value} of the fake device".encode()


def cudaGetLastError() -> Answer:
    return (OK,)


def cudaGetDeviceCount() -> Answer:
    return (cudaError_t.cudaErrorNoDevice, None) if fault("no-gpu") else (OK, len(_gpus()))


def cudaSetDevice(device: int) -> Answer:
    if device >= len(_gpus()):
        return (cudaError_t.cudaErrorInvalidDevice,)
    gpu.device = device
    return (OK,)


def cudaGetDeviceProperties(device: int) -> Answer:
    if device >= len(_gpus()):
        return cudaError_t.cudaErrorInvalidDevice, None
    return OK, _gpus()[device]


def _gpus() -> list[SimpleNamespace]:
    """One GPU, or two of different kinds if the test requests them."""
    kinds = [(b"NVIDIA Fake 100", 9, 0), (b"NVIDIA Fake 40", 8, 6)]
    return [
        SimpleNamespace(name=name, major=major, minor=minor, totalGlobalMem=MEMORY_BYTES)
        for name, major, minor in kinds[: 2 if fault("two-gpus") else 1]
    ]


def cudaDeviceGetPCIBusId(length: int, device: int) -> Answer:
    text = f"00000000:0{device + 1}:00.0".encode()[: length - 1]
    return OK, (text + b"\0").ljust(length)  # the whole buffer


def cudaDriverGetVersion() -> Answer:
    return OK, 12080


def cudaRuntimeGetVersion() -> Answer:
    return OK, 12090


def cudaMemGetInfo() -> Answer:
    return OK, MEMORY_BYTES // 2 - sum(map(len, gpu.blocks.values())), MEMORY_BYTES


def cudaStreamCreateWithFlags(flags: int) -> Answer:
    assert flags == cudaStreamNonBlocking
    stream = Stream(len(gpu.streams) + 1)
    gpu.streams[stream.number] = stream
    return OK, stream


def cudaStreamSynchronize(stream: Stream) -> Answer:
    if fault("illegal-address"):
        return (cudaError_t.cudaErrorIllegalAddress,)
    return (OK if stream.recording is None else cudaError_t.cudaErrorInvalidValue,)


def cudaStreamDestroy(stream: Stream) -> Answer:
    del gpu.streams[stream.number]
    return (OK,)


def cudaStreamBeginCapture(stream: Stream, mode: cudaStreamCaptureMode) -> Answer:
    assert mode is cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    stream.recording = []
    return (OK,)


def cudaStreamEndCapture(stream: Stream) -> Answer:
    recorded, stream.recording = stream.recording, None
    gpu.captures += 1
    if fault("no-graph") or (fault("no-graph-at-first") and gpu.captures == 1):
        return cudaError_t.cudaErrorStreamCaptureInvalidated, None
    return OK, recorded


def cudaGraphInstantiate(graph: list[Any], flags: int) -> Answer:
    assert flags == 0
    return OK, tuple(graph)


def cudaGraphDestroy(graph: list[Any]) -> Answer:
    graph.clear()
    return (OK,)


def cudaGraphLaunch(graph: tuple[Any, ...], stream: Stream) -> Answer:
    if fault("slow-launch"):
        time.sleep(2e-3)
    for work in graph:
        gpu.queue(stream.number, work)
    return (OK,)


def cudaGraphExecDestroy(graph: tuple[Any, ...]) -> Answer:
    return (OK,)


def cudaEventCreate() -> Answer:
    return OK, SimpleNamespace(at=None)


def cudaEventRecord(event: SimpleNamespace, stream: Stream) -> Answer:
    def take_place() -> None:
        event.at = gpu.now_ms

    gpu.queue(stream.number, take_place)
    return (OK,)


def cudaEventElapsedTime(start: SimpleNamespace, end: SimpleNamespace) -> Answer:
    return OK, end.at - start.at


def cudaEventDestroy(event: SimpleNamespace) -> Answer:
    event.at = None
    return (OK,)


def cudaMalloc(size: int) -> Answer:
    if fault("no-device-memory") or size > MEMORY_BYTES:
        return cudaError_t.cudaErrorMemoryAllocation, None
    return OK, gpu.allocate(size)


def cudaMallocHost(size: int) -> Answer:
    return OK, gpu.allocate(size)


def cudaFree(address: int) -> Answer:
    gpu.free(address)
    return (OK,)


cudaFreeHost = cudaFree


def cudaMemcpyAsync(target: int, source: int, size: int, kind: cudaMemcpyKind, stream: Stream) -> Answer:
    assert isinstance(kind, cudaMemcpyKind)

    def copy() -> None:
        fill = gpu.pending.pop(source, None)
        if fill is not None:
            fill()
        ctypes.memmove(target, source, size)
        gpu.now_ms += size / BYTES_PER_MS

    gpu.queue(stream.number, copy)
    return (OK,)
