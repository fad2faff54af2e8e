"""Tunes models on several runtimes and times all of them together: ``python benchmarks/runtimes.py OUT MODEL ...``.

Prints a row for each model: the float and tuned model of each runtime over the fastest float model, timed interleaved,
and the time of everything quantized over each runtime's own float model, from that runtime's search. Inputs are random
unless a file ``MODEL.npz`` is beside the model. A model whose results are in OUT is not measured again, so that an
interrupted run goes on. The load average before and after is recorded with each model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOAD = "load.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--backends", default="onnxruntime,openvino")
    parser.add_argument("--trials", help="builds of each search (default: as the preset)")
    parser.add_argument("--preset", default="quick")
    arguments = parser.parse_args()
    for model in arguments.models:
        measure(model, arguments)
    for folder in sorted(path.parent for path in arguments.out.glob("*/tune.json")):
        print("\n".join(rows(folder)))


def measure(model: Path, arguments: argparse.Namespace) -> None:
    """Tune a model on all backends, unless its results are there."""
    folder = arguments.out / model.stem
    if (folder / "tune.json").exists():
        return
    before = os.getloadavg()
    words = [
        "tune",
        str(model),
        "--backend",
        arguments.backends,
        "-o",
        str(folder),
        "--preset",
        arguments.preset,
    ]
    words += ["--trials", arguments.trials] if arguments.trials else []
    data = model.with_suffix(".npz")
    words += ["--calibration", str(data)] if data.exists() else []
    subprocess.run([sys.executable, "-m", "qdqspec", *words], check=False, stdout=sys.stderr)
    if folder.is_dir():
        (folder / LOAD).write_text(json.dumps({"before": before, "after": os.getloadavg()}))


def rows(folder: Path) -> list[str]:
    """A model's lines, as cells of a Markdown table."""
    (found,) = json.loads((folder / "tune.json").read_text())["runtimes"]
    load = json.loads((folder / LOAD).read_text()) if (folder / LOAD).exists() else {}
    lines = []
    for model in found["models"]:
        label = f"{model['target']} {model['model']}"
        ratio = model["ratio"]
        figures = f"not timed: {model['failure']}" if ratio is None else interval(ratio)
        marks = [
            word for word in ("reference", "winner") if found[word] == f"{model['backend']} {model['model']}"
        ]
        cells = [folder.name, label, figures, everything(folder, model), " ".join(marks)]
        lines.append("| " + " | ".join(cells) + " |")
    if load:
        lines.append(f"load average {load['before'][0]:.1f} before, {load['after'][0]:.1f} after")
    return lines


def everything(folder: Path, model: dict[str, Any]) -> str:
    """Everything quantized over the runtime's own float model, in the row of that."""
    result = json.loads((folder / model["case"].partition("::")[2] / "result.json").read_text())
    ratio = (result["latency"] or {}).get("ratios", {}).get("everything")
    return "" if ratio is None or model["model"] == "tuned" else f"everything {interval(ratio)}"


def interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


if __name__ == "__main__":
    main()
