"""Quantizers of other projects for comparison in `benchmarks/accuracy.py`; pip installs each into an environment.

NNCF writes int8 activations, for which ONNX Runtime's CPU kernels are slow. Therefore the placement and its ranges are
imported by qdqspec, converted to uint8 activations (zero points 128 higher: the same values), and inserted into the
float model. AMD Quark writes uint8 activations with the configurations here, and its models are taken as they are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from independent import reason_of, without_folders
from real_data import RealModel

from qdqspec.graph.model import load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.types import PlacedPair

LIMIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A quantizer in an environment of its own.

    ``NAME_run.py MODEL FEEDS.npz OUTPUT [CONFIGURATION]`` runs in it and writes a model for each of the
    ``configurations``, by role; ``take`` makes the model to time from the float model and the written one.
    """

    name: str
    packages: tuple[str, ...]
    configurations: Mapping[str, tuple[str, ...]]
    take: Callable[[Path, Path, Path], None]

    def python(self, results: Path) -> Path:
        """The Python of its environment below ``results``, which is created if missing."""
        folder = results / self.name
        python = folder / "bin" / "python"
        if not python.is_file():
            print(f"installing {self.name} into {folder}", file=sys.stderr, flush=True)
            venv.create(folder, with_pip=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *self.packages], check=True)
        return python

    def quantize(
        self, model: RealModel, results: Path, folder: Path
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """Write the models by role to ``folder``; return them, and the reasons for missing ones."""
        why = {
            role: self._quantized(model, self.python(results), folder / f"{role}.onnx", words)
            for role, words in self.configurations.items()
        }
        files = {role: folder / f"{role}.onnx" for role, reason in why.items() if not reason}
        return files, {role: reason for role, reason in why.items() if reason}

    def _quantized(self, model: RealModel, python: Path, output: Path, configuration: tuple[str, ...]) -> str:
        """Write the model of a configuration; the reason of a failure, or an empty text."""
        script = Path(__file__).with_name(f"{self.name}_run.py")
        with tempfile.TemporaryDirectory() as scratch:
            feeds, made = Path(scratch) / "feeds.npz", Path(scratch) / "made.onnx"
            samples = enumerate(model.calibration_feeds())
            np.savez(feeds, **{f"{i}/{name}": array for i, feed in samples for name, array in feed.items()})
            words = [
                str(python),
                str(script),
                str(model.path.absolute()),
                str(feeds),
                str(made),
                *configuration,
            ]
            try:
                done = subprocess.run(
                    words, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S
                )
            except subprocess.TimeoutExpired:
                return f"stopped after {LIMIT_S:.0f} s"
            if not made.is_file():
                lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
                return without_folders(f"{self.name}: {lines[-1] if lines else done.returncode}")[:160]
            try:
                self.take(model.path, made, output)
            except Exception as error:  # noqa: BLE001 - the reason is the result
                return reason_of(error)
        return ""


def _insert_unsigned(original: Path, made: Path, output: Path) -> None:
    given = load_model(original)
    imported = import_placement(load_model(made), given)
    scheme = output.with_suffix(".scheme.json")
    replace(imported, pairs=tuple(map(_unsigned, imported.pairs))).write(scheme)
    save_model(SchemeFile.read(scheme).apply(given).proto, output, base=original.parent)


def _unsigned(pair: PlacedPair) -> PlacedPair:
    if pair.site.weight or pair.site.format != "int8":
        return pair
    site = replace(pair.site, format="uint8")
    return replace(pair, site=site, zero_point=tuple(point + 128 for point in pair.zero_point))


def _copy(_: Path, made: Path, output: Path) -> None:
    save_model(load_model(made).proto, output, base=made.parent)


RIVALS = (
    Rival(
        name="nncf",
        packages=("nncf", "onnx", "onnxruntime"),
        configurations={"nncf": ()},
        take=_insert_unsigned,
    ),
    Rival(
        name="quark",
        packages=("amd-quark", "torch==2.13.0", "onnx", "onnxruntime"),
        configurations={
            f"quark {name}": (name,)
            for name in ("U8S8_AAWS", "INT8_CNN_ACCURATE", "INT8_TRANSFORMER_DEFAULT")
        },
        take=_copy,
    ),
)
