"""Engines that are compared run on one processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqspec.backends.base import BuildOptions
from qdqspec.measure._processor import chosen
from qdqspec.measure.isolate import Isolated
from qdqspec.testing.backends import small_model

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system does not keep processes on processors"
)


def system(folder: Path, speeds: Mapping[int, str], name: str = "cpufreq/cpuinfo_max_freq") -> Path:
    for number, speed in speeds.items():
        file = folder / f"cpu{number}" / name
        file.parent.mkdir(parents=True)
        file.write_text(speed)
    return folder


@pytest.mark.parametrize(
    ("speeds", "usable", "expected"),
    [
        ({}, {0, 1, 2, 3}, 3),
        ({}, {5}, 5),
        ({0: "5000\n", 1: "5000\n", 2: "3800\n", 3: "3800\n"}, {0, 1, 2, 3}, 1),  # the others save power
        ({0: "5000", 1: "5000", 2: "3800"}, {0, 2}, 0),
        ({0: "not a number", 1: ""}, {0, 1}, 1),
    ],
)
@pytest.mark.parametrize("name", ["cpufreq/cpuinfo_max_freq", "cpu_capacity"])
def test_the_last_of_the_fastest_is_chosen(
    tmp_path: Path, speeds: dict[int, str], usable: set[int], expected: int, name: str
) -> None:
    assert chosen(usable, system(tmp_path, speeds, name)) == expected


@needs_affinity
@pytest.mark.parametrize(
    ("backend", "threads", "count"),
    [("onnxruntime", 1, 1), ("onnxruntime", 2, None), ("fake", 1, None)],
    ids=["one thread", "several threads", "no processor of ours"],
)
def test_engines_of_one_thread_share_a_processor(
    tmp_path: Path, backend: str, threads: int, count: int | None
) -> None:
    """From when they are built; builds may use all, and other engines do."""
    model = tmp_path / "model.onnx"
    onnx.save(small_model(), model)
    with Isolated(backend) as isolated:
        engines = [isolated.build(model, BuildOptions(threads=threads)) for _ in range(2)]
        for engine in engines:
            engine.bind({"x": np.zeros((1, 3, 8, 8), np.float32)})
        assert all(engine.time(2).wall_ms for engine in engines)
        found = [frozenset(os.sched_getaffinity(engine._child.pid)) for engine in engines]
    assert found[0] == found[1]
    assert len(found[0]) == (count or len(os.sched_getaffinity(0)))
