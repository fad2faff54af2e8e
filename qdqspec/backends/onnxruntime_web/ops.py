"""The operators that ONNX Runtime Web runs in integers.

The optimizer is that of ONNX Runtime, so the table is that of backend ``onnxruntime``. It is verified entry by entry
against the installed package in ``tests/unit/backends/test_ort_web_ops.py``.
"""

from __future__ import annotations

from qdqspec.backends.onnxruntime.ops import ABSORBED, BLOCKED_4, BLOCKED_AXES, DYNAMIC, LABELS, LINEAR

__all__ = ["ABSORBED", "BLOCKED_4", "BLOCKED_AXES", "DYNAMIC", "LABELS", "LINEAR"]
