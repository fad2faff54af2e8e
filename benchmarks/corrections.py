"""The effect of corrections at one placement: SQNR on evaluation data without, with each one, and with all of them.

    python benchmarks/corrections.py FOLDER [FOLDER ...] [--names NAME ...] [--corrections auto bits bias ...]
        [--weights per-tensor]

The models are the trained ones of the folders that have data (`real_data.py`; `outlier_models.py` writes models for
equalization). The placements are full quantization, and linear operators only with float outputs. Both are rehearsed
on evaluation samples that were used neither to find nor to evaluate corrections. Printed is the SQNR in dB at the worst
tensor before final operators that saturate, then at the worst output. ``bits+bias`` is two corrections together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
from real_data import RealModel, find_models
from tabulate import tabulate

from qdqspec.accuracy.rehearsal import Rehearsal, RehearsalRefusedError
from qdqspec.app.preparation.correcting import judged_placements
from qdqspec.app.preparation.runtimes import reference_runtime
from qdqspec.app.session import Session
from qdqspec.types import Case, Inputs, QuantizeRules

SAMPLES = 32
HEADS = (
    "model",
    "corrections",
    "applied",
    "everything dB",
    "output dB",
    "linear dB",
    "output dB",
    "gain dB",
    "seconds",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument(
        "--corrections", nargs="*", default=["auto", "equalization", "bits", "bias", "ranges"]
    )
    parser.add_argument("--weights", choices=["per-channel", "per-tensor"], default="per-channel")
    arguments = parser.parse_args()
    rows, gains = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for model in find_models(arguments.folders, arguments.names, Path(scratch)):
            if model.is_random or model.evaluation is None or "qdq" in model.name:
                continue
            try:
                found = list(_measured(model, arguments.corrections, arguments.weights))
            except RehearsalRefusedError as error:
                print(f"{model.name}: {error.what}", flush=True)
                continue
            rows += found
            gains += [row[7] for row in found if row[1] == "auto"]
            print(tabulate(found, HEADS, floatfmt=".1f"), flush=True)
    print("\n" + tabulate(rows, HEADS, floatfmt=".1f"))
    if gains:
        print(
            f"\nauto, everything quantized: median gain {np.median(gains):.1f} dB, smallest {min(gains):.1f} dB"
        )
    return 0


def _measured(model: RealModel, corrections: list[str], weights: str) -> Iterator[list]:
    """A row without corrections, and one for each of the given ones."""
    before = None
    for words in ("none", *corrections):
        with (
            tempfile.TemporaryDirectory() as folder,
            Session(root=Path(folder)) as session,
            ExitStack() as opened,
        ):
            rules = QuantizeRules(
                corrections=words if words in ("none", "auto") else tuple(words.split("+")), weights=weights
            )
            inputs = Inputs(calibration=model.calibration, evaluation=model.evaluation, values=model.values)
            case = Case(id="default", model=model.path, inputs=inputs, quantize=rules)
            bench = session.work(case).prepared
            prepared = bench
            placements = judged_placements(prepared.space)
            started = time.monotonic()
            gains = prepared.corrections.gains
            seconds = time.monotonic() - started
            feeds = list(islice(prepared.data.evaluation, SAMPLES))
            with Rehearsal(
                prepared.model,
                [site for one in placements for site in one.ordered],
                prepared.numbers,
                lambda feeds=feeds: feeds,
                reference_runtime(opened, bench.resources.options, bench.resources.backend),
                samples=SAMPLES,
                rounds_biases=prepared.capabilities.rounds_biases,
            ) as rehearsal:
                errors = [rehearsal.error(placement) for placement in placements]
        before = before or errors
        applied = " ".join(gain.name for gain in gains if gain.taken)
        figures = [value for one in errors for value in (one.guiding_db, one.sqnr_db)]
        figures += [None] * (4 - len(figures))
        gain = errors[0].guiding_db - before[0].guiding_db
        yield [model.name, words, applied, *figures, gain, seconds]


if __name__ == "__main__":
    raise SystemExit(main())
