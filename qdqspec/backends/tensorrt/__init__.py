"""TensorRT 10.9 to 11.4 through its Python API."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(
    targets=("tensorrt-10", "tensorrt-11"),
    lint_targets=(
        "tensorrt-10", *(f"tensorrt-10.{minor}" for minor in range(9, 17)),
        "tensorrt-11", *(f"tensorrt-11.{minor}" for minor in range(5)),
    ),
    lint_rules=f"{__name__}.lint",
    exported=f"{__name__}.exported:read_exported",
    exported_by="trtexec --exportLayerInfo",
    ranges=f"{__name__}.exported:read_magnitudes",
    equivalents={
        "--timing_cache": "use --backend-option tensorrt.timing-cache=FILE (or trtexec.timing-cache)",
        "--warmup_runs": "use --backend-option tensorrt.warmup-ms=N: a GPU is warmed up by time",
        "--verbose": "use --backend-option tensorrt.verbose=on: the whole log is in logs/",
    },
    polygraphy=("--trt",),
    replay="qdqspec.backends.trtexec.engine:replay_command",
)  # fmt: skip

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
