"""ONNX Runtime on the CPU: the default backend, installed with qdqspec."""

from __future__ import annotations

import os

from qdqspec._core.hooks import Declaration, attributes_of

# Read when onnxruntime is first imported: without it, 1.31 starts a telemetry thread on Linux too, which sends events
# over the network, and with which the process must not be forked.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_ENGINE = f"{__name__}.engine"
_OPTIMIZATION = "onnxruntime.optimization"

declaration = Declaration(
    targets=("onnxruntime-cpu", "onnxruntime-cuda"),
    lint_targets=("onnxruntime-cpu",),
    lint_package="onnxruntime",
    lint_rules=f"{__name__}.lint",
    optimizers={
        "onnxruntime-basic": f"{_ENGINE}:basic",
        "onnxruntime-extended": f"{_ENGINE}:extended",
        "onnxruntime-all": f"{_ENGINE}:everything",
    },
    polygraphy=("--onnxrt",),
    kernel_origins=f"{__name__}.layers:map_kernels",
    float16=f"{_ENGINE}:half_model",
    program=f"{_ENGINE}:program",
    as_defined={_OPTIMIZATION: "off"},
    optimized={_OPTIMIZATION: "pairs-kept"},
)

__getattr__ = attributes_of(_ENGINE, "backend")
