"""Rehearsals in this process, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime

from qdqspec._core.arrays import Floats
from qdqspec.accuracy.compare import sqnr_db
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.pairs import QuantSource
from qdqspec.types import EXACT_DB, Placement, Site


class Exact:
    """ONNX Runtime without optimization and without prepacking of weights, which changes the order of sums."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BackendError(str(error)) from error
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(feeds)), strict=True))

    def close(self) -> None:
        del self._session


FAST = BuildOptions(extra={"onnxruntime.optimization": "pairs-kept"})
RUNTIME = Runtime(exact=Exact, fast=lambda path: OnnxRuntime().build(path, FAST))


def rehearsal_of(
    model: Model,
    sites: Iterable[Site],
    numbers: QuantSource,
    *feeds: Mapping[str, np.ndarray],
    floating: frozenset[Site] = frozenset(),
    processes: int = 1,
    rounds_biases: frozenset[str] = frozenset(),
) -> Rehearsal:
    """A rehearsal of these sites over these inputs."""
    runtime = replace(RUNTIME, processes=processes)
    more = {"floating": floating, "rounds_biases": rounds_biases}
    return Rehearsal(model, sites, numbers, lambda: iter(feeds), runtime, **more)


def summed_noise(rehearsal: Rehearsal, noise: Floats, placement: Placement) -> float:
    """The noise power over signal power of a placement at its worst guide, if the errors of pairs are independent."""
    numbers = [number for site in placement.ordered for number in rehearsal.switches.numbers(site)]
    return float(noise[numbers].sum(axis=0).max(initial=0.0))


def summed_db(rehearsal: Rehearsal, noise: Floats, placement: Placement) -> float:
    """The SQNR of `summed_noise`."""
    return min(EXACT_DB, sqnr_db(1.0, summed_noise(rehearsal, noise, placement)))


def built_outputs(
    model: Model, placement: Placement, numbers: QuantSource, feed: Mapping[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """The outputs of the model with inserted pairs, run without optimization."""
    path = folder / f"{placement.digest}.onnx"
    base = model.path.parent if model.path else None
    save_model(insert_qdq(model, placement, numbers).proto, path, base=base)
    return Exact(path).run(feed)
