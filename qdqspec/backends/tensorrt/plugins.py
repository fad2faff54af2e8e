"""The two kinds of plugin libraries, and how each is loaded.

A library that exports ``getCreators`` is loaded by TensorRT's plugin registry. The common kind, made with
``REGISTER_TENSORRT_PLUGIN``, exports none: it registers its creators when the system loads it, and the registry
rejects it ("SymbolAddress for getCreators could not be loaded", TensorRT issue 4121). trtexec has an option for each.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_EXPORT = b"\0getCreators\0"  # as it occurs in a library's symbol table


def exports_creators(library: Path) -> bool:
    """Whether a library is for TensorRT's plugin registry, rather than one that registers itself."""
    if not library.stat().st_size:
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_EXPORT) >= 0


def load_self_registering(library: Path) -> str:
    """Load a library with its symbols visible to all others; returns the reason of a failure, or nothing."""
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return ""


def trtexec_option(library: Path) -> str:
    """The option of trtexec for a library: ``--dynamicPlugins`` for the registry, ``--staticPlugins`` for others."""
    return f"--{'dynamic' if exports_creators(library) else 'static'}Plugins={library}"
