"""OpenVINO on the CPU, and on Intel GPUs and NPUs where present; extra ``qdqspec[openvino]``."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(
    targets=("openvino-cpu",),
    lint_targets=("openvino-cpu",),
    lint_package="openvino",
    lint_rules=f"{__name__}.lint",
    program=f"{__name__}.engine:program",
)

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
