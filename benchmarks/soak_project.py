"""A user's project for the soak scripts: run it in a separate process, and check its files.

A run is ``pytest specs`` with all outputs: search, cache, results, reports, run record, baseline.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from qdqspec.app.evidence.baselines import read_baseline
from qdqspec.app.report.record import case_from_json, read_record
from qdqspec.errors import QdqspecError
from qdqspec.qdq.region_schemes import PatternCache
from qdqspec.qdq.scheme_file import SchemeFile

SPECS = Path(__file__).parents[1] / "specs"
SPEC = """\
qdqspec: 1
model: models/digits_resnet.onnx
inputs:
  shapes: {input: [4, 1, 16, 16]}
  calibration: data/digits_calibration.npz
tune: {trials: TRIALS}
checks:
  - {kind: speedup, min: 1.0}
  - {kind: size, max_ratio: 2}
  - {kind: regression, max: 5%}
"""
# A simulated device without noise, so that every run of a search has the same result.
SILENT = {"fake.run_noise": 0, "fake.wall_noise": 0, "fake.build_noise": 0}
_NOTHING: Mapping[str, object] = {}
MARK = "SOAK_RUN"  # a variable in the environment of a run and of its children


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with models, data and a spec, and the files of runs."""

    home: Path
    backend: str
    trials: int = 8

    def __post_init__(self) -> None:
        for name in ("models/digits_resnet.onnx", "data/digits_calibration.npz"):
            (self.home / "specs" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SPECS / name, self.home / "specs" / name)
        (self.home / "specs" / "digits.qdq.yaml").write_text(SPEC.replace("TRIALS", str(self.trials)))
        (self.home / "pyproject.toml").write_text("[tool.pytest]\nstrict = true\n")
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        """The temporary folder of runs."""
        return self.home / "tmp"

    @property
    def results(self) -> Path:
        """The folder of the case's files."""
        return self.home / "reports" / "digits" / "default"

    @property
    def own(self) -> str:
        """A hash of the user's files."""
        digest = hashlib.sha256((self.home / "pyproject.toml").read_bytes())
        for path in sorted((self.home / "specs").rglob("*")):
            if path.is_file() and "__baselines__" not in path.parts:
                digest.update(str(path).encode() + path.read_bytes())
        return digest.hexdigest()

    def start(
        self,
        *,
        python: tuple[str, ...] = ("-m", "pytest"),
        words: Mapping[str, object] = _NOTHING,
        before: Callable[[], None] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a run with ``words`` in its environment, after ``before``; its output is written to a file."""
        options = [f"--qdq-backend={self.backend}", "--qdq-update=new", "--qdq-json=run.json"]
        options += ["--qdq-report=report.html", "--qdq-report=report.md", "--qdq-report=report.csv"]
        if self.backend == "fake":
            options += [f"--qdq-backend-option={word}={value}" for word, value in SILENT.items()]
        environment = {**os.environ, "TMPDIR": str(self.temporary), MARK: str(self.home), "CI": ""}
        with self._printed.open("w") as log:
            return subprocess.Popen(
                [sys.executable, *python, "specs", "-q", "-p", "no:cacheprovider", *options],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                preexec_fn=before,
                env={**environment, **{word: str(value) for word, value in words.items()}},
            )

    def run(self, seconds: float | None = None, **how: Any) -> tuple[int, str]:
        """Run to the end, or kill after this number of seconds: exit code and output."""
        run = self.start(**how)
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            run.kill()
            code = run.wait()
        return code, self.printed()

    def printed(self) -> str:
        """The output of the last run."""
        return self._printed.read_text()

    @property
    def _printed(self) -> Path:
        return (
            Path(tempfile.gettempdir()) / f"soak-output-{self.home.name}.txt"
        )  # outside of the limited disk

    def clear(self) -> None:
        """Remove all files of runs."""
        for path in (self.home / "reports", self.home / ".qdqspec", self.home / "specs" / "__baselines__"):
            shutil.rmtree(path, ignore_errors=True)
        for path in [*self.home.glob("report.*"), self.home / "run.json"]:
            path.unlink(missing_ok=True)

    def journal(self) -> bytes:
        """The bytes of the journal, empty without one."""
        path = self.results / "trials.jsonl"
        return path.read_bytes() if path.exists() else b""

    def outcome(self) -> dict[str, object]:
        """The result of a finished run without times."""
        scheme = json.loads((self.results / "scheme.json").read_text())
        result = json.loads((self.results / "result.json").read_text())
        (baseline,) = (self.home / "specs" / "__baselines__").rglob("*.json")
        kept = json.loads(baseline.read_text())["cases"]["default"]["regression"]
        return {
            "scheme": scheme,
            "tuned.onnx": hashlib.sha256((self.results / "tuned.onnx").read_bytes()).hexdigest(),
            "ratio": round(result["latency"]["ratios"]["tuned"]["median"], 9),
            "checks": [(check["id"], check["verdict"]) for check in result["checks"]],
            "baseline": (kept["ratio"], kept["samples"], kept["scheme"]),
        }


# ---- checks ---------------------------------------------------------------------------------------


def children(project: Project) -> list[int]:
    """The processes of runs of the project."""
    mark = f"{MARK}={project.home}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes() + b"\0":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for_children(project: Project, seconds: float = 10) -> list[int]:
    """The processes that remain after some time; there should be none."""
    until = time.monotonic() + seconds
    while (left := children(project)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def unreadable(project: Project) -> list[str]:
    """Files that are invalid for their name; there should be no incomplete file."""
    found = []
    for path in sorted(project.home.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(project.home).parts)
        reader = _reader(path)
        if reader is None or hidden or not path.is_file() or project.temporary in path.parents:
            continue
        try:
            reader(path)
        except (QdqspecError, ValueError, OSError, onnx.checker.ValidationError) as error:
            found.append(f"{path}: {error}")
    return found


def left_behind(project: Project) -> list[str]:
    """Incomplete files and temporary folders, which a finished run must not leave."""
    partial = list(project.home.rglob(".qdqspec-*.part"))
    temporary = [path for path in project.temporary.rglob("*") if "runs" in path.parent.parts]
    strange = [path for path in project.temporary.iterdir() if not path.name.startswith("qdqspec-")]
    return [str(path) for path in (*partial, *temporary, *strange)]


def _reader(path: Path) -> Callable[[Path], object] | None:
    by_name: dict[str, Callable[[Path], object]] = {
        "scheme.json": SchemeFile.read,
        "patterns.yaml": PatternCache.read,
        "result.json": lambda p: case_from_json(json.loads(p.read_text())),
        "run.json": read_record,
        "study.json": lambda p: json.loads(p.read_text()),
    }
    by_suffix: dict[str, Callable[[Path], object]] = {
        ".onnx": lambda p: onnx.checker.check_model(str(p)),
        ".csv": _whole_table,
        ".html": _ends_with("</html>"),
        ".md": _ends_with("\n"),
        ".log": _ends_with("\n"),
    }
    if "__baselines__" in path.parts and path.suffix == ".json":
        return read_baseline
    return by_name.get(path.name) or by_suffix.get(path.suffix)


def _whole_table(path: Path) -> None:
    rows = list(csv.reader(path.read_text().splitlines()))
    if not path.read_text().endswith("\n") or len({len(row) for row in rows}) != 1:
        raise ValueError("half a table")


def _ends_with(end: str) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if not path.read_text().rstrip(" ").endswith((end, f"{end}\n")):
            raise ValueError(f"it does not end with {end!r}")

    return check
