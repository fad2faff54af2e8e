"""TensorRT for RTX: builds engines on any x86-64 machine, and times them where there is a GPU."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(
    targets=("tensorrt-rtx-1",),
    lint_targets=("tensorrt-rtx-1",),
    lint_rules=f"{__name__}.lint",
    replay=f"{__name__}.engine:replay_command",
)

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
