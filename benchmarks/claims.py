"""Compares the speed-up reported by qdqspec with independent measurements of the two models.

    python benchmarks/claims.py RESULTS --models ../real ../models --minutes 1
    python benchmarks/claims.py RESULTS --models ../models --only squeezenet10,super_resolution

A *claim* is the speed-up that a search reports for the selected model: each row runs `qdqspec.tune` with
``--minutes``. If the search leaves the model unchanged or fails, `qdqspec.measure` times it against the model of
`quantize_static`, within some seconds. Then `benchmarks/independent.py` times the same files with plain
`InferenceSession.run` and fresh sessions in two ways: *in a row*, five consecutive runs of one model, and
*alternating*, single runs of the models in turn, so that the caches contain data of another model. Both are measured
once without other load and once beside processes that copy memory, one for every other core. Bars: the median of the
deviations within 3 %, and 95 of 100 independent figures inside the claimed intervals. These are prediction intervals,
which include the noise of an independent figure; their median half-width is printed, since wide intervals prove little.
The table of a run shows the bound that was proved (``at least``): how many independent figures reach it is printed too.

Without other load, the tuned model is also timed against that of `quantize_static`. *Slower than static* is yes if the
interval of their ratio is above 1 and that model has an SQNR of at least 20 dB, the default limit of a search.

A network for super-resolution with seeded weights is generated and measured as well. Time is bounded: each independent
figure has ``--seconds``, `quantize_static` a tenth of ``--limit``; the last column lists shortened measurements. Each
row has a process and a time limit. RESULTS/claims.json stores the rows, from which a run that is started again
continues.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from independent import Interval, compare, outputs, time_models
from onnx import TensorProto, helper, numpy_helper
from pydantic import TypeAdapter
from real_data import RealModel, find_models
from resumed import parser_of, run_limited, run_rows, write_row
from tabulate import tabulate

import qdqspec
from qdqspec import types

WAYS = {"in a row": (6, 5), "alternating": (20, 1)}  # rounds, and consecutive runs of one model
COPIED_BYTES = 48 << 20  # larger than a last-level cache
SQNR_FEEDS = 16  # largest number of evaluation samples
KEEPS_DB = 20.0
STATIC = f"""\
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import quantizers
from independent import feeds_of
from real_data import CALIBRATION
model, data, made = map(Path, sys.argv[1:])
feeds = feeds_of(data, model, CALIBRATION) if sys.argv[2] else []
if why := quantizers.static(model, feeds, made):
    raise SystemExit(why)
"""
HEADS = (
    "model",
    "claim of",
    "load",
    "claimed",
    *WAYS,
    "deviation",
    "inside",
    "over static",
    "slower than static",
    "shortened",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim and the independent figures for each way of measuring, all as reference time over other time."""

    model: str
    load: str
    other: str = ""
    failed: str = ""
    claimed: Interval | None = None
    at_least: float | None = None  # the proved bound, of a search
    measured: dict[str, Interval] | None = None
    over_static: Interval | None = None  # time of the tuned model over that of quantize_static
    static_db: float | None = None
    shortened: str = ""

    @property
    def deviations(self) -> list[float]:
        """The relative deviation of the claim from each independent figure."""
        assert self.claimed is not None
        return [self.claimed.median / found.median - 1 for found in (self.measured or {}).values()]

    @property
    def reached(self) -> list[bool]:
        """Whether each independent figure reaches the proved bound; empty without one."""
        figures = (self.measured or {}).values()
        return [] if self.at_least is None else [found.median >= self.at_least for found in figures]

    @property
    def inside(self) -> list[bool]:
        """Whether the claimed interval contains each independent figure."""
        assert self.claimed is not None
        return [
            self.claimed.low <= found.median <= self.claimed.high for found in (self.measured or {}).values()
        ]

    @property
    def is_slower(self) -> bool:
        """Whether the tuned model is slower than a sufficiently accurate one of quantize_static."""
        keeps = self.static_db is not None and self.static_db >= KEEPS_DB
        return keeps and self.over_static is not None and self.over_static.low > 1


ROWS = TypeAdapter(Row)


def main() -> int:
    """Measure missing rows, print the table, and return 1 if a bar is missed."""
    arguments = _arguments()
    arguments.results.mkdir(parents=True, exist_ok=True)
    models = {model.name: model for model in _models(arguments)}
    if arguments.row is not None:
        row = _row(models[arguments.only[0]], arguments.loads[0], arguments)
        return write_row(arguments.row, ROWS, row)
    wanted = {
        f"{name} {load}": [
            str(arguments.results.absolute()), "--only", name, "--loads", load,
            "--models", *(str(folder.absolute()) for folder in arguments.models),
            "--minutes", str(arguments.minutes), "--seconds", str(arguments.seconds),
            "--limit", str(arguments.limit),
        ]
        for load in arguments.loads
        for name in models
    }  # fmt: skip
    rows = run_rows(
        Path(__file__),
        wanted,
        arguments.results / "claims.json",
        ROWS,
        limit_s=arguments.limit,
        failed=_failed,
        table=_table,
        bound_s=60 * arguments.bound,
    )
    print(_table(rows))
    return _judge(rows)


def _failed(key: str, why: str) -> Row:
    model, _, load = key.rpartition(" ")
    return Row(model=model, load=load, failed=why)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, limit_s=900)
    parser.add_argument("results", type=Path, help="folder of claims.json and the output of tuning")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders of models with data")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each search (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each independent figure (default: 60)"
    )
    parser.add_argument(
        "--bound", type=float, default=math.inf, metavar="MINUTES", help="no row begins later (default: none)"
    )
    parser.add_argument("--loads", nargs="*", default=["none", "memory"], choices=["none", "memory"])
    return parser.parse_args()


def _models(arguments: argparse.Namespace) -> Iterator[RealModel]:
    made = arguments.results / "made"
    made.mkdir(exist_ok=True)
    super_resolution(made / "super_resolution.onnx")
    for model in find_models([*arguments.models, made], arguments.only, arguments.results / "data"):
        if "qdq" not in model.name:  # already quantized
            yield model


def _row(model: RealModel, load: str, arguments: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        static, feed = Path(scratch) / "static.onnx", model.feeds()[0]
        why, shortened = _static(model, static, arguments.limit / 10), []
        if "stopped" in why:
            shortened.append(f"static: {why}")
        with planted(load):
            tuned, claimed, at_least = _searched(
                model, arguments.results / model.name / load, arguments.minutes
            )
            if tuned is None and why:
                return Row(model=model.name, load=load, failed=f"unchanged, and {why}")
            other = static if tuned is None else tuned
            files = {"float": model.path, "other": other}
            if tuned is None:
                claimed = _measured(model, other, Path(scratch))
            elif not why and load == "none":
                files["static"] = static
            measured, over = {}, None
            for way, (rounds, visit) in WAYS.items():
                timing = time_models(files, feed, rounds=rounds, visit=visit, seconds=arguments.seconds)
                measured[way] = timing.ratio("float", "other")
                shortened += [f"{way}: {timing.shortened}"] if timing.shortened else []
                if way == "in a row" and "static" in timing.samples:
                    over = timing.ratio("other", "static")
        return Row(
            model=model.name,
            load=load,
            other="search" if tuned else "measure, static",
            claimed=claimed,
            at_least=at_least,
            measured=measured,
            over_static=over,
            static_db=None if over is None else _sqnr_db(model, static),
            shortened="; ".join(shortened),
        )


def _static(model: RealModel, made: Path, seconds: float) -> str:
    """Create the model of quantize_static in a process with a time limit; the reason if there is none."""
    calibration = "" if model.calibration is None else str(model.calibration)
    why = run_limited([sys.executable, "-c", STATIC, str(model.path), calibration, str(made)], seconds)
    return why or ("" if made.is_file() else "it wrote no model")


def _searched(
    model: RealModel, folder: Path, minutes: float
) -> tuple[Path | None, Interval | None, float | None]:
    """The model selected by a search, its claim and the proved bound; ``None`` if the model is unchanged."""
    data = {"calibration": model.calibration, "evaluation": model.evaluation}
    given = {name: path for name, path in data.items() if path is not None}
    found = qdqspec.tune(model.path, output=folder, minutes=minutes, no_cache=True, **given)
    if found.unchanged:
        return None, None, None
    return found.model, _interval(found.speedup), found.latency.at_least


def _measured(model: RealModel, other: Path, scratch: Path) -> Interval:
    data = {} if model.calibration is None else {"calibration": model.calibration}
    return _interval(
        qdqspec.measure(
            model.path, other, output=scratch / "reports", cache_dir=scratch / "cache", **data
        ).speedup
    )


def _interval(found: types.Interval) -> Interval:
    return Interval(median=found.median, low=found.low, high=found.high)


def _sqnr_db(model: RealModel, static: Path) -> float:
    feeds = model.feeds()[:SQNR_FEEDS]
    return compare(outputs(model.path, feeds), outputs(static, feeds)).sqnr_db


# ---- background load and an additional model ------------------------------------------------------


@contextmanager
def planted(load: str) -> Iterator[None]:
    """Processes that use every other core, its cache and the memory bandwidth while the block runs."""
    count = max(1, (os.cpu_count() or 2) - 1) if load == "memory" else 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_copy_for_ever, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _copy_for_ever() -> None:
    one = np.ones(COPIED_BYTES, np.uint8)
    other = np.empty_like(one)
    while True:
        other[:] = one
        one[:] = other


def super_resolution(path: Path) -> Path:
    """A network with large activations: four convolutions at 224 x 224 and upscaling by three, with seeded weights."""
    random = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "x"
    for number, (taken, made, size) in enumerate([(1, 64, 5), (64, 64, 3), (64, 32, 3), (32, 9, 3)]):
        scale = np.sqrt(2 / (taken * size * size))
        kernel = (scale * random.standard_normal((made, taken, size, size))).astype(np.float32)
        bias = (0.01 * random.standard_normal(made)).astype(np.float32)
        weights += [
            numpy_helper.from_array(kernel, f"w{number}"),
            numpy_helper.from_array(bias, f"b{number}"),
        ]
        names = [tensor, f"w{number}", f"b{number}"]
        nodes.append(helper.make_node("Conv", names, [f"c{number}"], f"conv{number}", pads=[size // 2] * 4))
        tensor = f"c{number}"
        if number < 3:
            nodes.append(helper.make_node("Relu", [tensor], [f"r{number}"], f"relu{number}"))
            tensor = f"r{number}"
    nodes.append(helper.make_node("DepthToSpace", [tensor], ["y"], "upscale", blocksize=3, mode="CRD"))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, side, side])
        for name, side in (("x", 224), ("y", 672))
    ]
    graph = helper.make_graph(nodes, "super_resolution", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


# ---- output -------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> str:
    return tabulate([_cells(row) for row in rows], HEADS, tablefmt="pipe", disable_numparse=True)


def _cells(row: Row) -> tuple[str, ...]:
    if row.claimed is None:
        return (row.model, row.other, row.load, f"failed: {row.failed}"[:60].replace("|", "/"))
    return (
        row.model,
        row.other,
        row.load,
        _text(row.claimed),
        *(_text(found) for found in (row.measured or {}).values()),
        ", ".join(f"{100 * away:+.1f} %" for away in row.deviations),
        ", ".join("yes" if inside else "no" for inside in row.inside),
        _text(row.over_static) if row.over_static else "",
        ("yes" if row.is_slower else "no") if row.over_static else "",
        row.shortened,
    )


def _text(found: Interval) -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _judge(rows: Sequence[Row]) -> int:
    """Print the bars; 1 if one is missed."""
    measured = [row for row in rows if row.claimed is not None]
    away = [abs(each) for row in measured for each in row.deviations]
    inside = [each for row in measured for each in row.inside]
    slower = [row.model for row in measured if row.is_slower]
    middle = float(np.median(away)) if away else 1.0
    widths = [math.log(row.claimed.high / row.claimed.low) / 2 for row in measured if row.claimed]
    share = 100 * sum(inside) / max(1, len(inside))
    reached = [each for row in measured for each in row.reached]
    print(f"\n{sum(inside)} of {len(inside)} inside the claimed interval ({share:.0f} %, bar 95 %)")
    print(f"{sum(reached)} of {len(reached)} reach the proved bound of a search")
    print(f"median deviation {100 * middle:.1f} % (bar 3 %)")
    print(f"median half-width of the claimed intervals {100 * float(np.median(widths or [0])):.1f} %")
    print(f"{len(rows)} rows, {len(rows) - len(measured)} of them failed")
    print(f"slower than quantize_static where that keeps {KEEPS_DB:g} dB: {', '.join(slower) or 'none'}")
    return int(middle > 0.03 or sum(inside) < 0.95 * len(inside) or bool(slower))


if __name__ == "__main__":
    raise SystemExit(main())
