"""Frames of the protocol between processes: arrays of all sizes, several frames at once, ends and limits of time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from qdqspec.wire import FrameStream, WireClosedError


@pytest.fixture
def ends() -> Iterator[tuple[FrameStream, FrameStream]]:
    one, other = (FrameStream(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_frames_arrive_as_sent_whatever_the_sizes(ends: tuple[FrameStream, FrameStream]) -> None:
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


def test_an_end_within_a_frame_and_before_one_is_noticed(ends: tuple[FrameStream, FrameStream]) -> None:
    sender, receiver = ends
    sender.send({}, {"x": np.zeros(4)})
    sender.close()
    assert receiver.receive(10)[1]["x"].tolist() == [0, 0, 0, 0]
    with pytest.raises(WireClosedError):
        receiver.receive(10)


def test_a_frame_that_does_not_come_ends_with_the_time(ends: tuple[FrameStream, FrameStream]) -> None:
    with pytest.raises(TimeoutError):
        ends[1].receive(0.05)
