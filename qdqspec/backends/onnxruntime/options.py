"""The options of ONNX Runtime, ``onnxruntime.WORD=VALUE``.

``optimization`` is the level of graph optimization: ``all`` (ONNX Runtime's default), ``extended``,
``basic``, or ``off``, with which every QuantizeLinear and DequantizeLinear is computed as the ONNX standard defines
it and all other operators in floating point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qdqspec.backends.base import BuildOptions
from qdqspec.config.declared import declare, option
from qdqspec.config.values import LIBRARIES, one_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeOptions:
    """The options after ``onnxruntime.`` in the configuration."""

    optimization: str = option(
        one_of(*LEVELS), "How far ONNX Runtime rewrites a model before it runs it.", FULL
    )
    plugins: tuple[Path, ...] = option(
        LIBRARIES, "Libraries of custom operators.", (), shown="", in_files=False, flag="plugin"
    )


OPTIONS = declare("onnxruntime", OnnxRuntimeOptions, {"provider": _PROVIDER, "providers": _PROVIDER})


def options_from(extra: Mapping[str, str]) -> OnnxRuntimeOptions:
    """Read the options that begin with ``onnxruntime.``; raise `ConfigError` for an unknown or invalid one."""
    return OnnxRuntimeOptions(**OPTIONS.read(extra))


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
    words = options_from(options.extra)
    libraries = (f"settings.register_custom_ops_library({str(library)!r})\n" for library in words.plugins)
    level = LEVELS[words.optimization]
    return _PROGRAM.format(threads=options.threads, level=level, libraries="".join(libraries))
