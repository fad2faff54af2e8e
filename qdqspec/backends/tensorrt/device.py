"""The installed product of NVIDIA, and the GPU, which a separate process queries.

A process that has initialized CUDA cannot be forked, and every candidate is built in a forked child. So the
main process neither calls CUDA nor imports TensorRT: ``python -m qdqspec.backends.tensorrt.device MODULE INDEX``
does, prints the result as one line of JSON, and exits. A crash of a driver ends that process only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from qdqspec._core.programs import python_command
from qdqspec._core.records import from_data, to_data
from qdqspec._core.units import signal_text
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._engine import import_library
from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.smi import gpu_settings
from qdqspec.errors import BackendError, BackendUnavailableError

_TIMEOUT = 180.0  # seconds; libraries of several gigabytes may be read from a slow disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of NVIDIA with this API. Versions of its ``newest`` major version are accepted.

    ``newest`` is the version that the names were checked against, ``distributions`` are the packages that may have it.
    One that does not need a GPU builds engines without.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    oldest: tuple[int, int]
    newest: tuple[int, int]
    install: str
    needs_gpu: bool = True

    @property
    def slug(self) -> str:
        """The name in facts: ``tensorrt-for-rtx``."""
        return self.name.lower().replace(" ", "-")

    def installed_version(self) -> str | None:
        """The version of the installed package, without importing it; ``None`` if it is not installed."""
        for name in self.distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None

    def unsupported(self, version: str) -> str | None:
        """The reason why a version cannot be used, or ``None`` if it can."""
        if parts(version) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            return f"{self.name} {version} is too old: {oldest} is the oldest that qdqspec knows"
        if parts(version)[0] > self.newest[0]:
            return f"{self.name} {version} is too new: qdqspec knows none after {self.newest[0]}"
        return None

    def require(self) -> None:
        """Make ``import tensorrt`` in this process import this product: the products share their API.

        Raises `BackendUnavailableError` if it cannot be imported, its version is unknown, or this process has
        imported another product.
        """
        bindings = import_library(self.module, self.install)
        if why := self.unsupported(bindings.__version__):
            raise BackendUnavailableError(why, cure=self.install)
        if sys.modules.setdefault("tensorrt", bindings) is not bindings:
            raise BackendUnavailableError(
                f"{self.name} cannot be used in a process that has imported another product with TensorRT's API",
                cure="use each backend in a process of its own, as sessions do",
            )


TENSORRT = Product(
    name="TensorRT",
    module="tensorrt",
    # The first is missing if an extra selected one of the others.
    distributions=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    oldest=(10, 9),
    newest=(11, 4),
    install=cuda.INSTALL,
)
RTX = Product(
    name="TensorRT for RTX",
    module="tensorrt_rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    oldest=(1, 7),
    newest=(1, 7),
    install="pip install 'qdqspec[tensorrt-rtx]' (x86-64; 95 MB)",
    needs_gpu=False,
)
PRODUCTS = {product.module: product for product in (TENSORRT, RTX)}


def parts(version: str) -> tuple[int, int]:
    """Major and minor of a version text; (0, 0) if it is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# ---- the query ------------------------------------------------------------------------------------


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
    host = {"system": platform.platform(), "python": platform.python_version()}
    try:
        product.require()
        is_imported = True
        if index >= (count := cuda.count_devices()):
            what = f"there is no GPU {index}: {count} can be used"
            raise BackendError(what, cure="choose another with --qdq-device")
        gpu, settings = cuda.describe(index), gpu_settings(cuda.bus_id(index))
        if cuda.is_exclusive(index):
            raise BackendError(
                "the GPU is in compute mode EXCLUSIVE_PROCESS, but engines that are compared are open in two processes",
                cure="nvidia-smi --compute-mode=DEFAULT",
            )
    except BackendError as error:
        if product.needs_gpu or not is_imported:
            cure = error.cure or product.install
            return DeviceState(why=error.what, install=cure, tensorrt=version, facts=facts)
        facts |= {"gpu": f"none: engines are built, not run ({error.what})", **host}
        return DeviceState(tensorrt=version, no_gpu=error.what, facts=facts)
    version = str(sys.modules["tensorrt"].__version__)
    facts |= {
        product.slug: version,
        "gpu": gpu.name,
        "compute capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "memory": f"{gpu.memory_bytes / 2**30:.0f} GiB",
        "driver": f"for CUDA {gpu.driver}",
        **settings,
        "cuda-bindings": f"for CUDA {gpu.runtime}",
        **host,
    }
    if parts(version) > product.newest:
        major, minor = product.newest
        facts["note"] = f"qdqspec was checked against {product.name} up to {major}.{minor}"
    return DeviceState(tensorrt=version, gpu=gpu.name, capability=gpu.capability, facts=facts)


if __name__ == "__main__":
    found = find(PRODUCTS[sys.argv[1]], int(sys.argv[2]))
    sys.stdout.write(f"\n{json.dumps(to_data(found))}\n")
