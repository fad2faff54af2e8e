"""The worth of each step of a search: each phase and each correction is left out in turn, beside the whole search.

    python benchmarks/ablation.py FOLDER ... --results DIR [--only NAMES] [--limits 15 20 metric]
        [--seeds 1] [--without compose flip ...] [--other NAME=PYTHON ...] [--minutes M] [--trials N]

For each model with trained weights, limit (dB, or ``metric``: a loss of 1 % of its agreement with float) and seed, all
variants search once, in random order, each in a process of its own. ``--other`` adds a variant: the qdqspec that is
installed for another interpreter, such as an earlier version. Then the selected models of all variants are timed
interleaved by `benchmarks/independent.py`, without code of qdqspec. A step is worth its code if without it the
geometric mean of the times is at least 1 % longer, or the searches cost a tenth more, or a limit is met only with it.

`DIR/rows.json` keeps the rows: a run that is started again continues from them. Markdown is written to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ablation_search import CORRECTIONS, PHASES
from independent import reason_of, time_models
from measured import judged_by
from real_data import RealModel, find_models
from resumed import keep_rows, kept_rows
from tabulate import tabulate

WHOLE = "whole"
LIMIT_S = 900.0  # of one search
SEARCH = Path(__file__).with_name("ablation_search.py")


def main() -> int:
    """Run what is missing, and print the table."""
    arguments = _arguments()
    others = dict(each.split("=", 1) for each in arguments.other)
    variants = [WHOLE, *others, *arguments.without]
    path = arguments.results / "rows.json"
    rows = kept_rows(path)
    with tempfile.TemporaryDirectory() as scratch:
        models = [m for m in find_models(arguments.folders, arguments.only, Path(scratch)) if not m.is_random]
        for seed in range(arguments.seeds):
            for model in models:
                for limit in arguments.limits:
                    if limit == "metric" and not judged_by(model):
                        continue
                    key = f"{model.name} {limit} {seed}"
                    known = rows.get(key, {})
                    if all(variant in known for variant in variants):
                        continue
                    rows[key] = _row(model, limit, seed, variants, others, arguments)
                    keep_rows(path, rows)
                    print(key, json.dumps(rows[key]), file=sys.stderr, flush=True)
    print(_table(rows, variants))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of models with data")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="names, separated by commas"
    )
    parser.add_argument("--limits", nargs="+", default=["15", "20", "30", "metric"], metavar="LIMIT")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[*PHASES, *CORRECTIONS], metavar="STEP[+STEP...]")
    parser.add_argument("--other", nargs="*", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--minutes", type=float, help="time limit of each search")
    parser.add_argument("--trials", type=int, help="builds of each search")
    return parser.parse_args()


def _row(
    model: RealModel,
    limit: str,
    seed: int,
    variants: Sequence[str],
    others: dict[str, str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The result of each variant, and the time of its model over float."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant in random.Random(f"{model.name} {seed}").sample(variants, len(variants)):
            asked = {
                "model": str(model.path), "calibration": str(model.calibration), "evaluation": str(model.evaluation),
                "values": model.values, "limit": limit, "name": model.name, "judged": model.judged,
                "minutes": arguments.minutes, "trials": arguments.trials, "seed": seed, "output": str(folder / variant),
                "without": "" if variant == WHOLE or variant in others else variant,
            }  # fmt: skip
            found[variant] = _searched(others.get(variant, sys.executable), asked)
        files = {variant: Path(each["tuned"]) for variant, each in found.items() if each.get("tuned")}
        same: dict[bytes, str] = {}  # equal files are timed once
        first = {variant: same.setdefault(file.read_bytes(), variant) for variant, file in files.items()}
        timing = time_models(
            {"float": model.path, **{v: files[v] for v in dict.fromkeys(first.values())}}, model.feeds()[0]
        )
        for variant, each in found.items():
            each.pop("tuned", None)
            if why := timing.failures.get(first.get(variant, "")):
                each["failed"] = why
            elif variant in first:
                each["ratio"] = timing.ratio(first[variant], "float").median
    return found


def _searched(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The result of one search in a process of its own."""
    try:
        done = subprocess.run(
            [python, str(SEARCH), json.dumps(asked)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        lines = done.stdout.splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"failed": done.stderr[-300:]}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found = {"failed": reason_of(error)}
    return found


def _table(rows: dict[str, dict[str, dict[str, Any]]], variants: Sequence[str]) -> str:
    """One line a variant, relative to the whole search of the same rows."""
    lines = []
    for variant in variants:
        pairs = [
            (row[variant], row[WHOLE])
            for row in rows.values()
            if variant in row and not row[variant].get("failed") and not row[WHOLE].get("failed")
        ]
        times = [one.get("ratio", 1.0) / whole.get("ratio", 1.0) for one, whole in pairs]
        lost = [one for one, whole in pairs if one["unchanged"] and not whole["unchanged"]]
        won = [one for one, whole in pairs if not one["unchanged"] and whole["unchanged"]]
        failed = sum(bool(row.get(variant, {}).get("failed")) for row in rows.values())
        lines.append(
            [
                variant,
                len(pairs),
                f"{_mean(times):.3f}",
                f"{min(times, default=math.nan):.2f} to {max(times, default=math.nan):.2f}",
                f"{len(lost)}/{len(won)}",
                f"{sum(one['builds'] for one, _ in pairs) / max(1, len(pairs)):.1f}",
                f"{_mean(one['runs'] / whole['runs'] for one, whole in pairs):.2f}",
                f"{_mean(one['cpu_seconds'] / whole['cpu_seconds'] for one, whole in pairs):.2f}",
                failed or "",
            ]
        )
    heads = (
        "without",
        "searches",
        "time",
        "from, to",
        "lost/won",
        "builds",
        "runs of float",
        "CPU time",
        "failed",
    )
    return tabulate(lines, heads, tablefmt="github", disable_numparse=True)


def _mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


if __name__ == "__main__":
    sys.exit(main())
