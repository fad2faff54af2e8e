"""CUDA on any NVIDIA GPU with cuda-bindings; TensorRT is not needed."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest

from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.cuda import CudaError, DeviceBuffer, Gpu, HostBuffer, Stream

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_the_device_is_known(gpu: Gpu):
    assert gpu.name
    assert gpu.capability >= (5, 0)
    free, total = cuda.memory()
    assert 0 < free <= total
    assert 0.9 < total / gpu.memory_bytes < 1.1


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5, 7), (1024, 1024)])
def test_arrays_are_uploaded_and_downloaded_unchanged(gpu: Gpu, shape: tuple[int, ...]):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with ExitStack() as opened:
        stream = opened.enter_context(closing(Stream()))
        ours, back = (opened.enter_context(closing(HostBuffer(values.nbytes))) for _ in range(2))
        theirs = opened.enter_context(closing(DeviceBuffer(values.nbytes)))
        ours.view(values.dtype, shape)[...] = values
        cuda.copy(theirs, ours, stream)
        cuda.copy(back, theirs, stream)
        stream.synchronize()
        assert np.array_equal(back.view(values.dtype, shape), values)


def test_a_captured_copy_runs_only_when_launched(gpu: Gpu):
    with ExitStack() as opened:
        stream = opened.enter_context(closing(Stream()))
        ours, back = (opened.enter_context(closing(HostBuffer(16))) for _ in range(2))
        theirs = opened.enter_context(closing(DeviceBuffer(16)))
        source, target = (buffer.view(np.dtype(np.float32), (4,)) for buffer in (ours, back))
        source[...], target[...] = 1, 0
        cuda.copy(theirs, ours, stream)
        stream.synchronize()
        graph = opened.enter_context(closing(stream.capture(lambda: cuda.copy(back, theirs, stream))))
        stream.synchronize()
        assert not target.any()
        graph.launch(stream)
        stream.synchronize()
        assert target.tolist() == [1, 1, 1, 1]


def test_a_stream_continues_after_a_failed_capture(gpu: Gpu):
    with closing(Stream()) as stream:
        with pytest.raises(CudaError):
            stream.capture(stream.synchronize)  # synchronization cannot be captured
        stream.synchronize()
        assert len(cuda.time_runs(stream, lambda: None, 3).device_ms) == 3


def test_larger_copies_take_longer(gpu: Gpu):
    """Only the order of the times of 1 MiB and 64 MiB is checked, not their values."""
    with ExitStack() as opened:
        stream = opened.enter_context(closing(Stream()))
        medians = []
        for size in (MIB, 64 * MIB):
            ours = opened.enter_context(closing(HostBuffer(size)))
            theirs = opened.enter_context(closing(DeviceBuffer(size)))
            cuda.warm_up(stream, partial(cuda.copy, theirs, ours, stream), 3, 10)
            work = partial(cuda.copy, theirs, ours, stream)
            times = cuda.time_runs(stream, work, 70).device_ms
            assert len(times) == 70
            medians.append(float(np.median(times)))
    assert 0 < medians[0] < medians[1]


def test_allocating_too_much_memory_is_an_error_with_the_name_of_cuda(gpu: Gpu):
    with pytest.raises(CudaError) as caught:
        DeviceBuffer(gpu.memory_bytes * 4)
    assert caught.value.out_of_memory
    with closing(DeviceBuffer(MIB)) as buffer:
        assert buffer.address
