"""Tunes the models of folders and measures the results as their users would, beside ONNX Runtime's own quantizers.

    python real_models.py DIR                    # fetches trained models out of public wheels, with data
    python benchmarks/real.py DIR ../models --results results --markdown table.md
    python benchmarks/real.py DIR --names ocr_recognition,file_type --minutes 1
    python benchmarks/real.py DIR --results results --reuse     # measures again what was tuned before

Each model is tuned with `qdqspec tune MODEL --calibration DATA -o FOLDER`, default settings but for `--minutes`. Then
`benchmarks/independent.py` times float, tuned, `quantize_static` and `quantize_dynamic` (7-bit weights where this CPU
saturates) on the first evaluation sample: plain `InferenceSession.run`, one thread, thread CPU time, fresh sessions,
interleaved rounds. SQNR and cosine against float, and agreement in the terms of the task, are over the evaluation
data. A tool that fails has its reason in the table.

With `--results DIR`, `DIR/NAME/` keeps what `tune -o` leaves (`tuned/`), `static.onnx`, `dynamic.onnx` and `row.json`
with the claimed and the measured figures. The data of each model is found by `benchmarks/real_data.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import quantizers
from agreement import agreement, recall_at_1, rule_for
from independent import (
    BUILDS,
    ROUNDS,
    Feed,
    Outputs,
    compare,
    outputs,
    reason_of,
    time_models,
)
from real_data import RealModel, find_models
from tabulate import tabulate

ROLES = ("tuned", "static", "dynamic")
HEADERS = (
    "model", "float ms", "tuned / float", "static / float", "dynamic / float", "SQNR dB: tuned", "static", "dynamic",
    "judged", "tuned", "static", "dynamic", "claimed", "search s", "what came of it",
)  # fmt: skip
CLI = "from qdqspec.cli import main; raise SystemExit(main())"


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        results = (arguments.results or Path(scratch)).absolute()
        rows = []
        for model in find_models(arguments.folders, arguments.names, results / "data"):
            row = _row(model, results / model.name, arguments)
            (results / model.name / "row.json").write_text(json.dumps(row, indent=1) + "\n")
            rows.append(row)
            print(_table(rows[-1:]), flush=True)
    table = _table(rows)
    if arguments.markdown is not None:
        arguments.markdown.write_text(table + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{table}")
    return 0 if rows else 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of models with data")
    parser.add_argument(
        "--names", type=lambda text: text.split(","), default=[], help="only these, by commas"
    )
    parser.add_argument("--minutes", type=float, default=0.6, help="of each search (default: 0.6)")
    parser.add_argument("--results", type=Path, help="keep tuned folders and figures here")
    parser.add_argument("--reuse", action="store_true", help="do not tune what is in --results already")
    parser.add_argument("--builds", type=int, default=BUILDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def _row(model: RealModel, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """All that is known of one model, for JSON and for the table."""
    folder.mkdir(parents=True, exist_ok=True)
    feeds = model.feeds()
    tuned = _tuned(model, folder / "tuned", arguments)
    files, failures = _files(model, folder, tuned)
    timing = time_models(
        {"float": model.path, **files}, feeds[0], builds=arguments.builds, rounds=arguments.rounds
    )
    failures |= timing.failures
    measured = {role: role in timing.samples for role in ROLES}
    row: dict[str, object] = {
        "name": model.name,
        "judged": "recall@1" if "minilm" in model.name else (rule_for(model.judged) or ("",))[0],
        "random_inputs": model.is_random,
        "samples": len(feeds),
        "tune": tuned.facts,
        "failures": failures,
        "float_ms": timing.median_ms("float") if "float" in timing.samples else None,
    }
    if not any(measured.values()) or "float" not in timing.samples:
        return row
    wanted = list(outputs(model.path, feeds))
    row["ratios"] = {role: _interval(timing, role) for role in ROLES if measured[role]}
    row["rounds_ms"] = {role: list(samples) for role, samples in timing.samples.items()}
    row["closeness"] = {
        role: _closeness(model, wanted, files[role], feeds) for role in ROLES if measured[role]
    }
    return row


def _interval(timing: object, role: str) -> dict[str, float]:
    ratio = timing.ratio(role, "float")  # type: ignore[attr-defined]
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high}


def _closeness(
    model: RealModel, wanted: Sequence[Outputs], path: Path, feeds: Sequence[Feed]
) -> dict[str, float | str | None]:
    """SQNR, cosine and agreement of a model with the float one, over the evaluation data."""
    try:
        found = list(outputs(path, feeds))
    except Exception as error:  # noqa: BLE001 - the reason is the result
        return {"failed": reason_of(error)}
    close = compare(wanted, found)
    agreed = agreement(model.judged, wanted, found)
    if "minilm" in model.name:
        agreed = _recall(found, feeds)
    return {"sqnr_db": close.sqnr_db, "cosine": close.cosine, "max_abs": close.max_abs, "agreement": agreed}


def _recall(found: Sequence[Outputs], feeds: Sequence[Feed]) -> float:
    """Sentence embeddings: the mean over the mask, normalized; samples are queries and documents in turns."""
    vectors = []
    for outputs_, feed in zip(found, feeds, strict=True):
        states, mask = next(iter(outputs_.values()))[0], feed["attention_mask"][0][:, None]
        mean = (states * mask).sum(0) / mask.sum()
        vectors.append(mean / np.linalg.norm(mean))
    return recall_at_1(vectors[::2], vectors[1::2])


# ---- tuning -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `qdqspec tune` came to: the file of the selected model where it ended well, and facts for the table."""

    path: Path | None
    facts: Mapping[str, object]


def _tuned(model: RealModel, folder: Path, arguments: argparse.Namespace) -> Tuned:
    if not (arguments.reuse and (folder / "result.json").is_file()):
        words = [
            "tune",
            str(model.path),
            "-o",
            str(folder),
            "--minutes",
            str(arguments.minutes),
            "--no-cache",
        ]
        if model.calibration is not None:
            words += ["--calibration", str(model.calibration)]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", CLI, *words], capture_output=True, text=True, check=False
        )
        folder.mkdir(exist_ok=True)
        (folder / "terminal.txt").write_text(f"{done.stdout}{done.stderr}")
        (folder / "seconds.txt").write_text(f"{time.monotonic() - started:.1f}")
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return Tuned(path=None, facts={"exit": done.returncode, "reason": said[0] if said else ""})
    result = json.loads((folder / "result.json").read_text())
    search = result["search"]
    facts = {
        "exit": 0,
        "unchanged": search["unchanged"],
        "reason": search["reason"],
        "speedup": result["speedup"],
        "pairs": len(result["placement"]),
        "sqnr_db": result["parity"]["sqnr_db"],
        "warnings": result["warnings"],
        "seconds": float((folder / "seconds.txt").read_text()),
    }
    return Tuned(path=model.path if search["unchanged"] else folder / "tuned.onnx", facts=facts)


def _files(model: RealModel, folder: Path, tuned: Tuned) -> tuple[dict[str, Path], dict[str, str]]:
    """The model files by role, and why others are missing."""
    files: dict[str, Path] = {}
    failures: dict[str, str] = {}
    if tuned.path is not None:
        files["tuned"] = tuned.path
    else:
        failures["tuned"] = str(tuned.facts["reason"])
    if _has_pairs(model.path):
        return files, failures | dict.fromkeys(("static", "dynamic"), "the model is quantized already")
    why = {
        "static": quantizers.static(model.path, model.calibration_feeds(), folder / "static.onnx"),
        "dynamic": quantizers.dynamic(model.path, folder / "dynamic.onnx"),
    }
    for role, reason in why.items():
        if reason:
            failures[role] = reason
        else:
            files[role] = folder / f"{role}.onnx"
    return files, failures


def _has_pairs(path: Path) -> bool:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return any(node.op_type == "DequantizeLinear" for node in nodes)


# ---- the table ----------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    return tabulate([_cells(row) for row in rows], HEADERS, tablefmt="pipe", disable_numparse=True)


def _cells(row: Mapping[str, object]) -> list[str]:
    tune: Mapping[str, object] = row["tune"]  # type: ignore[assignment]
    float_ms = row["float_ms"]
    return [
        f"{row['name']}{' (random inputs)' if row['random_inputs'] else ''}",
        "-" if float_ms is None else f"{float_ms:.3g}",
        *(_ratio_text(row, role) for role in ROLES),
        *(_close_text(row, role, "sqnr_db") for role in ROLES),
        str(row["judged"]) or "-",
        *(_close_text(row, role, "agreement") for role in ROLES),
        _claim(tune),
        f"{tune.get('seconds', math.nan):.0f}",
        _outcome(tune),
    ]


def _ratio_text(row: Mapping[str, object], role: str) -> str:
    ratios, failures = row.get("ratios", {}), row["failures"]
    if role in failures:  # type: ignore[operator]
        return f"failed: {failures[role]}"[:80].replace("|", "/")  # type: ignore[index]
    if role not in ratios:  # type: ignore[operator]
        return "-"
    ratio = ratios[role]  # type: ignore[index]
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _close_text(row: Mapping[str, object], role: str, what: str) -> str:
    value = row.get("closeness", {}).get(role, {}).get(what)  # type: ignore[attr-defined]
    if value is None:
        return "-"
    if value == math.inf:
        return "exact"
    return f"{value:.1f}" if what == "sqnr_db" else f"{value:.3f}"


def _claim(tune: Mapping[str, object]) -> str:
    """The ratio tuned / float that qdqspec reports."""
    speedup = tune.get("speedup")
    return "-" if speedup is None else f"{1 / speedup['median']:.3f}"  # type: ignore[index]


def _outcome(tune: Mapping[str, object]) -> str:
    if tune["exit"]:
        return f"exit {tune['exit']}: {tune['reason']}"[:160].replace("|", "/")
    if tune["unchanged"]:
        return f"unchanged: {tune['reason']}".replace("|", "/")
    return f"{tune['pairs']} sites"


if __name__ == "__main__":
    sys.exit(main())
