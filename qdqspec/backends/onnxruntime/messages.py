"""ONNX Runtime's messages without its source file names, and what to do about them."""

from __future__ import annotations

import re

# "[ONNXRuntimeError] : 1 : FAIL : Load model from m.onnx failed:/onnxruntime_src/a.cc:256 onnxruntime::f(int) Why"
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_LOADING = re.compile(r"^Load model from .*? failed: ?", re.DOTALL)
_SOURCE = re.compile(r"/onnxruntime_src/\S+?:\d+ (?:[^()]*\(.*?\) (?=[A-Z]))?")
_LONGEST = 500

# Text contained in a message, and what to do about it.
_CURES = {
    "is not a registered function/op": "give the library of custom operators that has it with --plugin LIB.so "
    "(in pytest --qdq-plugin), or cut that part off the model",
    "Unsupported model IR version": "save the model with an older IR version, or update onnxruntime",
    "Current official support for domain": "export the model with an older opset, or update onnxruntime",
    "Could not find an implementation": "ONNX Runtime has no kernel for this operator in this type on a CPU: "
    "export the model in float32, or choose another backend",
    "two nodes with same node name": "give the nodes names of their own, or none",
}


def plainly(error: Exception) -> str:
    """The message of an exception, on one line."""
    text = " ".join(str(error).split())
    for noise in (_STATUS, _LOADING, _SOURCE):
        text = noise.sub("", text, count=1)
    return text[:_LONGEST].strip() or type(error).__name__


def cure_for(text: str) -> str | None:
    """What to do about an error, if known."""
    return next((cure for sign, cure in _CURES.items() if sign in text), None)
