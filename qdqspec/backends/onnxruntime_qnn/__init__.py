"""Qualcomm's NPU (HTP) by its emulator, ONNX Runtime's plugin for QNN; extra ``qdqspec[qnn]``. It times nothing."""

from __future__ import annotations

from qdqspec.backends import Declaration, attributes_of

declaration = Declaration(
    targets=("onnxruntime-qnn-htp-emulator",),
    lint_targets=("onnxruntime-qnn-htp-emulator",),
    lint_package="onnxruntime-qnn",
    lint_rules=f"{__name__}.lint",
    program=f"{__name__}.engine:program",
)

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
