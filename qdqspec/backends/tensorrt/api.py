"""The products with TensorRT's Python API, and the differences between their versions, resolved by name.

Numbers of enum members changed between the major versions (``STRONGLY_TYPED`` from 1 to 0, where 1 is now another
flag), and members and whole attributes were removed: this package uses no numbers, and accesses a name that is not in
every version with `optional`.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqspec.backends._engine import import_library
from qdqspec.backends._nvidia.cuda import INSTALL
from qdqspec.errors import BackendError, BackendUnavailableError

if TYPE_CHECKING:
    import tensorrt as trt


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
    install=INSTALL,
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

# TensorRT's name of an element type, and numpy's. `trt.nptype` has none for the last two.
_NUMPY = {
    "FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32", "BOOL": "bool", "UINT8": "uint8",
    "INT64": "int64", "BF16": "bfloat16", "FP8": "float8_e4m3fn",
}  # fmt: skip


def parts(version: str) -> tuple[int, int]:
    """Major and minor of a version text; (0, 0) if it is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def optional(owner: object, name: str) -> Any:
    """An attribute or enum member that some versions do not have; ``None`` in those."""
    return getattr(owner, name, None)


def required(owner: object, name: str, wanted_by: str) -> Any:
    """The same for an attribute that the user requested: an error if it is missing."""
    found = optional(owner, name)
    if found is None:
        raise BackendError(
            f"{wanted_by} cannot be used: this version of TensorRT has no {name}",
            cure="leave the option out, or install the version it is for",
        )
    return found


def network_flags() -> int:
    """The flags of a strongly typed network. TensorRT 11 has only this kind, and later versions may drop the flag."""
    import tensorrt as trt

    member = optional(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    return 0 if member is None else 1 << int(member)


def numpy_dtype(dtype: trt.DataType, tensor: str) -> np.dtype[np.generic]:
    """The numpy type of a tensor's elements on the host; raises `BackendError` for packed ones."""
    import ml_dtypes  # types that are not part of numpy

    name = _NUMPY.get(dtype.name)
    if name is None:
        raise BackendError(
            f"tensor '{tensor}' has elements of type {dtype.name}, which cannot be exchanged with numpy",
            cure="end the model with a type that numpy knows",
        )
    found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name, name))
    return found
