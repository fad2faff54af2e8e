"""Several shape profiles as one objective: the weighted mean for races, and the samples of each profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.records import from_data, to_data
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError
from qdqspec.testing.backends import small_model
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load, as_one, attach, median_sample, merged_layers
from qdqspec.types import LayerTime, Samples
from tests.support.lab import QUIET, REFERENCE, placement

times = st.floats(1e-3, 1e3)


def loads(*shares: float) -> tuple[Load, ...]:
    """The input of the small model, and larger batches of it."""
    return tuple(
        Load(feeds={"x": np.zeros((4**number, 3, 8, 8), np.float32)}, name=f"x {4**number}", share=share)
        for number, share in enumerate(shares)
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(small_model(), path)
    return path


@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=5), st.floats(0.05, 0.95))
def test_the_ratio_of_means_is_the_mean_of_ratios(rows, share):
    """Units and sizes of profiles have no effect: each ratio is weighted by its share."""
    ours = as_one([Samples(wall_ms=tuple(r[i] for r in rows)) for i in (0, 1)], (share, 1 - share))
    theirs = as_one([Samples(wall_ms=tuple(r[i] for r in rows)) for i in (2, 3)], (share, 1 - share))
    for (a, b, c, d), mine, other in zip(rows, ours.wall_ms, theirs.wall_ms, strict=True):
        assert mine / other == pytest.approx((a / c) ** share * (b / d) ** (1 - share))


def test_samples_of_each_profile_are_kept_in_sums_medians_and_files():
    parts = [Samples(wall_ms=(1.0, 2.0, 9.0), cpu_ms=(1.0, 2.0, 9.0)), Samples(wall_ms=(4.0, 5.0, 6.0))]
    taken = as_one(parts, (0.5, 0.5))
    assert taken.cpu_ms == (), "there is no processor time if one profile has none"
    turn = median_sample(taken)
    assert [p.wall_ms for p in turn.profiles] == [(2.0,), (5.0,)]
    total = Samples() + turn + turn
    assert [p.wall_ms for p in total.profiles] == [(2.0, 2.0), (5.0, 5.0)]
    assert len(total.wall_ms) == 2
    both = replace(total, first=turn + turn)
    for samples in (total, both):
        assert from_data(Samples, json.loads(json.dumps(to_data(samples)))) == samples
    assert (both + both).first == turn + turn + turn + turn


def test_layers_of_profiles_are_weighted_as_in_the_objective():
    def layers(conv: float, relu: float) -> tuple[LayerTime, ...]:
        return (
            LayerTime(name="c", op_type="Conv", milliseconds=conv, nodes=("conv",)),
            LayerTime(name="r", op_type="Relu", milliseconds=relu, nodes=("relu",)),
            LayerTime(name="r2", op_type="Relu", milliseconds=relu, nodes=("relu",)),
        )

    found = merged_layers([layers(2.0, 1.0), layers(10.0, 45.0)], (0.75, 0.25))
    whole = 4.0**0.75 * 100.0**0.25
    assert [layer.milliseconds for layer in found] == pytest.approx(
        [whole * (0.75 * 0.5 + 0.25 * 0.1), *[whole * (0.75 * 0.25 + 0.25 * 0.45)] * 2]
    )
    assert merged_layers([(), ()], (0.5, 0.5)) == ()


def test_an_engine_that_cannot_be_bound_is_closed(model: Path, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self))
    engine = FakeDevice().build(model, BuildOptions())
    with pytest.raises(BackendError, match="no value is given"):
        attach(engine, (loads(1.0)[0], Load(feeds={})))
    assert closed == [engine]


def test_a_confirmation_reports_each_profile(model: Path, tmp_path: Path):
    """The quantized model is faster at one size and slower at the other; the result depends on the shares."""
    quantized = tmp_path / "quantized.onnx"
    onnx.save(small_model(quantized=True), quantized)

    def compared(*shares: float):
        bench = Bench(
            FakeDevice(),
            lambda what: quantized if what.sites else model,
            loads(*shares),
            clock="cpu",
            random=np.random.default_rng(0),
            options=BuildOptions(extra={**QUIET, "fake.scale": "1"}),
        )
        return bench.compare({"reference": REFERENCE, "tuned": placement("x")}, rounds=4)

    found = compared(0.9, 0.1)
    small, large = (profile.ratios["tuned"].median for profile in found.profiles)
    assert small != pytest.approx(large)
    assert found.ratios["tuned"].median == pytest.approx(small**0.9 * large**0.1)
    assert compared(0.1, 0.9).ratios["tuned"].median == pytest.approx(small**0.1 * large**0.9)
    assert [(p.name, p.share) for p in found.profiles] == [("x 1", 0.9), ("x 4", 0.1)]
    assert len(found.samples["tuned"].profiles[1].cpu_ms) == 12
    assert all(
        samples.first and len(samples.first.cpu_ms) == 12 for samples in found.samples["tuned"].profiles
    )
    lines = [(line.role, line.at) for line in found.lines()]
    assert lines == [(r, at) for r in ("reference", "tuned") for at in ("", "at x 1 (90%)", "at x 4 (10%)")]
    assert compared(1.0).profiles == ()
