"""The fastest model at a given accuracy: qdqspec compared with ONNX Runtime's quantizers, NNCF and AMD Quark.

    python benchmarks/accuracy.py DIR ../models --results results --nncf --quark > table.md
    python benchmarks/accuracy.py DIR ../models --results results --only minilm_l6_s128 --minutes 3
    python benchmarks/accuracy.py ../models --quick

Each model with trained weights is tuned at 15, 20 and 30 dB, and at a drop of 1 % of its metric if it has one (the
share of samples with the result of the float model; of MiniLM, recall at one), by `qdqspec.tune(model,
calibration=..., evaluation=..., min_sqnr_db=...)` or `(..., metric=..., max_drop=0.01)`. Then all models are timed
interleaved with float by `benchmarks/independent.py`, without code of qdqspec: plain `InferenceSession.run`, thread
CPU time. A model of another tool counts at a limit if it meets the limit on the same data. The *best* of the others
is the fastest that does, or float. Geometric means are over models. `--nncf` and `--quark` each install a quantizer
with pip into an environment of its own below `--results` (benchmarks/rivals.py). "First s" is the time from the start
of a search, calibration included, to the first placement that meets the limit and is faster than float in a race, and
"first build" the number of builds to it.

Each model has a separate process and a limit of `--limit` seconds. `--results DIR` stores `accuracy.json` and the
results of each search; a run that is started again continues from them. Markdown is written to standard output,
progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
from independent import reason_of
from measured import Beside, Measured, agreement_text, db_text, judged_by, measure, ratio_text
from metric_limit import DROP, METRIC, metric_options
from pydantic import TypeAdapter
from real import quantized
from real_data import RANDOM_WEIGHTS, RealModel, find_models
from resumed import run_rows, tuning_parser, words_of, write_row
from rivals import RIVALS, Rival
from tabulate import tabulate

from qdqspec import tune
from qdqspec.backends import _cpu
from qdqspec.backends.onnxruntime import ops
from qdqspec.types import NOT_CANDIDATES

PEERS = ("static", "dynamic", *(role for rival in RIVALS for role in rival.configurations))
LIMITS = {"15 dB": 15.0, "20 dB": 20.0, "30 dB": 30.0}
POLL = 0.2  # seconds
QUICK = ("digits_lenet", "digits_resnet_b1")
HEADERS = (
    "model", "limit", "tuned / float", "dB", "agrees", "builds", "first build", "first s", "search s",
    "best other / float", "which", "tuned / best",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search. ``failed`` is the reason if there is no model."""

    failed: str = ""
    unchanged: bool = False
    builds: int = 0
    below: int = 0  # trials with an SQNR below the limit
    seconds: float = 0.0
    first_seconds: float | None = None  # to the first placement that won
    first_build: int | None = None  # of all models built for placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model at all limits: the searches, and all models timed together, tuned ones by their limit."""

    name: str
    failed: str = ""
    searches: Mapping[str, Search]
    beside: Beside | None = None


ROWS = TypeAdapter(Row)


def main() -> int:
    arguments = _arguments()
    if arguments.row is not None:
        (model,) = find_models(arguments.folders, arguments.only, arguments.results / "data")
        return write_row(arguments.row, ROWS, _row(model, arguments))
    with tempfile.TemporaryDirectory() as scratch:
        arguments.results = (arguments.results or Path(scratch)).absolute()
        for rival in _rivals(arguments):
            rival.python(arguments.results)
        rows = _rows(arguments)
    path = f"{platform.machine()}, {ops.describe(_cpu.detect())}"
    print(
        f"Integer path: {path}; ONNX Runtime {onnxruntime.__version__}; {arguments.minutes:g} minutes a search\n"
    )
    print("\n\n".join((_table(rows), _peer_table(rows), _means(rows))))
    return 0 if rows else 2


def _arguments() -> argparse.Namespace:
    parser = tuning_parser(__doc__, limit_s=900, minutes=1)
    for rival in RIVALS:
        parser.add_argument(
            f"--{rival.name}",
            action="store_true",
            help=f"install {rival.packages[0]} with pip and compare with it",
        )
    parser.add_argument(
        "--quick", action="store_true", help=f"only {' and '.join(QUICK)}, .2 minutes a search"
    )
    arguments = parser.parse_args()
    if arguments.quick and arguments.row is None:
        arguments.only, arguments.minutes = list(QUICK), 0.2
    return arguments


def _rivals(arguments: argparse.Namespace) -> list[Rival]:
    return [rival for rival in RIVALS if getattr(arguments, rival.name)]


def _rows(arguments: argparse.Namespace) -> list[Row]:
    wanted = {
        model.name: [*words_of(arguments, model.name), *(f"--{rival.name}" for rival in _rivals(arguments))]
        for model in find_models(arguments.folders, arguments.only, arguments.results / "data")
        if model.name not in RANDOM_WEIGHTS and not model.is_random and "qdq" not in model.name
    }
    return run_rows(
        Path(__file__),
        wanted,
        arguments.results / "accuracy.json",
        ROWS,
        limit_s=arguments.limit,
        failed=lambda name, why: Row(name=name, searches={}, failed=why),
        table=_table,
    )


# ---- one model ------------------------------------------------------------------------------------


def _row(model: RealModel, arguments: argparse.Namespace) -> Row:
    """Tune a model at each limit, quantize it with the other tools, and measure all of them together."""
    folder = arguments.results / model.name
    folder.mkdir(parents=True, exist_ok=True)
    files, failures = quantized(model, folder)
    for rival in _rivals(arguments):
        made, why = rival.quantize(model, arguments.results, folder)
        files |= made
        failures |= why
    searches = {}
    for limit in (*LIMITS, *((METRIC,) if judged_by(model) else ())):
        searches[limit], path = _searched(model, limit, folder, arguments.minutes)
        if path is not None:
            files[limit] = path
    return Row(name=model.name, searches=searches, beside=measure(model, files, failures))


def _searched(model: RealModel, limit: str, folder: Path, minutes: float) -> tuple[Search, Path | None]:
    """The search at a limit, and the selected file; the stored result if the search was run before."""
    kept, tuned = folder / f"{limit}.json", folder / f"{limit}.onnx"
    if not kept.is_file():
        started = time.monotonic()
        try:
            search = _tuned(model, limit, folder / limit, minutes, tuned)
        except Exception as error:  # noqa: BLE001 - the reason is the result
            search = {"failed": reason_of(error)}
        kept.write_text(json.dumps({**search, "seconds": time.monotonic() - started}))
    search_ = TypeAdapter(Search).validate_json(kept.read_text())
    if search_.failed:
        return search_, None
    return search_, model.path if search_.unchanged else tuned


def _tuned(model: RealModel, limit: str, folder: Path, minutes: float, tuned: Path) -> dict[str, Any]:
    asked: dict[str, Any] = {"calibration": model.calibration, "evaluation": model.evaluation}
    if limit == METRIC:
        asked |= metric_options(model, folder.with_suffix(".npz"))
    else:
        asked["min_sqnr_db"] = LIMITS[limit]
    with _first_win(folder) as first:
        result = tune(model.path, minutes=minutes, output=folder, no_cache=True, **asked)
    if not result.unchanged:
        tuned.write_bytes(result.model.read_bytes())
    built = [trial for trial in result.trials if trial.phase not in NOT_CANDIDATES]
    found = [trial.sqnr_db if trial.all_data_db is None else trial.all_data_db for trial in built]
    below = [db for db in found if db is not None and db < LIMITS.get(limit, -math.inf)]
    return {
        "unchanged": result.unchanged,
        "builds": result.search.total,
        "below": len(below),
        "first_seconds": next(iter(first), None),
        "first_build": _first_build(folder),
    }


def _first_build(folder: Path) -> int | None:
    """The number of builds until the first placement that won, failed ones included."""
    number = 0
    for path in folder.glob("*/*/trials.jsonl"):
        for trial in map(json.loads, path.read_text().splitlines()):
            number += bool(trial["scheme"]["sites"])
            if trial["scheme"]["sites"] and trial["incumbent"]:
                return number
    return None


@contextmanager
def _first_win(folder: Path) -> Iterator[list[float]]:
    """The seconds until a journal in a folder has a placement that won, once it has one."""
    found, is_over, started = list[float](), threading.Event(), time.monotonic()

    def look() -> None:
        while not found and not is_over.wait(POLL):
            lines = [
                line for path in folder.glob("*/*/trials.jsonl") for line in path.read_text().splitlines()
            ]
            if any('"incumbent":true' in line for line in lines if '"trial":0,' not in line):
                found.append(time.monotonic() - started)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


# ---- tables ---------------------------------------------------------------------------------------


def _keeps(one: Measured, limit: str, beside: Beside) -> bool:
    """Whether a model meets a limit on the data of its measurement."""
    if limit == METRIC:
        least = (beside.float_agreement or 0.0) - DROP - 1e-9
        return one.agreement is not None and one.agreement >= least
    return one.sqnr_db is not None and one.sqnr_db >= LIMITS[limit]


def _best(beside: Beside, limit: str) -> tuple[str, float]:
    """The fastest model of other tools that meets the limit, or float; and its time relative to float."""
    others = {
        role: one.ratio.median
        for role, one in beside.models.items()
        if role in PEERS and one.ratio is not None and _keeps(one, limit, beside)
    }
    role = min(others, key=others.__getitem__, default="float")
    return ("float", 1.0) if others.get(role, math.inf) >= 1 else (role, others[role])


def _own(row: Row, limit: str) -> float | None:
    """The time of the model tuned at a limit relative to float; ``None`` if not measured or below the limit.

    An unchanged model is float itself: its measured ratio is noise.
    """
    if row.searches[limit].unchanged:
        return 1.0
    one = None if row.beside is None else row.beside.models.get(limit)
    if row.beside is None or one is None or one.ratio is None or not _keeps(one, limit, row.beside):
        return None
    return one.ratio.median


def _table(rows: Sequence[Row]) -> str:
    return tabulate(
        [cells for row in rows for cells in _cells(row)], HEADERS, tablefmt="pipe", disable_numparse=True
    )


def _cells(row: Row) -> list[list[str]]:
    if row.beside is None:
        return [[row.name, "-", f"failed: {row.failed}", *["-"] * (len(HEADERS) - 3)]]
    found = []
    for limit, search in row.searches.items():
        one, (which, best) = row.beside.models.get(limit), _best(row.beside, limit)
        own = _own(row, limit)
        kept = "" if own is not None or one is None else " (below the limit)"
        tuned = f"failed: {search.failed}" if search.failed else ratio_text(one)
        found.append(
            [
                row.name,
                limit,
                "unchanged" if search.unchanged else tuned,
                db_text(one) + kept,
                agreement_text(one),
                f"{search.builds} ({search.below} below)",
                "-" if search.first_build is None else str(search.first_build),
                "-" if search.first_seconds is None else f"{search.first_seconds:.1f}",
                f"{search.seconds:.0f}",
                f"{best:.3f}",
                which,
                "-" if own is None else f"{own / best:.3f}",
            ]
        )
    return found


def _peer_table(rows: Sequence[Row]) -> str:
    """The results of the other tools that ran, which do not depend on a limit."""
    lines = []
    peers = [peer for peer in PEERS if any(row.beside and peer in row.beside.models for row in rows)]
    for row in rows:
        if row.beside is not None:
            found = [row.beside.models.get(role) for role in peers]
            figures = [text for one in found for text in (ratio_text(one), db_text(one), agreement_text(one))]
            float_ms = row.beside.float_ms
            lines.append(
                [row.name, f"{float_ms:.3g}" if float_ms else "-", row.beside.judged or "-", *figures]
            )
    headers = [f"{peer}{what}" for peer in peers for what in (" / float", ", dB", ", agrees")]
    return tabulate(lines, ["model", "float ms", "judged", *headers], tablefmt="pipe", disable_numparse=True)


def _means(rows: Sequence[Row]) -> str:
    """Geometric means over the models, one line per limit; float counts if no tuned model meets the limit."""
    lines = []
    for limit in (*LIMITS, METRIC):
        pairs = [
            (_own(row, limit) or 1.0, _best(row.beside, limit)[1])
            for row in rows
            if row.beside is not None and limit in row.searches
        ]
        if pairs:
            to_float = statistics.geometric_mean([ours for ours, _ in pairs])
            to_best = statistics.geometric_mean([ours / best for ours, best in pairs])
            slower = sum(ours > 1.02 * best for ours, best in pairs)
            lines.append([limit, str(len(pairs)), f"{to_float:.3f}", f"{to_best:.3f}", str(slower)])
    headers = ("limit", "models", "tuned / float, mean", "tuned / best, mean", "slower than the best by 2 %")
    return tabulate(lines, headers, tablefmt="pipe", disable_numparse=True)


if __name__ == "__main__":
    os.environ.pop("CI", None)  # a run without baselines is no failure
    sys.exit(main())
