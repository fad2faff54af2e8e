"""Frames of the protocol between processes: arrays of all sizes, several frames, closed streams and time limits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from qdqspec._core.wire import FrameStream, WireClosedError


@pytest.fixture
def ends() -> Iterator[tuple[FrameStream, FrameStream]]:
    one, other = (FrameStream(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_frames_of_any_size_arrive_unchanged(ends: tuple[FrameStream, FrameStream]) -> None:
    sender, receiver = ends
    random = np.random.default_rng(0)
    shapes = [(), (0, 3), (5,), (1 << 15,), (3,), (300, 300), (2, 2), (1, 1 << 14), (1,)]
    sent = {str(i): random.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    frames = [({"frame": 0}, sent), ({"frame": 1}, {}), ({"frame": 2}, dict(reversed(sent.items())))]

    def send() -> None:
        for header, arrays in frames:
            sender.send(header, arrays)

    thread = Thread(target=send)
    thread.start()
    for header, arrays in frames:
        found, values = receiver.receive(10)
        assert found["frame"] == header["frame"]
        assert list(values) == list(arrays)
        for name, value in values.items():
            np.testing.assert_array_equal(value, arrays[name])
    thread.join()


def test_receiving_from_a_closed_stream_is_an_error(ends: tuple[FrameStream, FrameStream]) -> None:
    sender, receiver = ends
    sender.send({}, {"x": np.zeros(4)})
    sender.close()
    assert receiver.receive(10)[1]["x"].tolist() == [0, 0, 0, 0]
    with pytest.raises(WireClosedError):
        receiver.receive(10)


def test_receiving_without_a_frame_times_out(ends: tuple[FrameStream, FrameStream]) -> None:
    with pytest.raises(TimeoutError):
        ends[1].receive(0.05)
