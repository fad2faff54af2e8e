"""The installed product of NVIDIA and the GPU, queried by a separate process.

A process that has initialized CUDA cannot be forked, and every candidate is built in a forked child. So the
main process neither calls CUDA nor imports TensorRT: ``python -m qdqspec.backends.tensorrt.device MODULE INDEX``
does, prints the result as one line of JSON, and exits. A crash of a driver ends that process only.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from qdqspec._core.programs import python_command
from qdqspec._core.records import from_data, to_data
from qdqspec._core.units import signal_text
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._nvidia import cuda
from qdqspec.backends._nvidia.smi import gpu_settings
from qdqspec.backends.tensorrt.api import PRODUCTS, Product, parts
from qdqspec.errors import BackendError

_TIMEOUT = 180.0  # seconds; libraries of several gigabytes may be read from a slow disk


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """The result of the query. ``why`` is empty if TensorRT can be used; ``capability`` is (0, 0) without a GPU.

    ``no_gpu`` is the reason why a product that can build without a GPU finds none.
    """

    why: str = ""
    install: str = ""
    tensorrt: str = ""
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    no_gpu: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """Product and compute capability for keys: ``nvidia-h100-pcie-sm90``."""
        return f"{slug_from_text(self.gpu)}-sm{self.capability[0]}{self.capability[1]}"


def look(product: Product, index: int = 0) -> DeviceState:
    """The product and the GPU, determined once per process. Never raises; does not initialize CUDA here."""
    return _look(product, index, os.environ.get("CUDA_VISIBLE_DEVICES"), tuple(sys.path))


@cache
def _look(product: Product, index: int, visible: str | None, paths: tuple[str, ...]) -> DeviceState:  # noqa: ARG001 - what it depends on
    probe = f"the process that looks for {product.name}"
    see_why = f"import {product.module} in a Python shell to see why"
    if product.installed_version() is None:
        return DeviceState(why=f"{product.module} is not installed", install=product.install)
    try:
        command, env = python_command(__spec__.name, product.module, str(index))
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return DeviceState(why=f"{probe} gave no answer for {_TIMEOUT:g} s and was ended", install=see_why)
    except OSError as error:
        return DeviceState(why=f"{probe} could not be started: {error}", install=product.install)
    try:
        return from_data(DeviceState, json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        code, words = done.returncode, " ".join(done.stderr.split())[-300:]
        end = f"ended with code {code}" if code >= 0 else f"was killed by {signal_text(-code)}"
        return DeviceState(why=f"{probe} {end}; the end of its log: {words}", install=see_why)


# ---- in the separate process --------------------------------------------------------------------


def find(product: Product, index: int) -> DeviceState:
    """Import the product, initialize CUDA, and return the result."""
    version = product.installed_version() or ""
    facts, is_imported = {product.slug: version} if version else {}, False
    try:
        product.require()
        is_imported = True
        return _describe(product, index)
    except BackendError as error:
        if product.needs_gpu or not is_imported:
            cure = error.cure or product.install
            return DeviceState(why=error.what, install=cure, tensorrt=version, facts=facts)
        facts |= {"gpu": f"none: engines are built, not run ({error.what})", **_host()}
        return DeviceState(tensorrt=version, no_gpu=error.what, facts=facts)


def _host() -> dict[str, str]:
    return {"system": platform.platform(), "python": platform.python_version()}


def _describe(product: Product, index: int) -> DeviceState:
    """The state of a usable GPU with an imported product. Initializes CUDA; raises `BackendError` without a GPU."""
    import tensorrt as trt

    version, gpu, settings = trt.__version__, _gpu(index), gpu_settings(cuda.bus_id(index))
    if cuda.is_exclusive(index):
        raise BackendError(
            "the GPU is in compute mode EXCLUSIVE_PROCESS, but engines that are compared are open in two processes",
            cure="nvidia-smi --compute-mode=DEFAULT",
        )
    facts = {
        product.slug: version,
        "gpu": gpu.name,
        "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "memory": f"{gpu.memory_bytes / 2**30:.0f} GiB",
        "driver": f"for CUDA {gpu.driver}",
        **settings,
        "cuda-bindings": f"for CUDA {gpu.runtime}",
        **_host(),
    }
    if parts(version) > product.newest:
        major, minor = product.newest
        facts["note"] = f"qdqspec was checked against {product.name} up to {major}.{minor}"
    return DeviceState(tensorrt=version, gpu=gpu.name, capability=gpu.capability, facts=facts)


def _gpu(index: int) -> cuda.Gpu:
    count = cuda.count_devices()
    if index >= count:
        what = f"there is no GPU {index}: {count} can be used"
        raise BackendError(what, cure="choose another with --qdq-device")
    return cuda.describe(index)


def main(module: str, index: str) -> None:
    """Print the result as one line of JSON."""
    sys.stdout.write("\n" + json.dumps(to_data(find(PRODUCTS[module], int(index)))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
