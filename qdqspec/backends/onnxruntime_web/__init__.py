"""ONNX Runtime Web in Node or headless Chromium: its WebAssembly build on one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.config.hooks import Declaration, attributes_of

if TYPE_CHECKING:
    from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb as OnnxRuntimeWeb
    from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWebEngine as OnnxRuntimeWebEngine

declaration = Declaration(targets=("onnxruntime-web-wasm",))

__getattr__ = attributes_of(f"{__name__}.engine", "backend", "OnnxRuntimeWeb", "OnnxRuntimeWebEngine")
