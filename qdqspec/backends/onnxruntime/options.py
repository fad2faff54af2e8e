"""The options of ONNX Runtime, ``onnxruntime.WORD=VALUE``.

``optimization`` is the level of graph optimization: ``all`` (ONNX Runtime's default), ``extended``,
``basic``, or ``off``, with which every QuantizeLinear and DequantizeLinear is computed as the ONNX standard defines
it and all other operators in floating point. ``plugins`` are libraries of custom operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qdqspec.backends.base import BuildOptions
from qdqspec.config.declared import LIBRARIES, BackendOption, BackendOptions, one_of

AS_DEFINED = "off"
FULL = "all"

LEVELS = {
    FULL: "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    AS_DEFINED: "ORT_DISABLE_ALL",
}

_PROVIDER = (
    "the CPU provider is the one whose kernels qdqspec knows",
    "for TensorRT take --backend tensorrt or trtexec; see docs/tensorrt.md for the other providers",
)

OPTIONS = BackendOptions(
    backend="onnxruntime",
    options=(
        BackendOption(
            word="optimization",
            type=one_of(*LEVELS),
            in_files=True,
            help="How far ONNX Runtime rewrites a model before it runs it.",
            default=FULL,
        ),
        BackendOption(
            word="plugins",
            type=LIBRARIES,
            in_files=False,
            help="Libraries of custom operators.",
            flag="plugin",
        ),
    ),
    refused={"provider": _PROVIDER, "providers": _PROVIDER},
)


def level_from(extra: Mapping[str, str]) -> str:
    """A key of `LEVELS`; raises `ConfigError` for an unknown option or value."""
    return str(OPTIONS.read(extra).get("optimization", FULL))


def libraries_from(extra: Mapping[str, str]) -> tuple[Path, ...]:
    """The libraries of custom operators to load."""
    libraries: tuple[Path, ...] = OPTIONS.read(extra).get("plugins", ())
    return libraries


_PROGRAM = """import onnxruntime as ort

settings = ort.SessionOptions()
settings.intra_op_num_threads = {threads}
settings.graph_optimization_level = ort.GraphOptimizationLevel.{level}
{libraries}session = ort.InferenceSession(MODEL, settings, providers=["CPUExecutionProvider"])
session.run(None, FEEDS)
print("ONNX Runtime", ort.__version__, "builds and runs the model")
"""


def program(options: BuildOptions) -> str:
    """A Python program that builds ``MODEL`` and runs it on ``FEEDS``."""
    libraries = (
        f"settings.register_custom_ops_library({str(library)!r})\n"
        for library in libraries_from(options.extra)
    )
    return _PROGRAM.format(
        threads=options.threads, level=LEVELS[level_from(options.extra)], libraries="".join(libraries)
    )
