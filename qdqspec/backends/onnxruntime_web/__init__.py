"""ONNX Runtime Web in Node or headless Chromium: its WebAssembly build on one thread."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(targets=("onnxruntime-web-wasm",))

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
