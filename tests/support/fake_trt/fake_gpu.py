"""A simulated GPU: memory, streams, events and graphs for the fake CUDA and the fake TensorRT.

Work is executed when it is queued. Time is simulated: it advances only while work runs.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

MEMORY_BYTES = 80 << 30


@dataclass
class Gpu:
    is_simulated: ClassVar[bool] = True
    now_ms: float = 0.0
    captures: int = 0  # finished captures
    device: int = 0  # the current device of this process
    blocks: dict[int, Any] = field(default_factory=dict)  # by address
    pending: dict[int, Callable[[], None]] = field(default_factory=dict)  # fill a buffer when it is read
    streams: dict[int, Stream] = field(default_factory=dict)

    def allocate(self, size: int) -> int:
        block = ctypes.create_string_buffer(max(size, 1))
        address = ctypes.addressof(block)
        self.blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]  # a wrong or repeated address is a KeyError: a defect of the caller
        self.pending.pop(address, None)

    def spend(self, milliseconds: float, *, timed: bool) -> float:
        """Work for this time; return it."""
        self.now_ms += milliseconds
        return milliseconds

    def deliver(self, outputs: Mapping[str, int], values: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Have the values of outputs computed when the first of their addresses is read."""

        def compute() -> None:
            for name, value in values().items():
                if name in outputs:
                    self.write(outputs[name], value)
                    self.pending.pop(outputs[name], None)

        self.pending.update(dict.fromkeys(outputs.values(), compute))

    def read(self, address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """The array at an address."""
        block = (ctypes.c_byte * (dtype.itemsize * math.prod(shape))).from_address(address)
        return np.frombuffer(block, dtype).reshape(shape)

    def write(self, address: int, value: np.ndarray) -> None:
        """Copy an array to an address."""
        ctypes.memmove(address, value.ctypes.data, value.nbytes)

    def queue(self, handle: int, work: Callable[[], None]) -> None:
        stream = self.streams[handle]
        if stream.recording is not None:
            stream.recording.append(work)
        else:
            work()


@dataclass
class Stream:
    number: int
    recording: list[Callable[[], None]] | None = None

    def __int__(self) -> int:
        return self.number


gpu = Gpu()


def fault(name: str) -> bool:
    """Whether the test requests this fault."""
    return name in os.environ.get("FAKE_TRT", "").split(",")
