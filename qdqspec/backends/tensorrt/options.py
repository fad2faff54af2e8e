"""The options of TensorRT, ``tensorrt.WORD=VALUE``, with their defaults in brackets.

- ``tensorrt.opt-level``: builder optimization level, 1 to 5 (TensorRT's default, 3).
- ``tensorrt.workspace``: MiB that kernels may use as scratch memory (all available).
- ``tensorrt.avg-timing``: number of timings of each kernel by the builder (8, as trtexec).
- ``tensorrt.max-tactics``: largest number of kernels considered per layer (TensorRT's default).
- ``tensorrt.tiling``: ``none``, ``fast``, ``moderate`` or ``full`` (none).
- ``tensorrt.aux-streams``: number of streams an engine may use besides its own (TensorRT's default).
- ``tensorrt.tf32``, ``tensorrt.sparse``: switches (on, off).
- ``tensorrt.hardware``: hardware compatibility of the engine: ``none``, ``ampere-plus`` or
  ``same-compute-capability`` (none). ``tensorrt.version-compatible``: whether it runs on later versions too (off).
- ``tensorrt.build-route``: TensorRT 11's compiler knobs, ``-name=value`` separated by spaces (the compiler's default).
- ``tensorrt.timing-cache``: a file that builds read and extend, kept between runs (one in the folder of the run).
- ``tensorrt.plugins``: plugin libraries, separated as in PATH; on the command line only, like ``build-route`` and
  ``timing-cache``.
- ``tensorrt.cuda-graph``: whether runs are timed as CUDA graphs if that is possible (on).
- ``tensorrt.warmup-ms``: duration of the warm-up of an idle engine before it is timed (100).
- ``tensorrt.verbose``: whether TensorRT's verbose log is written to the build's log (off).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from qdqspec.config.declared import (
    LIBRARIES,
    PATH,
    SWITCH,
    TEXT,
    BackendOption,
    BackendOptions,
    ValueType,
    one_of,
    whole,
)

Tiling: TypeAlias = Literal["none", "fast", "moderate", "full"]
Hardware: TypeAlias = Literal["none", "ampere-plus", "same-compute-capability"]

_NO_TIMING_CACHE = " (0 takes the first kernel that works and does not use the timing cache)"


def _in_files(word: str, value: ValueType, text: str, default: str = "TensorRT's") -> BackendOption:
    return BackendOption(word=word, type=value, in_files=True, help=text, default=default)


# In a strongly typed network the model determines all types, and TensorRT 11 has no other kind.
_TYPED = (
    "networks are built strongly typed, in the types the model has",
    "convert the model itself to that type, for example to float16",
)

OPTIONS = BackendOptions(
    backend="tensorrt",
    options=(
        _in_files(
            "opt-level", whole(1, 5, _NO_TIMING_CACHE), "Builder optimization level.", "TensorRT's (3)"
        ),
        _in_files("workspace", whole(1), "MiB that kernels may use as scratch memory.", "all there is"),
        _in_files("avg-timing", whole(1), "How often the builder times each kernel.", "8"),
        _in_files("max-tactics", whole(1), "How many kernels it considers a layer at most."),
        _in_files("tiling", one_of(*get_args(Tiling)), "Tiling optimization.", "none"),
        _in_files("aux-streams", whole(0), "Streams an engine may use besides its own."),
        _in_files("tf32", SWITCH, "Whether float32 may be computed as TF32.", "on"),
        _in_files("sparse", SWITCH, "Whether kernels for sparse weights may be chosen.", "off"),
        _in_files("hardware", one_of(*get_args(Hardware)), "What else the engine must run on.", "none"),
        _in_files("version-compatible", SWITCH, "Whether it must run in later versions too.", "off"),
        BackendOption(
            word="build-route",
            type=TEXT,
            in_files=False,
            help="TensorRT 11's compiler knobs, -name=value separated by spaces.",
            default="the compiler's",
        ),
        BackendOption(
            word="timing-cache",
            type=PATH,
            in_files=False,
            help="A timing cache that builds read and extend, kept across runs.",
            default="one in the run's folder",
        ),
        BackendOption(
            word="plugins", type=LIBRARIES, in_files=False, help="Plugin libraries.", flag="plugin"
        ),
        _in_files("cuda-graph", SWITCH, "Whether runs are timed as CUDA graphs where possible.", "on"),
        _in_files("warmup-ms", whole(0), "How long an idle engine runs before it is timed.", "100"),
        _in_files("verbose", SWITCH, "Whether TensorRT's whole log goes to the build's.", "off"),
    ),
    refused=dict.fromkeys(("fp16", "bf16", "int8", "fp8", "int4", "fp4", "best"), _TYPED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtOptions:
    """Options of building and timing; the module's docstring describes them. ``None`` is TensorRT's default."""

    opt_level: int | None = None
    workspace: int | None = None
    avg_timing: int = 8
    max_tactics: int | None = None
    tiling: Tiling | None = None
    aux_streams: int | None = None
    tf32: bool = True
    sparse: bool = False
    hardware: Hardware = "none"
    version_compatible: bool = False
    build_route: str | None = None
    timing_cache: Path | None = None
    plugins: tuple[Path, ...] = ()
    cuda_graph: bool = True
    warmup_ms: int = 100
    verbose: bool = False


def options_from(extra: Mapping[str, str]) -> TensorRtOptions:
    """Read the options that begin with ``tensorrt.``; raise `ConfigError` for an unknown or invalid one."""
    return TensorRtOptions(**OPTIONS.read(extra))
