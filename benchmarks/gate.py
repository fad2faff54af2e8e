"""The error rates of the gate on a simulated device: ``python benchmarks/gate.py [SEEDS] [--two-at-a-time]``.

A baseline is measured, then the tuned model is made slower by a known amount and gated as in a real run: three new
builds, and if these do not pass, six with twice the rounds. Bars, at an allowance of 5 %: at most 1 % of unchanged
models fail over 1,000 seeds, at least 95 % of those made 10 % slower do. The noise is that of real machines: 3 %
between runs, 1.2 % between builds, and a drift with an amplitude of 5 %. ``--two-at-a-time``: at most two builds are
open at once, as if memory were insufficient. ``benchmarks/gate_real.py`` does the same once on the real runtime.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqspec.app.evidence.baselines import Conditions, Entry
from qdqspec.app.evidence.regression import CLOSE_BUILDS, CLOSE_ROUNDS, change_from, entry_from
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.fake.engine import OPTIONS, FakeDevice, FakeEngine
from qdqspec.backends.open_engines import HasMemory, has_memory
from qdqspec.checks.kinds.regression import judge_change
from qdqspec.timing.bench import CONFIRM_BUILDS, CONFIRM_ROUNDS, Bench
from qdqspec.timing.race import Load
from qdqspec.types import Placement, Site, TimeChange

NOISE = {"fake.run_noise": "0.03", "fake.build_noise": "0.012", "fake.drift": "0.05"}
LOUD = {"fake.run_noise": "0.06", "fake.build_noise": "0.024", "fake.drift": "0.1"}
SLOWDOWNS = (0.0, 0.03, 0.05, 0.08, 0.10, -0.10)
OUTCOMES = ("pass", "stale", "inconclusive", "fail")
ROLES = {
    "reference": Placement(sites=frozenset()),
    "tuned": Placement(sites=frozenset({Site(tensor="x", consumers=(("conv", 0),), format="uint8")})),
}
FEEDS = {"x": np.zeros((1, 8, 64, 64), np.float32)}


class ScaledDevice(FakeDevice):
    """A simulated device with a factor on the times of each model file, which reads each file once."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[Path, float] = {}

    def build(self, model: Path, options: BuildOptions) -> FakeEngine:
        """A new build with a random deviation and noise."""
        words = OPTIONS.of(options.extra)
        self._builds += 1
        factor = self.factors.get(model, 1.0)
        layers = tuple(replace(layer, milliseconds=layer.milliseconds * factor) for layer in layers_of(model))
        random = np.random.default_rng([words.seed, self._builds])
        return FakeEngine(self, model, words, layers, "", ("x",), random)


@cache
def layers_of(model: Path) -> tuple:
    """The kernels of a model and their times, without noise."""
    return FakeDevice().build(model, BuildOptions(extra={"fake.build_noise": "0"}))._layers  # noqa: SLF001


def no_memory(_engines: Sequence[Engine], _more: int) -> bool:
    """A memory check that never permits another open build."""
    return False


def gate(
    folder: Path,
    seed: int,
    slowdown: float,
    noise: Mapping[str, str],
    allowed: float,
    memory: HasMemory = has_memory,
) -> tuple[str, int]:
    """The outcome and the number of measurements."""
    files = {placement.digest: folder / f"{role}.onnx" for role, placement in ROLES.items()}
    device = ScaledDevice()
    bench = Bench(
        device,
        lambda placement: files[placement.digest],
        (Load(feeds=FEEDS),),
        clock="cpu",
        random=np.random.default_rng(seed),
        options=BuildOptions(extra={**noise, "fake.seed": str(seed)}),
        memory=memory,
    )
    device.factors[folder / "tuned.onnx"] = 0.6
    known = baseline_of(bench)
    device.factors[folder / "tuned.onnx"] = 0.6 * (1 + slowdown)
    change, number = gate_once(bench, known, allowed)
    return judge_change(change, allowed), number


def baseline_of(bench: Bench) -> Entry:
    """The entry that ``--qdq-update`` would write."""
    taken = bench.compare(ROLES, builds=CLOSE_BUILDS, rounds=CLOSE_ROUNDS)
    conditions = Conditions(clock=taken.clock, model_sha256="0" * 64, rules={}, scheme="0", environment={})
    return entry_from(taken, conditions)


def gate_once(bench: Bench, known: Entry, allowed: float) -> tuple[TimeChange, int]:
    """The change that decides a regression check, and the number of measurements."""
    change = change_from(known, bench.compare(ROLES, builds=CONFIRM_BUILDS, rounds=CONFIRM_ROUNDS))
    if judge_change(change, allowed) in ("pass", "stale"):
        return change, 1
    return change_from(known, bench.compare(ROLES, builds=CLOSE_BUILDS, rounds=CLOSE_ROUNDS)), 2


def write_models(folder: Path) -> None:
    """Write a convolution that is large enough for one run per sample, twice under different names."""
    shape = [1, 8, 64, 64]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64, 8, 3, 3], np.zeros(64 * 8 * 9))
    conv = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1, 1, 1, 1])
    graph = helper.make_graph(
        [conv],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64, 64, 64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for role in ROLES:
        onnx.save(model, folder / f"{role}.onnx")


def rates(
    folder: Path,
    seeds: int,
    slowdown: float,
    noise: Mapping[str, str] = NOISE,
    allowed: float = 0.05,
    memory: HasMemory = has_memory,
) -> tuple[Counter[str], float]:
    """The number of each outcome, and the share of runs with two measurements."""
    outcomes: Counter[str] = Counter()
    twice = 0
    for seed in range(seeds):
        outcome, looks = gate(folder, seed, slowdown, noise, allowed, memory)
        outcomes[outcome] += 1
        twice += looks > 1
    return outcomes, twice / seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="?", type=int, default=1000)
    parser.add_argument("--two-at-a-time", action="store_true")
    asked = parser.parse_args()
    seeds, memory = asked.seeds, no_memory if asked.two_at_a_time else has_memory
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        for title, noise in (("the noise of real machines", NOISE), ("twice that noise", LOUD)):
            print(f"\nAllowance 5 %, {seeds} seeds, {title}\n")
            print("| change | pass | pass, stale | inconclusive | fail | looked twice |")
            print("|---|---|---|---|---|---|")
            for slowdown in SLOWDOWNS:
                found, twice = rates(folder, seeds, slowdown, noise, memory=memory)
                shares = " | ".join(f"{100 * found[outcome] / seeds:.1f} %" for outcome in OUTCOMES)
                print(f"| {100 * slowdown:+.0f} % | {shares} | {100 * twice:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
