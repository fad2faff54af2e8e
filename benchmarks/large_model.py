"""Runs every verb and a search on a model above 2 GB: ``python benchmarks/large_model.py [GIBIBYTES] [--trials N]``.

The model has products with weights in one external file, mostly zeros, so that the file is sparse; with ``--random`` no
weight is zero. For each verb, printed are the seconds, the peak memory of this process and the largest sum of its
engines (child processes), in total and until the winner was confirmed. Bar: in `tune`, this process needs at most 1.3
times the size of the model. Needs disk for the results (reference, tuned, output of verbs) and memory for two engines
(one unfused needs as much). ``--only VERB`` runs one verb. ``--room GIBIBYTES`` limits the memory for engines that the
search detects; with ``--unseen`` the search detects all memory of the machine, and the largest engine is killed if
engines exceed the limit. Linux only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from tabulate import tabulate

ROWS, COLUMNS = 4096, 8192  # alternating sizes of weights
BAR = 1.3
_FILLED = 16384  # number of nonzero values of each weight


def write_model(folder: Path, gibibytes: float, *, is_random: bool = False) -> Path:
    """MatMul > Relu up to the requested size; the weights are sparse except for their first values, or random."""
    size = 4 * ROWS * COLUMNS
    count = int(np.ceil(gibibytes * 2**30 / size))
    random = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    with (folder / "large.bin").open("wb") as file:
        for i in range(count):
            file.seek(i * size)
            dims = (ROWS, COLUMNS) if i % 2 == 0 else (COLUMNS, ROWS)
            count_filled = ROWS * COLUMNS if is_random else _FILLED
            values = random.standard_normal(count_filled, np.float32)
            file.write((values * np.float32((2 / dims[0]) ** 0.5 if is_random else 0.05)).tobytes())
            weight = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=dims)
            weight.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "large.bin"), ("offset", i * size), ("length", size)):
                weight.external_data.add(key=key, value=str(value))
            weights.append(weight)
            nodes += [
                helper.make_node("MatMul", [x, f"w{i}"], [f"h{i}"], f"matmul{i}"),
                helper.make_node("Relu", [f"h{i}"], [f"r{i}"], f"relu{i}"),
            ]
            x = f"r{i}"
        file.truncate(count * size)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", x)]
    ends[0] = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, ROWS])
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "large.onnx",
    )
    return folder / "large.onnx"


def measured(folder: Path, *words: str, within: Sequence[str] = ()) -> tuple[int, float, float, float, float]:
    """Exit code, seconds, peak of the process in MiB, largest sum of its children, and that during the search."""
    start = time.perf_counter()
    program = [__file__, *within] if within else ["-m", "qdqspec"]
    command = [sys.executable, *program, *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    own = engines = searching = 0.0
    while process.poll() is None:
        own = max(own, _mebibytes(process.pid, "VmHWM"))
        engines = max(engines, sum(_mebibytes(pid, "RssAnon") for pid in _descendants(process.pid)))
        searching = searching if _is_confirmed(folder) else engines
        time.sleep(0.1)
    return process.returncode, time.perf_counter() - start, own, engines, searching


def _is_confirmed(folder: Path) -> bool:
    journals = folder.glob("out/**/trials.jsonl")
    return any('"confirm"' in journal.read_text(encoding="utf-8") for journal in journals)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                found += [int(child), *_descendants(int(child))]
    except OSError:
        pass
    return found


def _mebibytes(pid: int, entry: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{entry}:")), 0.0)


def within(room: float, words: list[str], *, seen: bool) -> int:
    """Run the command line in this process with a limit in GiB on the memory of engines."""
    from qdqspec.app.cli import main as command_line
    from qdqspec.backends import open_engines

    def bytes_left(*_: Path) -> int:
        return int((room * 1024 - sum(_held().values())) * 2**20)

    if seen:
        open_engines.bytes_left = bytes_left
    else:
        threading.Thread(target=_kill_beyond, args=(room,), daemon=True).start()
    return command_line(words)


def _held() -> dict[int, float]:
    """MiB of each descendant of this process."""
    return {pid: _mebibytes(pid, "RssAnon") for pid in _descendants(os.getpid())}


def _kill_beyond(room: float) -> None:
    """Kill the largest engine while the limit is exceeded, as a system without memory does."""
    while True:
        held = _held()
        if sum(held.values()) > room * 1024:
            os.kill(max(held, key=lambda pid: held[pid]), signal.SIGKILL)
            print("memory ran out: the largest engine was killed", file=sys.stderr)
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gibibytes", nargs="?", type=float, default=2.3)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--room", type=float)
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--only", default="", help="run one verb")
    parser.add_argument("--random", action="store_true", help="random weights instead of mostly zeros")
    asked = parser.parse_args()
    within = ["--unseen" if asked.unseen else "--seen", str(asked.room)] if asked.room else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pyproject.toml").touch()
        model = write_model(folder, asked.gibibytes, is_random=asked.random)
        size = (folder / "large.bin").stat().st_size / 2**20
        tuned = "out/tuned.onnx"
        steps = {
            "inspect": ["large.onnx"],
            "lint": ["large.onnx", "--target", "onnxruntime-cpu"],
            "init": ["large.onnx"],
            "fold": ["large.onnx", "-o", "scratch.onnx"],
            "tune": ["large.onnx", "-o", "out", "--trials", str(asked.trials), "--no-cache"],
            "import": [tuned, "-o", "imported.json"],
            "apply": ["large.onnx", "out/scheme.json", "-o", "scratch.onnx"],
            "diff": ["large.onnx", tuned],
            "strip": [tuned, "-o", "scratch.onnx"],
            "strip --reference": [tuned, "--reference", "large.onnx", "-o", "scratch.onnx"],
        }
        rows = []
        for verb, words in steps.items():
            if asked.only not in ("", verb):
                continue
            code, seconds, own, *engines = measured(folder, verb.split()[0], *words, within=within)
            rows.append((verb, code, seconds, own, own / size, *(most or None for most in engines)))
            print(f"{verb}: exit {code}, {seconds:.0f} s", file=sys.stderr)
            for file in folder.glob("scratch.onnx*"):
                file.unlink()
        external = sorted(file.name for file in model.parent.joinpath("out").glob("*.data"))
    heads = ("verb", "exit", "s", "own MiB", "of the model", "engines MiB", "until confirmed")
    print(tabulate(rows, heads, floatfmt=".2f"))
    worst = max((row[4] for row in rows if row[0] == "tune"), default=0.0)
    print(
        f"\nmodel {size:.0f} MiB; external data of results: {', '.join(external) or 'none'}; "
        f"tune {worst:.2f} times the model, bar {BAR}: {'ok' if worst <= BAR else 'MISSED'}"
    )
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    if sys.argv[1:2] in (["--seen"], ["--unseen"]):
        sys.exit(within(float(sys.argv[2]), sys.argv[3:], seen=sys.argv[1] == "--seen"))
    sys.exit(main())
