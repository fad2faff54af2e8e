"""The installed product of NVIDIA, and the GPU, which a separate process queries.

A process that has initialized CUDA cannot be forked, and every candidate is built in a forked child. So the
main process neither calls CUDA nor imports TensorRT: ``python -m qdqspec.backends.tensorrt.device MODULE INDEX``
does, prints the result as one line of JSON, and exits. A crash of a driver ends that process only.

nvidia-smi tells the state of GPUs during measurements. It numbers them by their place on the bus, and ignores
``CUDA_VISIBLE_DEVICES``; CUDA numbers the visible ones, by default the fastest first. `environment` makes CUDA use
nvidia-smi's order. Samples taken while the GPU was throttled, or at different clocks, are not comparable; a `GpuWatch`
records both.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from qdqspec._core.programs import python_command
from qdqspec._core.records import from_data, to_data
from qdqspec._core.units import signal_text
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._engine import import_library
from qdqspec.backends.tensorrt import cuda
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
        if settings.get("compute mode") == "Exclusive_Process":
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


# ---- nvidia-smi ---------------------------------------------------------------------------------

_GPU = (("name", "GPU"), ("compute_cap", "compute capability"), ("driver_version", "driver"))
_SECONDS = 10.0
_SETTINGS = (
    ("driver_version", "driver version"),
    ("compute_mode", "compute mode"),
    ("mig.mode.current", "MIG"),
)


def environment() -> dict[str, str]:
    """The environment for a process that uses CUDA, in which GPUs have the same numbers as in nvidia-smi."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}


def gpu_facts(index: int = 0) -> dict[str, str]:
    """``GPU``, ``compute capability`` and ``driver`` of a GPU; empty if there is none, as on Jetson.

    ``index`` is CUDA's; nvidia-smi takes a number or a UUID of ``CUDA_VISIBLE_DEVICES``.
    """
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    own = visible[index] if index < len(visible) else "none"
    return _queried(own if visible else str(index), 30.0, _GPU)


def capability_of(facts: dict[str, str]) -> tuple[int, int]:
    """The compute capability as numbers; (0, 0) if it is not known."""
    major, _, minor = facts.get("compute capability", "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


@cache
def _queried(gpu: str, seconds: float, names: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The values of nvidia-smi's fields by our names for them; empty if they are not known."""
    row = query(gpu, [field for field, _ in names], seconds=seconds)
    return {} if row is None else dict(zip((name for _, name in names), row, strict=True))


def query(gpu: str, fields: Sequence[str], *, seconds: float) -> list[str] | None:
    """The values of nvidia-smi's ``fields`` for a GPU, without units; ``None`` if it gives none in time."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = list(csv.reader(done.stdout.splitlines()[:1], skipinitialspace=True))
    return rows[0] if not done.returncode and rows and len(rows[0]) == len(fields) else None


# Drivers from 535 on call them event reasons; the older name is tried if that is unknown.
_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of NVML's nvmlClocksEventReasons that mean a lower clock than requested; idle and set clocks do not.
_THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class GpuWatch:
    """Reads the clock of a GPU while an engine is timed, and notes conditions that make samples unreliable.

    ``gpu`` is an argument of nvidia-smi's ``-i``: a PCI address, an index or a UUID. ``every`` is the time between two
    queries in seconds: each takes some tens of milliseconds. ``moved`` is the ratio of two clocks of one engine from
    which they are noted.
    """

    def __init__(self, gpu: str, every: float = 5.0, moved: float = 1.03) -> None:
        self._gpu = gpu
        self._every = every
        self._moved = moved
        self._next = -math.inf
        self._reasons: dict[str, None] = {}
        self._clocks: list[float] = []  # MHz

    def observe(self) -> None:
        """Read the state again, if the last reading was some seconds ago and nvidia-smi answers."""
        if time.perf_counter() < self._next:
            return
        self._next = math.inf
        for reasons in _REASON_FIELDS:
            row = query(self._gpu, ("clocks.sm", reasons), seconds=_SECONDS)
            if row is not None:
                self._next = time.perf_counter() + self._every
                with suppress(ValueError):  # [N/A], [Not Supported]
                    self._clocks += [clock] if 0 < (clock := float(row[0])) < math.inf else []
                with suppress(ValueError):
                    bits = int(row[1], 16)
                    self._reasons |= {name: None for bit, name in _THROTTLED.items() if bits & bit}
                return

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on conditions that make the samples unreliable."""
        found = []
        if self._reasons:
            found.append(f"the GPU was throttled while it was timed: {', '.join(self._reasons)}")
        low, high = min(self._clocks, default=0.0), max(self._clocks, default=0.0)
        if high > self._moved * low:
            found.append(
                f"the GPU's clock moved between {low:g} and {high:g} MHz: lock it (nvidia-smi --lock-gpu-clocks)"
            )
        return tuple(found)


def gpu_settings(gpu: str) -> dict[str, str]:
    """Driver version, compute mode and MIG mode of a GPU, if they are known."""
    return _queried(gpu, _SECONDS, _SETTINGS)


if __name__ == "__main__":
    found = find(PRODUCTS[sys.argv[1]], int(sys.argv[2]))
    sys.stdout.write(f"\n{json.dumps(to_data(found))}\n")
