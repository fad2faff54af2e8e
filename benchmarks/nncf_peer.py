"""NNCF's ONNX placement for comparison in `benchmarks/accuracy.py`; pip installs it into a separate environment.

NNCF writes int8 activations, for which ONNX Runtime's CPU kernels are slow. Therefore the placement and its ranges are
imported by qdqspec, converted to uint8 activations (zero points 128 higher: the same values), and inserted into the
float model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from dataclasses import replace
from pathlib import Path

import numpy as np
from independent import reason_of
from real_data import RealModel

from qdqspec.graph.model import load_model
from qdqspec.graph.save import save_model
from qdqspec.placement.read.import_qdq import import_placement
from qdqspec.placement.scheme.scheme_file import IMPORTED, apply_scheme, write_scheme
from qdqspec.types import PlacedPair, Placement

SCRIPT = Path(__file__).with_name("nncf_run.py")
LIMIT_S = 180.0


def environment(folder: Path) -> Path:
    """The Python of an environment with NNCF, which is created if missing."""
    python = folder / "bin" / "python"
    if not python.is_file():
        print(f"installing NNCF into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "nncf", "onnx", "onnxruntime"], check=True)
    return python


def quantize(model: RealModel, python: Path, output: Path) -> str:
    """Write the model with the pairs of NNCF; the reason of a failure, or an empty text."""
    with tempfile.TemporaryDirectory() as scratch:
        feeds, made = Path(scratch) / "feeds.npz", Path(scratch) / "nncf.onnx"
        samples = enumerate(model.calibration_feeds())
        np.savez(feeds, **{f"{i}/{name}": array for i, feed in samples for name, array in feed.items()})
        words = [str(python), str(SCRIPT), str(model.path), str(feeds), str(made)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"stopped after {LIMIT_S:.0f} s"
        if not made.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return f"NNCF: {lines[-1] if lines else done.returncode}"[:160]
        try:
            _insert_unsigned(model.path, made, output)
        except Exception as error:  # noqa: BLE001 - the reason is the result
            return reason_of(error)
    return ""


def _insert_unsigned(original: Path, made: Path, output: Path) -> None:
    given = load_model(original)
    imported = import_placement(load_model(made), given)
    pairs = tuple(_unsigned(pair) for pair in imported.pairs)
    scheme = output.with_suffix(".scheme.json")
    placement = Placement(sites=frozenset(pair.site for pair in pairs))
    write_scheme(scheme, placement, pairs, IMPORTED, imported.positions)
    save_model(apply_scheme(given, scheme).proto, output, base=original.parent)


def _unsigned(pair: PlacedPair) -> PlacedPair:
    if pair.site.weight or pair.site.format != "int8":
        return pair
    site = replace(pair.site, format="uint8")
    return replace(pair, site=site, zero_point=tuple(point + 128 for point in pair.zero_point))
