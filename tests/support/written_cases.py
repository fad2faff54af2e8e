"""Cases whose model, in ONNX's textual form, and data are written to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx_text import saved
from sessions import few_digits

from qdqspec.testing.records import params_of
from qdqspec.types import Case, CheckSpec, Inputs, TuneRules


def written_case(
    folder: Path,
    text: str,
    data: Mapping[str, np.ndarray],
    tune: TuneRules | None = None,
    **weights: np.ndarray,
) -> Case:
    """The case of a model with these initializers and this calibration data, as ``net.onnx`` and ``data.npz``."""
    model = saved(folder / "net.onnx", text, opset=17, ir_version=8, **weights)
    np.savez(folder / "data.npz", **data)
    inputs = Inputs(calibration=folder / "data.npz")
    return Case(id="default", model=model, inputs=inputs, tune=tune or TuneRules())


def normal(*shape: int, deviation: float = 1.0, seed: int = 0) -> np.ndarray:
    """Random values of type float32."""
    return np.random.default_rng(seed).normal(0, deviation, shape).astype(np.float32)


def check_of(kind: str, **params: object) -> CheckSpec:
    """A check with its kind as its id."""
    return CheckSpec(id=kind, kind=kind, params=params_of(kind, **params))


def digits_case(models: Path, folder: Path, samples: int, **more: Any) -> Case:
    """The digits classifier with its first calibration samples."""
    data = Inputs(calibration=few_digits(models, folder, samples))
    return Case(id="default", model=models / "digits_resnet.onnx", inputs=data, **more)
