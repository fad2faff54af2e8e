"""Writes the model that ONNX Runtime produces at a given optimization level."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from qdqspec.errors import BackendError, BackendUnavailableError

Level: TypeAlias = Literal["basic", "extended", "all"]

_LEVELS: dict[Level, str] = {
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


def optimize(model: Path, folder: Path, *, level: Level) -> Path:
    """Write the optimized model of the CPU provider into ``folder``, and return the file.

    Raises `BackendError` with ONNX Runtime's reason, `BackendUnavailableError` if it is not installed.
    """
    try:
        import onnxruntime as ort
    except Exception as error:  # noqa: BLE001 - a broken wheel raises anything from ImportError to OSError
        raise BackendUnavailableError(
            f"onnxruntime cannot be imported: {error}", cure="pip install onnxruntime"
        ) from None
    out = folder / f"{level}.onnx"
    settings = ort.SessionOptions()
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[level])
    settings.optimized_model_filepath = str(out)
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    external = "session.optimized_model_external_initializers_"
    settings.add_session_config_entry(f"{external}file_name", f"{out.stem}.weights")
    settings.add_session_config_entry(f"{external}min_size_in_bytes", "1024")
    try:
        ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no public base class
        why = " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")[:300]
        raise BackendError(f"ONNX Runtime could not optimize the model: {why}", where=model) from None
    return out


basic = partial(optimize, level="basic")
extended = partial(optimize, level="extended")
everything = partial(optimize, level="all")
