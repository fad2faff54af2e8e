"""Messages of ONNX Runtime Web without their numbers, and what to do about them."""

from __future__ import annotations

import re

from qdqspec.backends.onnxruntime import messages

# "Can't create a session. ERROR_CODE: 1, ERROR_MESSAGE: Why"; an exception of wasm without a message is a number
_CODE = re.compile(r"ERROR_CODE: -?\d+, ERROR_MESSAGE: ")
_OUT_OF_MEMORY = re.compile(r"failed to allocate|out of memory|memory access out of bounds", re.IGNORECASE)


def plainly(text: str) -> str:
    """The message on one line."""
    text = _CODE.sub("", text).strip()
    if text.isdecimal():
        return f"an exception of the WebAssembly code without a message ({text})"
    return messages.plainly(RuntimeError(text))


def cure_for(text: str) -> str | None:
    """What to do about an error, if known."""
    if _OUT_OF_MEMORY.search(text):
        return "take a smaller model: WebAssembly has 4 GiB of memory at most"
    return messages.cure_for(text)
