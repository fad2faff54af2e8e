"""Several formats in one model: on a device of known cost, a search finds the best format of each block."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qdqspec._core.registry import resolve
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.graph.model import load_model
from qdqspec.graph.save import save_model
from qdqspec.qdq.edit.insert import Inserter
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup, Strategy
from qdqspec.types import Placement, QuantizeRules, Trial
from tests.support.fake_times import true_ms

CHANNELS = (32, 48, 64, 40, 80, 56)  # distinct layers, so that the best format differs between them
HALF_AND_HALF = (
    "4",
    "10",
    "13",
)  # devices on which integers are faster for some layers, 8-bit floats for others
NO_NOISE = {"fake.run_noise": "0.03", "fake.wall_noise": "0", "fake.build_noise": "0"}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five consecutive convolutions of different sizes."""
    random, nodes, weights = np.random.default_rng(0), [], []
    for index, (before, after) in enumerate(itertools.pairwise(CHANNELS)):
        weight = random.normal(size=(after, before, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(
            helper.make_node("Conv", [f"x{index}", f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1] * 4)
        )
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"x{index + 1}"], f"relu{index}"))
    nodes.append(helper.make_node("GlobalAveragePool", [f"x{len(CHANNELS) - 1}"], ["y"], "pool"))
    shapes = (("x0", (1, CHANNELS[0], 16, 16)), ("y", (1, CHANNELS[-1], 1, 1)))
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes)
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    path = tmp_path_factory.mktemp("mixed") / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)
    return path


class Device:
    """Builds placements on a simulated device and computes their cost without noise."""

    def __init__(self, model: Path, folder: Path, seed: str, formats: str) -> None:
        loaded = load_model(model)
        self.space = SchemeSpace(loaded, FakeDevice().capabilities(), rules=QuantizeRules(format=formats))
        ranges = {tensor: TensorRange(-1.0, 1.0) for tensor in self.space.tensors}
        self._inserter = Inserter(loaded, Quantizer(loaded, ranges))
        self._words = {"fake.seed": seed}
        self._path = folder / "candidate.onnx"
        self._fake = FakeDevice()
        self._best = float("inf")
        self._reference = self.cost(self.space.resolve({}))

    def cost(self, placement: Placement) -> float:
        self._write(placement)
        return true_ms(self._path, self._words)

    def answer(self, proposal: Proposal, number: int) -> Trial:
        """The trial of a proposal: a race without noise, and a profile with noise."""
        cost = self.cost(proposal.placement)
        engine = self._fake.build(self._path, BuildOptions(extra={**NO_NOISE, **self._words}))
        engine.bind({"x0": np.zeros(1)})
        won = cost < 0.99 * self._best
        self._best = min(self._best, cost)
        return Trial(
            number=number,
            phase=proposal.phase,
            placement=proposal.placement,
            layers=engine.layers(),
            ratio=cost / self._reference,
            incumbent=won,
        )

    def search(self, strategy: str, trials: int) -> list[Trial]:
        make: Callable[..., Strategy] = resolve("strategy", strategy)  # type: ignore[assignment]  # the registry returns object
        asking = make(SearchSetup(space=self.space, clock="cpu", trials=trials), np.random.default_rng(0))
        results: list[Trial] = []
        while len(results) < trials and (proposals := asking.ask()):
            answer = self.answer(proposals[0], len(results))
            results.append(answer)
            asking.tell([answer])
        return results

    def truth(self) -> tuple[float, dict[str, str]]:
        """The lowest ratio to the float time of all labellings, and that labelling."""
        choices = itertools.product(*(unit.labels for unit in self.space.units))
        labelled = (dict(zip(self.space.by_id, choice, strict=True)) for choice in choices)
        best = min(labelled, key=lambda labels: self.cost(self.space.resolve(labels)))
        return self.cost(self.space.resolve(best)) / self._reference, best

    def _write(self, placement: Placement) -> None:
        save_model(self._inserter.insert(placement).parts, self._path)


@pytest.mark.parametrize("seed", HALF_AND_HALF)
def test_the_default_search_finds_the_best_format_of_each_block(
    chain: Path, tmp_path: Path, seed: str
) -> None:
    device = Device(chain, tmp_path, seed, "int8+fp8")
    least, best_labels = device.truth()
    assert 2 <= list(best_labels.values()).count("fp8:in+out") <= 3  # both formats are needed
    trials = device.search("attribution", 24)
    found = min(trials, key=lambda trial: trial.ratio or 9)
    assert found.ratio == pytest.approx(least, rel=0.01)
    assert {site.format for site in found.placement.sites} == {"uint8", "int8", "fp8"}
    pure = [trial.ratio or 9 for trial in trials if trial.phase == "pure"]
    assert found.ratio < 0.97 * min(pure)


@pytest.mark.parametrize("strategy", ["region", "subgraph", "exhaustive"])
def test_every_strategy_mixes_formats_where_that_is_fastest(
    chain: Path, tmp_path: Path, strategy: str
) -> None:
    device = Device(chain, tmp_path, HALF_AND_HALF[0], "int8+fp8")
    trials = device.search(strategy, 250)
    best = min(trials, key=lambda trial: trial.ratio or 9)
    labels = {label for _, label in best.placement.labels}
    assert labels == {"in+out", "fp8:in+out"}


def test_a_second_format_needs_few_additional_builds(chain: Path, tmp_path: Path) -> None:
    builds = {
        formats: len(Device(chain, tmp_path, "4", formats).search("attribution", 100))
        for formats in ("int8", "int8+fp8")
    }
    assert builds["int8+fp8"] <= builds["int8"] + 30
