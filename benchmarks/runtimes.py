"""Tunes models on several runtimes and times all of them together: ``python benchmarks/runtimes.py OUT FOLDER ...``.

Prints a row for each model and runtime: float and tuned model relative to the fastest float model, timed interleaved,
and full quantization relative to the float model of the same runtime, from the search on it. Then the bars:

- ``tuned``: on no runtime except the first, the tuned model is slower than its float model, or than full quantization
  if a trial showed that this meets the accuracy limit (the whole interval is above).
- ``chosen``: the winner is within 3 % of the best when `qdqspec compare` times all models once more (the lower bound
  is below 1.03).
- ``wall``: a search takes at most 3 times as long as on the first runtime.

The models are those of folders, with the data of `real_data`. A model with results in OUT is not measured again, so
that an interrupted run continues. The load average before and after is recorded with each model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_data import RealModel, find_models

LOAD, AGAIN = "load.json", "again.json"
NEAR, SLOWER = 1.03, 3.0  # limits relative to the best runtime, and to the search on the first runtime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--backends", default="onnxruntime,openvino")
    parser.add_argument("--minutes", help="time of each search (default: that of the preset)")
    parser.add_argument("--preset", default="quick")
    arguments = parser.parse_intermixed_args()
    names = [name for name in arguments.only.split(",") if name]
    for model in find_models(arguments.folders, names, arguments.out / "data"):
        if model.calibration is not None:
            measure(model, arguments)
    print("| model | runtime, model | over the fastest float | everything / own float | search s | |")
    print("|---|---|---|---|---|---|")
    folders = sorted(path.parent for path in arguments.out.glob("*/tune.json"))
    for folder in folders:
        print("\n".join(rows(folder)))
    for folder in folders:
        print("\n".join(bars(folder, arguments.backends.split(","))))


def measure(model: RealModel, arguments: argparse.Namespace) -> None:
    """Tune a model on all backends and time the results once more, unless there are results."""
    folder = arguments.out / model.name
    if not (folder / "tune.json").exists():
        before = os.getloadavg()
        words = ["tune", str(model.path), "--backend", arguments.backends, "-o", str(folder)]
        words += ["--preset", arguments.preset]
        words += ["--minutes", arguments.minutes] if arguments.minutes else []
        words += ["--calibration", str(model.calibration), "--evaluation", str(model.evaluation)]
        for name, value in model.values.items():
            words += ["--values", f"{name}:{value}"]
        run(words)
        if folder.is_dir():
            (folder / LOAD).write_text(json.dumps({"before": before, "after": os.getloadavg()}))
    if (folder / "tune.json").exists() and not (folder / AGAIN).exists():
        results = [str(folder / backend) for backend in arguments.backends.split(",")]
        again = run(["compare", *results, "--json"])
        (folder / AGAIN).write_text(again or "null")


def run(words: list[str]) -> str:
    """Run a verb and return its output; empty if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "qdqspec", *words], check=False, stdout=subprocess.PIPE, text=True
    )
    print(f"qdqspec {' '.join(words)}: {done.returncode}", file=sys.stderr)
    return done.stdout if done.returncode == 0 else ""


def rows(folder: Path) -> Iterator[str]:
    """The rows of a model, as cells of a Markdown table."""
    (found,) = json.loads((folder / "tune.json").read_text())["runtimes"]
    for model in found["models"]:
        result, ratio = result_of(folder, model["backend"]), model["ratio"]
        figures = f"not timed: {model['failure']}" if ratio is None else interval(ratio)
        label = f"{model['backend']} {model['model']}"
        marks = [word for word in ("reference", "winner") if found[word] == label]
        whole = everything(result) if model["model"] == "float" else None
        cells = [folder.name, label, figures, "" if whole is None else interval(whole)]
        cells.append(f"{result['search']['seconds']:.0f}" if model["model"] == "float" else "")
        yield "| " + " | ".join([*cells, " ".join(marks)]) + " |"


def bars(folder: Path, backends: list[str]) -> Iterator[str]:
    """A line for each bar of a model; the first word is the verdict."""
    first, *others = [result_of(folder, backend) for backend in backends]
    for result in others:
        tuned, whole = (result["latency"] or {}).get("ratios", {}).get("tuned"), everything(result)
        if tuned is not None:
            limits = [1.0] + ([whole["high"]] if whole is not None and is_accurate(folder, result) else [])
            yield verdict(
                tuned["low"] <= min(limits), f"{folder.name}: tuned on {result['backend']}", interval(tuned)
            )
        slower = result["search"]["seconds"] / first["search"]["seconds"]
        yield verdict(
            slower <= SLOWER, f"{folder.name}: wall of the search on {result['backend']}", f"{slower:.2f}"
        )
    again = json.loads((folder / AGAIN).read_text()) if (folder / AGAIN).exists() else None
    if again is not None:
        (found,) = json.loads((folder / "tune.json").read_text())["runtimes"]
        (later,) = again["runtimes"]
        timed = {f"{m['backend']} {m['model']}": m["to_winner"] for m in later["models"] if m["to_winner"]}
        near = timed[found["winner"]]
        figures = f"{interval(near)} of {later['winner']}"
        yield verdict(near["low"] <= NEAR, f"{folder.name}: chosen {found['winner']}", figures)
    if (folder / LOAD).exists():
        load = json.loads((folder / LOAD).read_text())
        yield f"load average of {folder.name}: {load['before'][0]:.1f} before, {load['after'][0]:.1f} after"


def verdict(holds: bool, what: str, figure: str) -> str:
    return f"{'holds' if holds else 'MISSED'}: {what}: {figure}"


def result_of(folder: Path, backend: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / backend / "result.json").read_text())
    return found


def everything(result: dict[str, Any]) -> dict[str, float] | None:
    """The ratio of full quantization to the float model of the runtime, which may be that of the winner."""
    found: dict[str, float] | None = (result["latency"] or {}).get("ratios", {}).get("everything")
    return found


def is_accurate(folder: Path, result: dict[str, Any]) -> bool:
    """Whether a trial of the search measured that full quantization meets the SQNR limit."""
    floor = result["search"]["limits"]["min_sqnr_db"]
    journal = (folder / result["backend"] / "trials.jsonl").read_text().splitlines()
    trials = [trial for trial in map(json.loads, journal) if "phase" in trial]
    whole = {trial["placement"] for trial in trials if trial.get("role") == "everything"}
    known = [t["sqnr_db"] for t in trials if t["placement"] in whole and t.get("sqnr_db") is not None]
    return bool(known) and (floor is None or max(known) >= floor)


def interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


if __name__ == "__main__":
    main()
