"""Tunes models and times the result against float, full quantization and ONNX Runtime's quantize_static.

    python benchmarks/search.py specs/*.qdq.yaml            # the example specs
    python benchmarks/search.py models/*.onnx --trials 40   # bare models, random inputs
    python benchmarks/search.py --simulated 50              # the simulated device, this number of seeds per row

The finalists of every model are built three times and timed interleaved in one run; ratios are relative to the float
model, with 95 % intervals. `quantize_static` runs with usual settings (pre-processing, uint8 activations, int8 weights
per channel, the same calibration data); its failures are reported.

Processor seconds: engines are separate processes of one thread, whose time is that of their requests; all other time
is that of qdqspec, from loading the model to writing the results.

The true cost of a placement on the simulated device is known, so that claims about winners are compared with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import families
import numpy as np
import onnx
import simulation
from tabulate import tabulate

from qdqspec._core.config import Settings
from qdqspec.app.cases import is_spec, load_cases
from qdqspec.app.evidence.timing import clock_for
from qdqspec.app.session import Session
from qdqspec.app.session.work import CaseWork
from qdqspec.backends.isolation.isolated import IsolatedEngine
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load
from qdqspec.types import Case, Interval, SearchResult

HEADERS = (
    "model", "units", "builds", "search s", "CPU s", "build", "timing", "own", "own %",
    "float ms", "tuned / float", "everything / float", "static / float", "tuned / static",
)  # fmt: skip
SIMULATED = (
    "family", "device", "searches", "units", "builds", "failed", "own CPU s", "alone",
    "claimed", "true", "everything", "best", "claimed / true", "covered", "worse than float",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", type=Path, help="spec files or models")
    parser.add_argument("--trials", type=int, help="search builds, for bare models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--simulated", type=int, default=0, metavar="SEEDS", help="seeds on simulated devices"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what:
            _measure(arguments.what, arguments.trials, arguments.seed, Path(folder))
        if arguments.simulated:
            _simulate(arguments.simulated, arguments.seed, Path(folder))
    return 0


# ---- real runtimes ------------------------------------------------------------------------------


def _measure(paths: list[Path], trials: int | None, seed: int, folder: Path) -> None:
    settings = Settings(output=folder, cache_dir=folder / "cache", seed=seed)
    with closing(Session(settings)) as session:
        for case in _cases(paths, trials, settings):
            print(tabulate([_row(case, session, folder)], HEADERS, floatfmt=".3f"), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spent:
    """Processor seconds of one search by purpose."""

    own: float
    build: float
    timing: float

    @property
    def total(self) -> float:
        return self.own + self.build + self.timing


def _searched(work: CaseWork) -> tuple[SearchResult, _Spent]:
    own, engines, ask = time.process_time(), Counter[str](), IsolatedEngine.ask

    def timed(engine, request, *more, **options):
        started = time.monotonic()
        try:
            return ask(engine, request, *more, **options)
        finally:
            engines[request["do"]] += time.monotonic() - started

    IsolatedEngine.ask = timed
    try:
        result = work.search
    finally:
        IsolatedEngine.ask = ask
    build = engines["build"] + engines["bind"]
    return result, _Spent(own=time.process_time() - own, build=build, timing=engines.total() - build)


def _cases(paths: list[Path], trials: int | None, settings: Settings) -> Iterator[Case]:
    for path in paths:
        if is_spec(path):
            yield from load_cases(path.absolute(), settings)
        else:
            case = Case(id="default", model=path.absolute())
            yield replace(case, tune=replace(case.tune, trials=trials))


def _row(case: Case, session: Session, folder: Path) -> tuple[object, ...]:
    work = session.work(case)
    result, spent = _searched(work)
    static = folder / "static.onnx"
    why_not = _quantize_static(work, static)
    ratios, reference_ms = _ratios(work, session, static if why_not is None else None)
    missing = Interval(median=float("nan"), low=float("nan"), high=float("nan"))
    against = f"{ratios['tuned'].median / ratios['static'].median:.3f}" if "static" in ratios else "win"
    return (
        case.name,
        result.blocks,
        f"{result.total} ({result.failed} failed)",
        *(
            f"{seconds:.1f}"
            for seconds in (result.seconds, spent.total, spent.build, spent.timing, spent.own)
        ),
        f"{100 * spent.own / spent.total:.1f}",
        reference_ms,
        _text(ratios["tuned"]) + (" alone" if result.unchanged else ""),
        _text(ratios.get("everything", missing)),
        _text(ratios["static"]) if "static" in ratios else f"failed: {why_not}"[:60],
        against,
    )


def _ratios(work: CaseWork, session: Session, static: Path | None) -> tuple[dict[str, Interval], float]:
    """The ratios of reference, tuned, everything and static by new builds, timed interleaved."""
    everything = work.prepared.space.resolve(work.prepared.space.everything())
    files = {"reference": work.prepared.case.model, "tuned": work.tuned_path}
    if static is not None:
        files["static"] = static
    if everything.digest != work.search.winner.digest:
        files["everything"] = work.prepared.output / "everything.onnx"
        from qdqspec.graph.storage import save_model
        from qdqspec.qdq.insert import insert_qdq

        inserted = insert_qdq(work.prepared.model, everything, work.prepared.numbers)
        save_model(inserted.proto, files["everything"], base=work.prepared.case.model.parent)
    bench = Bench(
        session.runtime().backend,
        None,
        (Load(feeds=work.prepared.data.sample),),
        clock=clock_for(work.prepared.case.tune, 1),
        random=np.random.default_rng(0),
    )
    measured = bench.compare(files)
    ratios = dict(measured.ratios)
    ratios.setdefault("everything", ratios["tuned"])
    return ratios, measured.median_ms("reference")


def _quantize_static(work: CaseWork, output: Path) -> str | None:
    """Quantize with ONNX Runtime's quantizer; the reason of a failure, or ``None``."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter(work.prepared.data.feeds())

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    prepared = output.with_name("preprocessed.onnx")
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            quant_pre_process(str(work.prepared.case.model), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(output),
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        options = ort.SessionOptions()
        options.log_severity_level = 4
        ort.InferenceSession(str(output), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - any error is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _text(ratio: Interval) -> str:
    return "-" if ratio.median != ratio.median else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


# ---- simulated ----------------------------------------------------------------------------------


def _simulate(seeds: int, first: int, folder: Path) -> None:
    rows = []
    for family in (families.resnet, families.mobilenet, families.transformer):
        path = folder / f"{family.__name__}.onnx"
        onnx.save(family(), path)
        ready = simulation.prepared(Case(id="default", model=path))
        for device, words in simulation.DEVICES.items():
            rows.append(_simulated(ready, device, words, range(first, first + seeds)))
            print(tabulate(rows[-1:], SIMULATED, floatfmt=".3f"), flush=True)


def _simulated(
    ready: simulation.Prepared, device: str, words: Mapping[str, str], seeds: range
) -> tuple[object, ...]:
    outcomes = [simulation.search(ready, words, seed) for seed in seeds]
    changed = [outcome for outcome in outcomes if not outcome.unchanged]
    best = [
        min(outcome.true, simulation.Truth(ready, {**words, "fake.seed": str(seed)}).best())
        for seed, outcome in zip(seeds, outcomes, strict=True)
    ]
    return (
        ready.given.path.stem,
        device,
        len(outcomes),
        len(ready.space.units),
        f"{np.mean([outcome.tuned.result.total for outcome in outcomes]):.0f}",
        f"{np.mean([outcome.tuned.result.failed for outcome in outcomes]):.1f}",
        f"{np.mean([outcome.own_seconds for outcome in outcomes]):.2f}",
        len(outcomes) - len(changed),
        _mean([outcome.claimed.median for outcome in outcomes]),
        _mean([outcome.true for outcome in outcomes]),
        _mean([outcome.everything for outcome in outcomes]),
        _mean(best),
        f"{_mean([outcome.claimed.median / outcome.true for outcome in changed]):.3f}",
        f"{np.mean([outcome.covered for outcome in changed]):.0%}" if changed else "-",
        sum(outcome.true > 1 for outcome in outcomes),
    )


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


if __name__ == "__main__":
    sys.exit(main())
