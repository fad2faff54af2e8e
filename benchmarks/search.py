"""Tunes models and times the result beside float, everything quantized and ONNX Runtime's quantize_static.

    python benchmarks/search.py specs/*.qdq.yaml            # the example specs
    python benchmarks/search.py models/*.onnx --trials 40   # bare models, random inputs

Every model's finalists are built three times afresh and timed interleaved in one run; ratios are to the float
model, with 95 % intervals. `quantize_static` runs as users of ONNX Runtime know it (pre-processing, uint8
activations, int8 weights per channel, the same calibration data); where it fails, that is said.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qdqspec.cases import is_spec, load_cases
from qdqspec.config import Settings
from qdqspec.measure.bench import Bench
from qdqspec.session import Session
from qdqspec.session.tuning import NO_PLACEMENT, clock_for
from qdqspec.session.work import CaseWork
from qdqspec.types import Case, Interval, Placement, Site

HEADERS = (
    "model", "units", "builds", "search s", "own CPU", "float ms", "tuned / float", "everything / float",
    "static / float", "tuned / static",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", type=Path, help="spec files or models")
    parser.add_argument("--trials", type=int, help="search builds, for bare models")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(output=Path(folder), cache_dir=Path(folder) / "cache", seed=arguments.seed)
        with closing(Session(settings)) as session:
            for case in _cases(arguments.what, arguments.trials, settings):
                print(tabulate([_row(case, session, Path(folder))], HEADERS, floatfmt=".3f"), flush=True)
    return 0


def _cases(paths: list[Path], trials: int | None, settings: Settings) -> Iterator[Case]:
    for path in paths:
        if is_spec(path):
            yield from load_cases(path.absolute(), settings)
        else:
            case = Case(id="default", model=path.absolute())
            yield replace(case, tune=replace(case.tune, trials=trials))


def _row(case: Case, session: Session, folder: Path) -> tuple[object, ...]:
    work = session.work(case)
    started = time.process_time()
    result = work.search
    own = time.process_time() - started
    static = folder / "static.onnx"
    why_not = _quantize_static(work, static)
    ratios, reference_ms = _ratios(work, session, static if why_not is None else None)
    missing = Interval(median=float("nan"), low=float("nan"), high=float("nan"))
    against = f"{ratios['tuned'].median / ratios['static'].median:.3f}" if "static" in ratios else "win"
    return (
        case.name,
        result.blocks,
        f"{result.total} ({result.failed} failed)",
        round(result.seconds, 1),
        f"{own:.1f} s",
        reference_ms,
        _text(ratios["tuned"]) + (" alone" if result.left_alone else ""),
        _text(ratios.get("everything", missing)),
        _text(ratios["static"]) if "static" in ratios else f"failed: {why_not}"[:60],
        against,
    )


def _ratios(work: CaseWork, session: Session, static: Path | None) -> tuple[dict[str, Interval], float]:
    """Reference, tuned, everything and static from fresh builds, interleaved."""
    everything = work.bench.prepared.space.resolve(work.bench.prepared.space.everything())
    files = {"reference": work.bench.case.model, "tuned": work.finder.tuned_path}
    if static is not None:
        files["static"] = static
    if everything.digest != work.search.winner.digest:
        files["everything"] = work.bench.output / "everything.onnx"
        from qdqspec.graph.save import save_model
        from qdqspec.placement.insert import insert_qdq

        inserted = insert_qdq(work.bench.prepared.model, everything, work.bench.prepared.numbers)
        save_model(inserted.proto, files["everything"], base=work.bench.case.model.parent)
    stand_ins = {role: NO_PLACEMENT if role == "reference" else _stand_in(role) for role in files}
    paths = {stand_ins[role].digest: path for role, path in files.items()}
    bench = Bench(
        session.backend,
        lambda placement: paths[placement.digest],
        work.bench.prepared.sample,
        clock=clock_for(work.bench.case.tune, 1),
        random=np.random.default_rng(0),
    )
    measured = bench.compare(stand_ins)
    ratios = dict(measured.ratios)
    ratios.setdefault("everything", ratios["tuned"])
    return ratios, measured.median_ms("reference")


def _stand_in(role: str) -> Placement:
    """A placement that is only a name: the file behind it is given."""
    return Placement(sites=frozenset({Site(tensor=role, consumers=(), format="uint8")}))


def _quantize_static(work: CaseWork, output: Path) -> str | None:
    """Quantize as ONNX Runtime does; return why it failed, or ``None``."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter(work.bench.prepared.feeds())

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    prepared = output.with_name("preprocessed.onnx")
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            quant_pre_process(str(work.bench.case.model), str(prepared), skip_symbolic_shape=True)
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
    except Exception as error:  # noqa: BLE001 - whatever it raises is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _text(ratio: Interval) -> str:
    return "-" if ratio.median != ratio.median else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
