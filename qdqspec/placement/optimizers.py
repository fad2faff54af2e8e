"""Runs optimizers that may process a quantized model: our folding, onnxslim, onnxscript, and those of backends.

onnxslim and onnxscript are optional, and imported when they are run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from qdqspec.config import hooks
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph.constants import fold_constants
from qdqspec.graph.model import load_model
from qdqspec.graph.save import save_model
from qdqspec.types import Optimizer

Run = Callable[[Path, Path], Path]  # model file, folder to write to; the optimized file


def run_optimizer(name: Optimizer, model: Path, folder: Path) -> Path:
    """Write the model that an optimizer makes of a model into ``folder``.

    Raises `BackendUnavailableError` with installation advice if it is not installed, `BackendError` if it
    fails.
    """
    run: Run = _RUNS.get(name) or hooks.load(hooks.declaration_of(hooks.owner_of(name)).optimizers[name])
    return run(model, folder)


def _fold(model: Path, folder: Path) -> Path:
    out = folder / "folded.onnx"
    save_model(fold_constants(load_model(model)).model.proto, out, base=model.absolute().parent)
    return out


def _slim(model: Path, folder: Path) -> Path:
    tool = _import("onnxslim", "onnxslim")
    with _failures("onnxslim", model):
        slimmed = tool.slim(onnx.load(str(model)))
    return _saved(slimmed, folder / "slimmed.onnx")


def _script(model: Path, folder: Path) -> Path:
    tool = _import("onnxscript.optimizer", "onnxscript")
    with _failures("onnxscript", model):
        optimized = tool.optimize(onnx.load(str(model)))
    return _saved(optimized, folder / "optimized.onnx")


def _saved(proto: onnx.ModelProto, out: Path) -> Path:
    save_model(proto, out)
    return out


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name == package
        what = f"{package} is not installed here" if missing else f"{package} cannot be imported: {error}"
    except ImportError as error:
        what = f"{package} cannot be imported: {error}"
    raise BackendUnavailableError(what, cure=f"pip install {package}")


@contextmanager
def _failures(tool: str, model: Path) -> Iterator[None]:
    """Convert any error of a tool to `BackendError`, with its reason on one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a tool may raise any class
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise BackendError(f"{tool} failed on the model: {why}", where=model) from None


_RUNS: dict[Optimizer, Run] = {
    "constant-folding": _fold,
    "onnxslim": _slim,
    "onnxscript": _script,
}
