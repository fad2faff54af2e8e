"""The installed TensorRT for RTX, and whether it has a GPU to run on.

A separate process determines both: ``python -m qdqspec.backends.tensorrt_rtx.library INDEX``. Its parser and
compiler need neither a GPU nor a driver.
"""

from __future__ import annotations

import platform
import sys

from qdqspec.backends.tensorrt.api import Product
from qdqspec.backends.tensorrt.device import DeviceState, Query, describe, main
from qdqspec.errors import BackendError

RTX = Product(
    name="TensorRT for RTX",
    module="tensorrt_rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    oldest=(1, 7),
    newest=(1, 7),
    install="pip install 'qdqspec[tensorrt-rtx]' (x86-64; 95 MB)",
)
QUERY = Query(RTX, "qdqspec.backends.tensorrt_rtx.library")


def look(index: int = 0) -> DeviceState:
    """The library and the GPU, determined once per process; without a GPU ``no_gpu`` is the reason."""
    return QUERY.look(index)


def find(index: int) -> DeviceState:
    """Import TensorRT for RTX, try to initialize CUDA, and return the result."""
    try:
        RTX.require()
    except BackendError as error:
        version = RTX.installed_version() or ""
        return DeviceState(why=error.what, install=error.cure or RTX.install, tensorrt=version)
    try:
        return describe(RTX, index)
    except BackendError as error:
        version = RTX.installed_version() or ""
        facts = {
            "tensorrt-for-rtx": version,
            "gpu": f"none: engines are built, not run ({error.what})",
            "system": platform.platform(),
            "python": platform.python_version(),
        }
        return DeviceState(tensorrt=version, no_gpu=error.what, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:], find)
