"""Tunes the models of folders and measures the results as users would, compared with ONNX Runtime's quantizers.

    python real_models.py DIR                    # fetches trained models out of public wheels, with data
    python benchmarks/real.py DIR ../models --results results --minutes 0.4 > table.md
    python benchmarks/real.py DIR --results results --only ocr_recognition,file_type --again

Each model with trained weights is tuned with `qdqspec tune MODEL --calibration DATA --evaluation DATA -o FOLDER`,
default settings except `--minutes`; two of them also by a spec file, and from Python. `benchmarks/independent.py`
times float, tuned, `quantize_static` and `quantize_dynamic` (7-bit weights if this CPU saturates) on the first
evaluation sample: plain `InferenceSession.run`, one thread, thread CPU time, new sessions, interleaved rounds. SQNR
against float, and agreement by the measure of the task, are over the evaluation data. The table contains the reason if
a tool fails. Markdown is written to standard output, progress to standard error.

Each row has a separate process and `--limit` seconds, 70 % of them for tuning. `--results DIR` stores `rows.json`, from
which a run that is started again continues, and the output of tuning in `DIR/NAME/VIA`. `benchmarks/real_data.py`
finds the data.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
import quantizers
from measured import Beside, agreement_text, db_text, measure, ratio_text
from pydantic import TypeAdapter
from real_data import RANDOM_WEIGHTS, RealModel, find_models
from resumed import run_limited, run_rows, tuning_parser, words_of, write_row
from tabulate import tabulate

from qdqspec.backends import _cpu
from qdqspec.backends.onnxruntime import ops

ROLES = ("tuned", "static", "dynamic")
LINE, SPEC, PYTHON = "command line", "spec", "Python"
THREE_WAYS = ("file_type", "digits_resnet_b1")  # models that are tuned in three ways
HEADERS = (
    "model", "float ms", "tuned / float", "static / float", "dynamic / float", "SQNR dB: tuned", "static", "dynamic",
    "judged", "tuned", "static", "dynamic", "claimed", "search s", "result",
)  # fmt: skip
CLI = "from qdqspec.app.cli import main; raise SystemExit(main())"
TUNE = """\
import json, sys
from pathlib import Path
from qdqspec import tune
asked = json.loads(sys.argv[1])
tune(asked.pop("model"), output=Path(asked.pop("output")), no_cache=True, **asked)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of tuning. ``claimed`` is the ratio tuned / float that qdqspec reports."""

    failed: str = ""
    unchanged: bool = False
    reason: str = ""
    pairs: int = 0
    claimed: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, tuned in one way. ``failed`` is the reason if there are no figures."""

    name: str
    via: str
    is_random: bool = False
    failed: str = ""
    search: Search = Search()
    beside: Beside | None = None


ROWS = TypeAdapter(Row)


def main() -> int:
    arguments = _arguments()
    if arguments.row is not None:
        (model,) = find_models(arguments.folders, arguments.only, arguments.results / "data")
        return write_row(arguments.row, ROWS, _row(model, arguments))
    with tempfile.TemporaryDirectory() as scratch:
        arguments.results = (arguments.results or Path(scratch)).absolute()
        rows = _rows(arguments)
    print(f"{platform.machine()}, {ops.describe(_cpu.detect())}; ONNX Runtime {onnxruntime.__version__}\n")
    print(_table(rows))
    return 0 if rows else 2


def _rows(arguments: argparse.Namespace) -> list[Row]:
    path = arguments.results / "rows.json"
    wanted = {}
    for model in find_models(arguments.folders, arguments.only, arguments.results / "data"):
        if model.name in RANDOM_WEIGHTS and not (arguments.random or arguments.only):
            continue
        for via in (LINE, SPEC, PYTHON) if arguments.every_way or model.name in THREE_WAYS else (LINE,):
            words = [*words_of(arguments, model.name), "--via", via]
            words += ["--reuse"] if arguments.reuse else []
            wanted[f"{model.name} by {via}"] = [*words, *(["--every-way"] if arguments.every_way else [])]
    if arguments.again:
        path.unlink(missing_ok=True)
    return run_rows(Path(__file__), wanted, path, ROWS, limit_s=arguments.limit, failed=_failed, table=_table)


def _failed(key: str, why: str) -> Row:
    name, _, via = key.partition(" by ")
    return Row(name=name, via=via, failed=why)


def _arguments() -> argparse.Namespace:
    parser = tuning_parser(__doc__, limit_s=300, minutes=0.4)
    parser.add_argument("--random", action="store_true", help="also models with random weights")
    parser.add_argument("--again", action="store_true", help="measure stored rows again")
    parser.add_argument("--reuse", action="store_true", help="do not tune models with stored results")
    parser.add_argument(
        "--every-way",
        action="store_true",
        help="each model on the command line, by a spec and from Python; the results of tuning, without measuring",
    )
    parser.add_argument("--via", default=LINE, help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(model: RealModel, arguments: argparse.Namespace) -> Row:
    """Tune one model in one way and measure the result."""
    folder = arguments.results / model.name / arguments.via.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    search = _searched(model, folder, arguments)
    if arguments.every_way:
        return Row(name=model.name, via=arguments.via, is_random=model.is_random, search=search)
    files, failures = quantized(model, folder)
    if search.failed:
        failures["tuned"] = search.failed
    else:
        files["tuned"] = model.path if search.unchanged else next((folder / "tuned").rglob("tuned.onnx"))
    return Row(
        name=model.name,
        via=arguments.via,
        is_random=model.is_random,
        search=search,
        beside=measure(model, files, failures, seconds=arguments.limit / 6),
    )


def _searched(model: RealModel, folder: Path, arguments: argparse.Namespace) -> Search:
    made = folder / "tuned"
    if not (arguments.reuse and any(made.rglob("result.json"))):
        started = time.monotonic()
        why = run_limited(_command(model, made, arguments), 0.7 * arguments.limit, folder / "terminal.txt")
        (folder / "seconds.txt").write_text(f"{time.monotonic() - started:.1f}")
        if why:
            return Search(failed=why)
    result = json.loads(next(made.rglob("result.json")).read_text())
    speedup, search = result["speedup"], result["search"]
    return Search(
        unchanged=search["unchanged"],
        reason=search["reason"],
        pairs=len(result["placement"]),
        claimed=None if speedup is None else 1 / speedup["median"],
        seconds=float((folder / "seconds.txt").read_text()),
    )


def _command(model: RealModel, made: Path, arguments: argparse.Namespace) -> list[str]:
    """The command that tunes the model into a folder."""
    data = {"calibration": model.calibration, "evaluation": model.evaluation}
    given = {name: str(path) for name, path in data.items() if path is not None}
    if arguments.via == PYTHON:
        asked = {"model": str(model.path), "output": str(made), "minutes": arguments.minutes, **given}
        return [sys.executable, "-c", TUNE, json.dumps(asked)]
    if arguments.via == SPEC:
        return _pytest(model, made, given, arguments.minutes)
    words = [word for name, path in given.items() for word in (f"--{name}", path)]
    tail = ["-o", str(made), "--minutes", str(arguments.minutes), "--no-cache", *words]
    return [sys.executable, "-c", CLI, "tune", str(model.path), *tail]


def _pytest(model: RealModel, made: Path, given: dict[str, str], minutes: float) -> list[str]:
    spec = {
        "qdqspec": 1,
        "model": str(model.path),
        "inputs": given,
        "tune": {"minutes": minutes},
        "checks": [{"kind": "parity", "min_sqnr_db": 20}],
    }
    path = made.parent / f"{model.name}.qdq.yaml"
    path.write_text(json.dumps(spec))  # JSON is YAML
    folders = {str(Path(file).parent) for file in (str(model.path), *given.values())}
    allowed = [f"--qdq-allow-path={folder}" for folder in sorted(folders)]
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={made.parent}",
        f"--qdq-output={made}",
        "--qdq-no-cache",
    ]
    return [sys.executable, "-m", "pytest", *words, *allowed, str(path)]


def quantized(model: RealModel, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The models of ONNX Runtime's quantizers by role, and the reasons for missing ones."""
    if _has_pairs(model.path):
        return {}, dict.fromkeys(("static", "dynamic"), "the model is quantized already")
    why = {
        "static": quantizers.static(model.path, model.calibration_feeds(), folder / "static.onnx"),
        "dynamic": quantizers.dynamic(model.path, folder / "dynamic.onnx"),
    }
    files = {role: folder / f"{role}.onnx" for role, reason in why.items() if not reason}
    return files, {role: reason for role, reason in why.items() if reason}


def _has_pairs(path: Path) -> bool:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return any(node.op_type == "DequantizeLinear" for node in nodes)


# ---- the table ----------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> str:
    return tabulate([_cells(row) for row in rows], HEADERS, tablefmt="pipe", disable_numparse=True)


def _cells(row: Row) -> list[str]:
    beside = row.beside
    models = {} if beside is None else beside.models
    search = row.search
    return [
        f"{row.name}{'' if row.via == LINE else f' ({row.via})'}{' (random inputs)' if row.is_random else ''}",
        "-" if beside is None or beside.float_ms is None else f"{beside.float_ms:.3g}",
        *(ratio_text(models.get(role)) for role in ROLES),
        *(db_text(models.get(role)) for role in ROLES),
        (beside.judged if beside is not None else "") or "-",
        *(agreement_text(models.get(role)) for role in ROLES),
        "-" if search.claimed is None else f"{search.claimed:.3f}",
        f"{search.seconds:.0f}",
        (row.failed or search.failed or _outcome(search)).replace("|", "/"),
    ]


def _outcome(search: Search) -> str:
    return f"unchanged: {search.reason}" if search.unchanged else f"{search.pairs} pairs"


if __name__ == "__main__":
    os.environ.pop("CI", None)  # a run without baselines is no failure
    sys.exit(main())
