"""Records as JSON data, and frames of arrays between processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Thread

import numpy as np
import pytest

from qdqspec._core.arrays import FrameStream, WireClosedError
from qdqspec._core.records import from_data, to_data


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    ends: tuple[tuple[str, int], ...] = ()
    share: float = 0.0
    length: int = field(default=0, init=False)


def test_a_record_is_read_back_without_the_fields_that_it_computes() -> None:
    part = Part(name="a", ends=(("x", 1),), share=float("inf"))
    data = json.loads(json.dumps(to_data(part)))
    assert "length" not in data
    assert from_data(Part, data) == part


def test_a_set_is_written_in_a_fixed_order() -> None:
    parts = [Part(name=str(number)) for number in range(50)]
    assert to_data(frozenset(parts)) == to_data(frozenset(reversed(parts)))


def test_an_absent_field_has_its_default_and_an_unknown_one_is_ignored() -> None:
    assert from_data(Part, {"name": "a", "later": 1}) == Part(name="a")


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"name": 1}, "name: "),
        ({"ends": [["x", "1"]]}, "ends.0.1: "),
        ({"ends": [["x", True]]}, "ends.0.1: "),
        ({"ends": "x"}, "ends: "),
    ],
)
def test_a_value_of_another_type_is_an_error_with_its_field(changed: dict, where: str) -> None:
    with pytest.raises(ValueError, match=rf"^{where}"):
        from_data(Part, {"name": "a", **changed})


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
