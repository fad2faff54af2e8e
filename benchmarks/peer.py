"""Runs the autotuner of NVIDIA's ModelOpt and the search of qdqspec on the same models, and times both results.

    python3 -m venv peer && peer/bin/pip install 'nvidia-modelopt[onnx]'
    peer/bin/pip uninstall -y onnxruntime-gpu && peer/bin/pip install .
    peer/bin/python benchmarks/peer.py model.onnx ... --mode default

The workflow of ModelOpt is unmodified (nvidia-modelopt 0.47), with the schemes per region, warm-up and timed runs of
one of its presets. Two parts that need a GPU are replaced: its benchmark object times each model on ONNX Runtime, one
thread, thread CPU time, median after warm-up; and its ``model_transform`` hook writes the points of each candidate in
the form that ONNX Runtime fuses (uint8 activations with the ranges calibrated by qdqspec, int8 weights per channel).
Points on tensors without an integer kernel in the backend are omitted, which can only improve its result. Its input is
the model with folded constants and batch normalizations. The final models and the float model are built three times and
timed interleaved in one run.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from modelopt.onnx.quantization.autotune import workflows
from modelopt.onnx.quantization.autotune.utils import MODE_PRESETS
from tabulate import tabulate

from qdqspec._core.arrays import Array
from qdqspec._core.config import Settings
from qdqspec.app.evidence.timing import time_files
from qdqspec.app.preparation.files import write_placement
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.graph.fold import fold_constants
from qdqspec.graph.model import Model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import Inserter
from qdqspec.types import NOT_CANDIDATES, Case, Interval, LatencyEvidence, Placement, SearchResult, Site

HEADERS = (
    "model", "ours / float", "builds", "CPU s", "peer / float", "builds", "failed", "CPU s", "ours / peer",
    "our builds to reach it",
)  # fmt: skip
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument(
        "--mode", choices=MODE_PRESETS, default="default", help="the peer's preset (its default: default)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    for path in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            row = _row(path.absolute(), Path(folder), arguments)
        print(tabulate([row], HEADERS, floatfmt=".3f"), flush=True)
    return 0


def _row(path: Path, folder: Path, arguments: argparse.Namespace) -> tuple[object, ...]:
    case = Case(id="default", model=path)
    settings = Settings(output=folder, cache_dir=folder / "cache", seed=arguments.seed)
    ours, result = _counted(lambda: _our_search(case, settings))
    with closing(Session(settings)) as session:
        bench = session.work(case).prepared
        preset = MODE_PRESETS[arguments.mode]
        peer = Peer(bench, folder / "peer", warmup=preset["warmup_runs"], runs=preset["timing_runs"])
        theirs, final = _counted(lambda: peer.search(preset["schemes_per_region"], arguments.seed))
        files = {"reference": path, "tuned": session.work(case).tuned_path, "peer": final}
        files |= _incumbents(bench, result, folder)
        timed = time_files(bench.resources, files, bench.sample, case.tune)
    return (
        path.stem,
        _text(timed.ratios["tuned"]),
        result.total,
        round(ours, 1),
        _text(timed.ratios["peer"]),
        peer.builds,
        peer.failed,
        round(theirs, 1),
        timed.ratios["tuned"].median / timed.ratios["peer"].median,
        _reached(timed),
    )


def _our_search(case: Case, settings: Settings) -> SearchResult:
    with closing(Session(settings)) as session:
        return session.search(case)


def _counted(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process and its finished children, and the result of the work."""
    before = _cpu_seconds()
    found = work()
    return _cpu_seconds() - before, found


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _incumbents(bench: Prepared, result: SearchResult, folder: Path) -> dict[str, Path]:
    """The incumbents of the search of qdqspec by number of build, written again to be timed with the final models."""
    candidates = [trial for trial in result.trials if trial.phase not in NOT_CANDIDATES]
    files = {}
    for number, trial in enumerate(candidates, start=1):
        if trial.incumbent and trial.placement.sites:
            files[str(number)] = folder / f"best{number}.onnx"
            write_placement(bench, trial.placement, files[str(number)])
    return files


def _reached(timed: LatencyEvidence) -> str:
    """The first build of qdqspec that is as fast as the final model of the peer, by times of one run."""
    reached = [
        int(role)
        for role, ratio in timed.ratios.items()
        if role.isdigit() and ratio.median <= timed.ratios["peer"].median
    ]
    return str(min(reached)) if reached else "by the final only"


@dataclass
class Peer:
    """The workflow of ModelOpt on a case, with a count of its builds."""

    bench: Prepared
    folder: Path
    warmup: int
    runs: int
    builds: int = 0
    failed: int = 0
    _sample: dict[str, Array] = field(default_factory=dict)

    def search(self, schemes: int, seed: int) -> Path:
        """Run the workflow; return its final model."""
        import random

        random.seed(seed)
        np.random.seed(seed)
        self.folder.mkdir()
        source = self.folder / "model.onnx"
        save_model(self.folded.proto, source)
        workflows._benchmark_instance = self  # noqa: SLF001 - the only way to replace its benchmark
        workflows.region_pattern_autotuning_workflow(
            str(source), self.folder / "out", num_schemes_per_region=schemes, model_transform=self.written
        )
        return self.folder / "out" / "optimized_final.onnx"

    @cached_property
    def folded(self) -> Model:
        """The model without constant nodes and batch normalizations, so that both searches have the same nodes."""
        return Model(fold_constants(self.bench.model).model.proto)

    @cached_property
    def _inserter(self) -> Inserter:
        return Inserter(self.bench.model, self.bench.numbers)

    @cached_property
    def _weights(self) -> dict[str, Site]:
        space = self.bench.space
        return {site.tensor: site for site in space.resolve(space.everything()).sites if site.weight}

    def written(self, candidate: onnx.ModelProto) -> onnx.ModelProto:
        """The candidate with its points in the form of ONNX Runtime."""
        fitted, _ = import_placement(Model(candidate), self.bench.model).placement_for(self.bench.model)
        sites = (self._shown(site) for site in fitted.sites)
        placement = Placement(sites=frozenset(site for site in sites if site is not None))
        return self._inserter.insert(placement).proto if placement.sites else self.bench.given.proto

    def _shown(self, site: Site) -> Site | None:
        if site.weight:
            known = self._weights.get(site.tensor)
            return known and replace(known, consumers=site.consumers)
        return replace(site, format="uint8", axis=None) if site.tensor in self.bench.space.tensors else None

    def run(
        self,
        path_or_bytes: str | bytes,
        log_file: str | None = None,  # noqa: ARG002 - the interface of the peer
        flush_timing_cache: bool = False,  # noqa: ARG002
    ) -> float:
        """Median milliseconds of a model, on the CPU clock of the thread; infinite if it cannot be run."""
        self.builds += 1
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        sample = self.bench.sample
        try:
            session = ort.InferenceSession(path_or_bytes, options, providers=["CPUExecutionProvider"])
            for _ in range(self.warmup):
                session.run(None, sample)
            return float(np.median([_once(session, sample) for _ in range(self.runs)]))
        except Exception:  # noqa: BLE001 - a model that cannot be run is a result
            self.failed += 1
            return float("inf")


def _once(session: ort.InferenceSession, sample: dict[str, Array]) -> float:
    started = time.thread_time_ns()
    session.run(None, sample)
    return (time.thread_time_ns() - started) / 1e6


def _text(ratio: Interval) -> str:
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
