"""OpenVINO's messages without its source file names, and what to do about them."""

from __future__ import annotations

import re

# "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'a == b' failed at src/plugins/x.cpp:669:\nWhy"
_SOURCE = re.compile(r"Exception from \S+:\d+:\s*")
_CHECK = re.compile(r"Check '.*?' failed at (\S+):\d+:\s*", re.DOTALL)
_LONGEST = 500

# Text contained in a message, and what to do about it.
_CURES = {
    "No conversion rule found": "give the extension library that has the operator with --plugin LIB.so (in pytest "
    "--qdq-plugin), or cut that part off the model",
    "is not supported": "export the model with other operators, or choose another backend",
}


def plainly(error: Exception) -> str:
    """The message of an exception, on one line; the failed assertion is kept only if there is nothing else."""
    text = _SOURCE.sub("", str(error))
    short = " ".join(_CHECK.sub("", text).split())
    return (short or " ".join(text.split()))[:_LONGEST].strip() or type(error).__name__


def cure_for(text: str) -> str | None:
    """What to do about an error, if known."""
    return next((cure for sign, cure in _CURES.items() if sign in text), None)
